"""The way of a data set from its source to its final name.

The source is read once. Train rows are checked, counted and dealt out to files on disk; when all have been seen, they
are mapped, shuffled and written. The other splits are mapped and written as they come, with what train has taught.
"""

import contextlib
import fcntl
import itertools
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from rechpc.choices import IdMapping
from rechpc.config import DataConfig
from rechpc.dataset import Index, Split, write_index
from rechpc.errors import ConfigError, DataError
from rechpc.prepare import layout, sources
from rechpc.prepare.features import Features
from rechpc.prepare.layout import SPLITS, SourceFile
from rechpc.prepare.rows import LABEL, Judge, Rows, typed
from rechpc.prepare.shards import Shards, chunked, data_file, shuffled
from rechpc.rundir import fsync_directory

_PROGRESS_S = 10.0
_WATCHED_ROWS = 2**22  # of each table: ids are spread evenly, so that these show how full it is
_CROWDED = 0.25  # the share of ids that share a row, above which the report says so


def prepare(config: DataConfig) -> str:
    """Convert `data.source` into a new data set at `data.path`; returns a report, one line a split.

    The data set appears at once, by a rename, when it is complete; whatever else happens leaves nothing that a reader
    would take for one, and what a killed process leaves is removed by the next one.
    Raises ConfigError before anything is written, DataError for a bad row or a failed read or write.
    """
    files = layout.files(config)
    target = layout.target(config)
    for file in files[1:]:  # the first one is read at once anyway
        _check_start(file, config)
    with _temporary(target) as temporary:
        try:
            report = _convert(files, config, temporary)
            temporary.rename(target)
            fsync_directory(target.parent)
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{target}: cannot be written ({error}); free some space or set another data.path="
            ) from error
    return f"{report}\ndata set: {target}"


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """An empty folder beside the target that no other process uses; removed at the end, if it is still there."""
    path = target.with_name(f"{target.name}.tmp")
    lock = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise ConfigError(f"data.path={target}: cannot be made there ({error}); choose another") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.stat(lock)  # or one that has just ended has removed it
        except OSError as error:
            raise ConfigError(f"data.path={target}: another prepare is making it; wait, or choose another") from error
        try:
            shutil.rmtree(path, ignore_errors=True)  # of a killed process
            path.mkdir()
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _check_start(file: SourceFile, config: DataConfig) -> None:
    """Look at the first rows, so that a wrong test file is seen now, and not after the train split has been read."""
    judge = Judge(config)
    for rows in itertools.islice(sources.read(file.path, config, judge), 1):
        typed(rows, config, judge)


def _convert(files: list[SourceFile], config: DataConfig, directory: Path) -> str:
    """Write every split and then the index into `directory`; returns a report."""
    scratch = directory / "scratch"
    scratch.mkdir()
    judge, features, tallies = Judge(config), Features(config, scratch), {}
    rng = np.random.default_rng(config.seed)
    parts = _parts(files, config, judge)
    splits: dict[str, Split] = {}
    for split, group in itertools.groupby(parts, key=lambda part: part[0]):
        frames: Iterator[pl.DataFrame] = (frame for _, frame in group)
        if split == "train":
            frames = shuffled(_observed(frames, features), scratch / "shuffle", rng)
        tally = tallies[split] = _Tally(config)
        shards, progress = Shards(directory, split, config.block_rows), _Progress(f"{split}: wrote")
        for frame in chunked(frames):
            table = features.finish(frame)
            tally.add(table, frame)
            shards.add(table)
            if split == "train":  # the others are written as they are read
                progress.show(tally.rows, tally.rows / features.rows)
        splits[split] = Split(files=shards.close(), positives=tally.positives)
    if "train" not in splits:
        raise DataError(f"data.source={config.source}: no row of the train split is left ({judge})")
    vocabularies = {}
    for number, (table, vocabulary) in enumerate(features.vocabularies().items()):
        path = directory / f"vocabulary-{number:03d}.arrow"
        vocabulary.write_ipc(path)
        vocabularies[table] = data_file(path, len(vocabulary))
    shutil.rmtree(scratch)
    index = Index(
        block_rows=config.block_rows,
        dense=config.dense,
        sparse_rows={f.name: f.rows for f in config.sparse},
        mappings=config.mappings(),
        ids_per_sample=tallies["train"].ids_per_sample,
        collision_rate=tallies["train"].collision_rate,
        id_range={f.name: _range([t.id_range[f.name] for t in tallies.values()]) for f in config.sparse},
        dense_transform=features.transform,
        dense_statistics=features.statistics,
        vocabularies=vocabularies,
        bad_rows=dict(sorted(judge.counts.items())),
        splits=splits,
    )
    write_index(directory, index)
    lines = [f"{split:5} {tallies[split]}" for split in SPLITS if split in tallies]
    lines += [f"bad rows: {judge}"] if judge.counts else []
    rates = sorted(index.collision_rate.items(), key=lambda item: -item[1])
    crowded = [f"{table} {rate:.0%}" for table, rate in rates if rate > _CROWDED]
    more = f" and {len(crowded) - 5} more tables" if len(crowded) > 5 else ""
    if crowded:
        lines.append(f"ids that share their row with others; raise its rows: {', '.join(crowded[:5])}{more}")
    return "\n".join(lines)


def _parts(files: list[SourceFile], config: DataConfig, judge: Judge) -> Iterator[tuple[str, pl.DataFrame]]:
    """The good rows of every split in turn, in their order, with the name of the split."""
    sizes = [file.path.stat().st_size for file in files]
    progress = _Progress("read")
    is_text: dict[str, bool] = {}
    num_rows, done = 0, 0
    for file, size in zip(files, sizes, strict=True):
        for split, rows in _cut(file, config, judge):
            for feature in config.sparse:
                text = rows.frame[feature.name].dtype in (pl.String, pl.Binary)
                if is_text.setdefault(feature.name, text) != text and feature.mapping is not IdMapping.as_is:
                    raise DataError(
                        f"{file.path}: {feature.name!r} is text in some files and a number in others, which gives the "
                        "same value two ids; write all files alike"
                    )
            frame = typed(rows, config, judge)
            num_rows += len(rows.frame)
            progress.show(num_rows, (done + rows.share * size) / max(sum(sizes), 1))
            if len(frame):
                yield split, frame
        done += size
    progress.show(num_rows, 1.0, is_last=True)


def _cut(file: SourceFile, config: DataConfig, judge: Judge) -> Iterator[tuple[str, Rows]]:
    """The rows of a file, those of each split by themselves."""
    if len(file.ends) == 1:
        for split in file.ends:
            yield from ((split, rows) for rows in sources.read(file.path, config, judge))
        return
    # By order, for such logs are ordered by time: nothing of the future may be in the train split.
    n = sources.count(file.path, config)
    if n < 10:
        raise DataError(f"{file.path}: {n} rows, expected at least 10 to split by order; give a larger file")
    last_numbers = [round(share * 10) * n // 10 for share in file.ends.values()]
    for rows in sources.read(file.path, config, judge):
        ends = np.searchsorted(rows.numbers_N, last_numbers, side="right").tolist()
        if ends[-1] < len(rows.numbers_N):
            raise DataError(f"{file.path}: has more than the {n} rows counted; prepare it when nobody writes to it")
        for split, start, end in zip(file.ends, [0, *ends], ends, strict=False):
            if start < end:
                yield split, rows.part(start, end)


def _observed(frames: Iterable[pl.DataFrame], features: Features) -> Iterator[pl.DataFrame]:
    for frame in chunked(frames):
        features.observe(frame)
        yield frame


def _range(ranges: list[list[int]]) -> list[int]:
    """The smallest and the largest id of all splits; nothing where there is no id."""
    ends = [end for found in ranges for end in found]
    return [min(ends), max(ends)] if ends else []


class _Tally:
    """What a split holds."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self.rows = self.positives = self._dense_missing = self._sparse_missing = 0
        self._ids = dict.fromkeys((f.name for f in config.sparse), 0)
        self.id_range: dict[str, list[int]] = {f.name: [] for f in config.sparse}
        hashed = {f.table_name: f.rows for f in config.sparse if f.mapping is IdMapping.hash and f.rows > 1}
        self._used = {table: np.zeros(min(rows, _WATCHED_ROWS), bool) for table, rows in hashed.items()}

    def add(self, table: pa.Table, frame: pl.DataFrame) -> None:
        self.rows += len(table)
        self.positives += int(frame[LABEL].sum())
        self._dense_missing += sum(frame[name].null_count() for name in self._config.dense)
        for feature in self._config.sparse:
            column = table[feature.name].combine_chunks()
            ids = column.flatten() if pa.types.is_list(column.type) else column
            self._ids[feature.name] += len(ids)
            if (used := self._used.get(feature.table_name)) is not None:
                ids_N = ids.to_numpy()
                used[ids_N if feature.rows == len(used) else ids_N[ids_N < len(used)]] = True
            if feature.mapping is not IdMapping.as_is:
                self._sparse_missing += int(np.count_nonzero(ids.to_numpy() == 0))
            if len(ids):
                ends = pc.min_max(ids).as_py()
                self.id_range[feature.name] = _range([self.id_range[feature.name], [ends["min"], ends["max"]]])

    @property
    def collision_rate(self) -> dict[str, float]:
        """By table with mapping=hash, the chance that an id shares its row with another: the share of rows in use."""
        return {table: float(used[1:].mean()) for table, used in self._used.items()}

    @property
    def ids_per_sample(self) -> dict[str, float]:
        return {name: count / self.rows for name, count in self._ids.items()}

    def __str__(self) -> str:
        dense_missing = self._dense_missing / (self.rows * len(self._config.dense))
        sparse_missing = self._sparse_missing / max(sum(self._ids.values()), 1)
        return (
            f"{self.rows:,} rows, {self.positives / self.rows:.2%} positive, dense {dense_missing:.1%} missing, "
            f"sparse {sparse_missing:.1%} missing, {sum(self.ids_per_sample.values()):.4g} ids a row"
        )


class _Progress:
    """Rows, rows/s and the time left on stderr: one line that is written over on a terminal, else one now and then."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._on_terminal = sys.stderr.isatty()
        self._start_s = self._shown_s = time.monotonic()

    def show(self, num_rows: int, share: float, *, is_last: bool = False) -> None:
        """`share` of the whole is done."""
        now_s = time.monotonic()
        if not is_last and now_s - self._shown_s < (0.2 if self._on_terminal else _PROGRESS_S):
            return
        self._shown_s = now_s
        spent_s = max(now_s - self._start_s, 1e-9)
        left = "" if is_last else f", {spent_s * (1 - share) / max(share, 1e-9):,.0f} s left"
        text = f"{self._what} {num_rows:,} rows, {share:.0%}, {num_rows / spent_s:,.0f} rows/s{left}"
        erase, end = ("\033[K", "\n" if is_last else "\r") if self._on_terminal else ("", "\n")
        print(text + erase, end=end, file=sys.stderr, flush=True)
