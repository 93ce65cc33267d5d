"""A prepared data set on disk: its index, which says what the Arrow files beside it hold.

`rechpc.prepare` writes it, the ranks read it, and `submit` checks it against the configuration on the login
node. Standard library only; the Arrow files themselves are read by `rechpc.rank.data`.

Columns of an Arrow file: `label` (int8, 0 or 1), `dense` (a fixed-size list of float32, in the order of the
index), and one column a sparse feature, int32 (one id) or list<int32> (a bag of ids). Record batches hold
`block_rows` rows; only the last one of a split may hold fewer.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rechpc.config import DataConfig
from rechpc.errors import DataError
from rechpc.rundir import write_json

INDEX_NAME = "index.json"
FORMAT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """One Arrow IPC file of a split."""

    name: str
    rows: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """One split: its files in order, and its number of positive labels."""

    files: list[DataFile]
    positives: int

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """What a prepared data set holds."""

    block_rows: int
    dense: list[str]
    sparse_rows: dict[str, int]  # rows of the table that each sparse feature was mapped to
    mappings: dict[str, str]  # what was done to the values of each feature, as DataConfig.mappings says it
    ids_per_sample: dict[str, float]  # mean pooling factor of each sparse feature, over the train split
    id_range: dict[str, list[int]]  # smallest and largest id of each sparse feature, over all splits; [] without any
    dense_transform: dict[str, dict[str, float]]  # parameters fitted on the train split, by feature
    dense_statistics: dict[str, dict[str, float]]  # of the train split, before the transform, by feature
    vocabularies: dict[str, DataFile]  # by table: key, count and id of the values that have an id of their own
    bad_rows: dict[str, int]  # rows that were skipped or fixed, by kind
    splits: dict[str, Split]
    # Of the train split, by table with mapping=hash: the share of rows in use, which is the chance that an id shares
    # its row with another where keys are spread evenly. Older data sets do not say.
    collision_rate: dict[str, float] = field(default_factory=dict)

    def files(self) -> list[DataFile]:
        """All files of the data set."""
        return [file for split in self.splits.values() for file in split.files] + list(self.vocabularies.values())


def write_index(path: Path, index: Index) -> None:
    """Write the index of the data set at `path`; this makes it visible to readers, so it comes last."""
    write_json(path / INDEX_NAME, {"format": FORMAT, **asdict(index)})


def read_index(path: Path) -> Index:
    """The index of the data set at `path`, with every file of it present in its full size."""
    try:
        raw = json.loads((path / INDEX_NAME).read_text())
    except FileNotFoundError as error:
        raise DataError(
            f"data.path={path}: no {INDEX_NAME} there; expected a data set made by python -m rechpc.prepare"
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path / INDEX_NAME}: cannot be read ({error}); prepare the data set again") from error
    if not isinstance(raw, dict) or raw.pop("format", None) != FORMAT:
        raise DataError(f"{path / INDEX_NAME}: not of format {FORMAT}; prepare the data set again")
    try:
        splits = {
            name: Split(files=[DataFile(**f) for f in s["files"]], positives=s["positives"])
            for name, s in raw.pop("splits").items()
        }
        vocabularies = {name: DataFile(**f) for name, f in raw.pop("vocabularies").items()}
        index = Index(splits=splits, vocabularies=vocabularies, **raw)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path / INDEX_NAME}: not an index ({error!r}); prepare the data set again") from error
    for file in index.files():
        _check_size(path / file.name, file)
    return index


def check_sha256(path: Path, file: DataFile) -> None:
    """Read a whole file. Raises DataError when it is not what was written."""
    try:
        with path.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}); copy or prepare the data set again") from error
    if digest != file.sha256:
        raise DataError(
            f"{path}: has changed since it was prepared (sha256 {digest[:12]}, the index says {file.sha256[:12]}); "
            "copy or prepare the data set again"
        )


def check_index(index: Index, config: DataConfig) -> None:
    """Raise DataError unless the data set has the features, and the table sizes, that the configuration says."""
    wanted = {f.name: f.rows for f in config.sparse}
    problems = [
        f"data.sparse: feature {name!r} has {rows} rows, the data set was prepared for {index.sparse_rows[name]}"
        for name, rows in wanted.items()
        if name in index.sparse_rows and index.sparse_rows[name] != rows and not config.rehearsal_rows
    ]
    mappings = config.mappings()
    problems += [
        f"data: feature {name!r} is to be mapped by {mappings[name]}, the data set was by {found}"
        for name, found in index.mappings.items()
        if name in mappings and mappings[name] != found
    ]
    for kind, have, want in (("dense", index.dense, config.dense), ("sparse", [*index.sparse_rows], [*wanted])):
        missing, unknown = set(want) - set(have), set(have) - set(want)
        if missing:
            problems.append(f"data.{kind}: not in the data set: {sorted(missing)}")
        if unknown:
            problems.append(f"data.{kind}: in the data set but not in the configuration: {sorted(unknown)}")
        elif kind == "dense" and not missing and have != want:
            problems.append(f"data.{kind}: the data set has another order: {have}")
    if problems:
        where = f"data.path={config.path}"
        raise DataError("\n".join(f"{where}: {p}; prepare it again with this configuration" for p in problems))


def _check_size(path: Path, file: DataFile) -> None:
    size = path.stat().st_size if path.exists() else None
    if size != file.size_bytes:
        what = "is missing" if size is None else f"has {size} bytes"
        raise DataError(f"{path}: {what}, the index says {file.size_bytes}; prepare the data set again")
