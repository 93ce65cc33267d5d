"""Which files make which split, and where the data set goes."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rechpc.choices import DataKind
from rechpc.config import DataConfig
from rechpc.errors import ConfigError
from rechpc.prepare import criteo, sources

SPLITS = ("train", "val", "test")
_STEMS = {"train": ("train",), "val": ("val", "valid", "dev"), "test": ("test",)}
_TEXT = (".tsv", ".txt", ".csv")
_SUFFIXES = {
    DataKind.criteo: (*_TEXT, *(f"{suffix}.gz" for suffix in _TEXT)),
    DataKind.csv: (*_TEXT, *(f"{suffix}.gz" for suffix in _TEXT)),
    DataKind.parquet: (".parquet",),
    DataKind.npy: (sources.LABELS,),
}
_BY_TIME = {"train": 0.8, "val": 0.9, "test": 1.0}
_LAST_DAY = {"val": 0.5, "test": 1.0}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file and its splits: the share of its rows at which each of them ends, in order."""

    path: Path
    ends: dict[str, float]


def files(config: DataConfig) -> list[SourceFile]:
    """Every file, those of the train split first. Raises ConfigError where it is not clear what they are."""
    if config.kind is DataKind.synthetic:
        raise ConfigError(
            f"data.kind={config.kind}: made on the fly, nothing to prepare; choose data=criteo_kaggle or an experiment"
        )
    if config.kind is DataKind.criteo:
        criteo.check_columns(config)
    if not config.source:
        raise ConfigError("data.source=null: expected a folder with a train and a test split, or one file; set it")
    source = Path(config.source).expanduser()
    if source.is_file():
        found = [SourceFile(source, _BY_TIME)]
    elif source.is_dir():
        found = _days(source, config) or _splits(source, config)
    else:
        raise ConfigError(f"data.source={source}: no such file or folder; expected train and test in a folder")
    for file in found:
        if not os.access(file.path, os.R_OK):
            raise ConfigError(f"data.source: {file.path} cannot be read; its permissions do not let you")
    return found


def target(config: DataConfig) -> Path:
    """Where the data set goes, with nothing there yet."""
    if not config.path:
        raise ConfigError("data.path=null: expected where the data set goes; set data.path=DIR")
    path = Path(config.path).expanduser().absolute()
    if os.path.lexists(path):
        raise ConfigError(f"data.path={path}: exists already and is never overwritten; remove it or choose another")
    return path


def _days(source: Path, config: DataConfig) -> list[SourceFile]:
    """Criteo's day_0, day_1 ...: the last one is val and test, half each, and the others are train."""
    suffix = re.escape(sources.LABELS) if config.kind is DataKind.npy else r"(\.gz)?"
    by_day: dict[int, Path] = {}
    for path in source.iterdir():
        if match := re.fullmatch(rf"day_(\d+){suffix}", path.name):
            if int(match[1]) in by_day:
                raise ConfigError(f"data.source={source}: {path.name} is there twice; move one of them away")
            by_day[int(match[1])] = path
    if not by_day:
        return []
    *train, last = (by_day[day] for day in sorted(by_day))
    if not train or sorted(by_day) != list(range(min(by_day), max(by_day) + 1)):
        have = ", ".join(f"day_{day}" for day in sorted(by_day))
        raise ConfigError(f"data.source={source}: {have}; expected two or more days without a gap")
    return [*(SourceFile(path, {"train": 1.0}) for path in train), SourceFile(last, _LAST_DAY)]


def _splits(source: Path, config: DataConfig) -> list[SourceFile]:
    found = []
    for split in SPLITS:
        named = {
            stem: paths for stem in _STEMS[split] if (paths := list(_files_of(source, stem, _SUFFIXES[config.kind])))
        }
        paths = [path for paths in named.values() for path in paths]
        single = [path for path in paths if path.parent == source]
        if len(named) > 1 or len(single) > 1 or 0 < len(single) < len(paths):
            both = " and ".join(str(path.relative_to(source)) for path in paths[:2])
            raise ConfigError(f"data.source={source}: {both} could both be the {split} split; move one of them away")
        if not paths and split != "val":
            expected = " or ".join(f"{split}{suffix}" for suffix in _SUFFIXES[config.kind][:3])
            raise ConfigError(
                f"data.source={source}: no {split} split; expected {expected} there, or parts in a folder {split}, "
                "or data.source= one labelled file that is split by order"
            )
        found += [SourceFile(path, {split: 1.0}) for path in paths]
    return found


def _files_of(source: Path, stem: str, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """A file of this stem, and the parts in a folder of this name in their order."""
    yield from (path for suffix in suffixes if (path := source / f"{stem}{suffix}").is_file())
    if (folder := source / stem).is_dir():
        yield from sorted((p for p in folder.iterdir() if p.name.endswith(suffixes)), key=_natural)


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]
