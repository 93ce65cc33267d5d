"""`python -m rechpc.prepare`: text in Criteo's format becomes a prepared data set (see rechpc.dataset).

The one file that parses text. It checks every row, and everything that it fits, it fits on the train split only.

* Dense: log1p(max(x - min, 0)), where `min` is the smallest x of the feature in the train split. A missing x is
  stored as 0. Scaling by mean and deviation too lost 0.005 AUC on 8,000 rows (6 seeds, 2026-11-30).
* Sparse: hash is an unsigned 32-bit number in hexadecimal. A missing one is stored as id 0, the others as
  1 + hash % (rows - 1); a table of one row has only id 0.
* Order: the train split is shuffled once with data.seed; val and test keep theirs.

Shapes: B rows, D dense features.
"""

import gzip
import hashlib
import os
import shlex
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from rechpc import compose
from rechpc.config import CommandConfig, DataConfig, DataKind
from rechpc.dataset import DataFile, Index, Split, write_index
from rechpc.errors import ConfigError, DataError
from rechpc.rundir import fsync_directory

HELP = """
Convert text in Criteo's format into the data set that a run reads.

  python -m rechpc.prepare experiment=criteo_8k data.source=DIR data.path=OUT

data.source  a folder with train.tsv, test.tsv and, if you have it, val.tsv (also valid or dev; .txt, .csv; .gz),
             or one labelled file, such as Kaggle's train.txt, of which the first 80 % become the train split,
             the next 10 % val and the last 10 % test
data.path    the data set to make; it must not exist
"""

DENSE = tuple(f"I{i}" for i in range(1, 14))
SPARSE = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = ("label", *DENSE, *SPARSE)
LAYOUT = f"{len(COLUMNS)} columns separated by tabs (label, I1 to I13, C1 to C26)"

_FILE_STEMS = {"train": ("train",), "val": ("val", "valid", "dev"), "test": ("test",)}
_FILE_SUFFIXES = (".tsv", ".txt", ".csv", ".tsv.gz", ".txt.gz", ".csv.gz")
_BLOCK_BYTES = 2**23  # 210k rows/s with 4 to 16 MiB, 160k with 1 MiB (2 cores of an EPYC, busy, 2026-11-30)
_MISSING = -(2**31)  # in dense columns of Rows
_PROGRESS_S = 10.0

Rows = npt.NDArray[np.void]  # one field a column: label (int8), dense integers (int32) and ids (int32)


def main(config: CommandConfig, overrides: list[str]) -> int:
    """Prepare the data set, say what it holds and what to do next."""
    try:
        report = prepare(config.data)
    except KeyboardInterrupt:
        print("interrupted: what was written so far is removed; start again when you like", file=sys.stderr)
        return 130
    print(report)
    kept = [o for o in overrides if o.partition("=")[0].lstrip("+") != "data.source"]
    print(f"next: {shlex.join(['python', '-m', 'rechpc.submit', *kept])}")
    return 0


def prepare(config: DataConfig) -> str:
    """Convert `data.source` into a new data set at `data.path`; returns a report, one line a split.

    The data set appears at once, by a rename, when it is complete; whatever else happens leaves nothing.
    Raises ConfigError before anything is written, DataError for a bad row or a failed read or write.
    """
    files = _source_files(config)
    target = _target(config)
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed process that had the same id
    try:
        try:
            temporary.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"data.path={target}: cannot be made there ({error}); choose another") from error
        report = _convert(files, config, temporary)
        temporary.rename(target)
        fsync_directory(target.parent)
    except OSError as error:
        raise DataError(f"{target}: cannot be written ({error}); free some space or set another data.path=") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return f"{report}\ndata set: {target}"


def _source_files(config: DataConfig) -> dict[str, Path]:
    """The file of each split, train first; only "train" where one file is to be split by order."""
    if config.kind is not DataKind.criteo:
        raise ConfigError(
            f"data.kind={config.kind}: made on the fly, nothing to prepare; choose data=criteo_kaggle or an experiment"
        )
    for key, names, known in (("dense", config.dense, DENSE), ("sparse", [f.name for f in config.sparse], SPARSE)):
        if unknown := sorted(set(names) - set(known)):
            raise ConfigError(f"data.{key}: no such column: {unknown}; Criteo's are {known[0]} to {known[-1]}")
    if not config.source:
        raise ConfigError("data.source=null: expected a folder with train.tsv and test.tsv, or one file; set it")
    source = Path(config.source).expanduser()
    if source.is_dir():
        files = _files_of_folder(source)
    elif source.is_file():
        files = {"train": source}
    else:
        raise ConfigError(f"data.source={source}: no such file or folder; expected train.tsv and test.tsv in a folder")
    for path in files.values():
        _check_start(path, config)
    return files


def _check_start(path: Path, config: DataConfig) -> None:
    """Read the first block, so that a wrong test file is seen now, and not after the train split has been read."""
    if not os.access(path, os.R_OK):
        raise ConfigError(f"data.source: {path} cannot be read; its permissions do not let you")
    block = next(_blocks(path), b"")
    if not block:
        raise DataError(f"{path}: empty, expected {LAYOUT} in every line; get the file again")
    if block.partition(b"\n")[0].count(b"\t") == len(COLUMNS) - 2:
        raise ConfigError(
            f"data.source: {path} has 39 columns, expected {LAYOUT}; it looks like Kaggle's test.txt, which has "
            "no labels; set data.source= to the labelled train.txt itself, and it is split by order"
        )
    _parse(block, config, path=path, first_line=1)


def _files_of_folder(source: Path) -> dict[str, Path]:
    files = {}
    for split, stems in _FILE_STEMS.items():
        names = [stem + suffix for stem in stems for suffix in _FILE_SUFFIXES]
        found = [source / name for name in names if (source / name).is_file()]
        if len(found) > 1:
            raise ConfigError(
                f"data.source={source}: {' and '.join(p.name for p in found)} could both be the {split} split; "
                "move one of them away"
            )
        if not found and split != "val":
            raise ConfigError(
                f"data.source={source}: no {split} split; expected {split}.tsv, .txt or .csv there, "
                "or data.source= one labelled file that is split by order"
            )
        if found:
            files[split] = found[0]
    return files


def _target(config: DataConfig) -> Path:
    if not config.path:
        raise ConfigError("data.path=null: expected where the data set goes; set data.path=DIR")
    target = Path(config.path).expanduser().absolute()
    if os.path.lexists(target):
        raise ConfigError(f"data.path={target}: exists already and is never overwritten; remove it or choose another")
    return target


def _convert(files: dict[str, Path], config: DataConfig, directory: Path) -> str:
    """Write every split and then the index into `directory`; returns one line a split."""
    transform: dict[str, dict[str, float]] = {}
    splits: dict[str, Split] = {}
    lines = []
    for split, rows in _read_splits(files, config):
        order = np.arange(len(rows))
        if split == "train":
            transform = {name: _fit(rows[name]) for name in config.dense}
            np.random.default_rng(config.seed).shuffle(order)
        file = _write_file(directory / f"{split}.arrow", rows, order, config=config, transform=transform)
        splits[split] = Split(files=[file], positives=int(np.count_nonzero(rows["label"])))
        dense_missing = np.mean([np.mean(rows[name] == _MISSING) for name in config.dense])
        sparse_missing = np.mean([np.mean(rows[f.name] == 0) for f in config.sparse])
        lines.append(
            f"{split:5} {len(rows):,} rows, {splits[split].positives / len(rows):.2%} positive, "
            f"dense {dense_missing:.1%} missing, sparse {sparse_missing:.1%} missing, {len(config.sparse)} ids a row"
        )
    index = Index(
        block_rows=config.block_rows,
        dense=config.dense,
        sparse_rows={f.name: f.rows for f in config.sparse},
        ids_per_sample={f.name: 1.0 for f in config.sparse},
        dense_transform=transform,
        splits=splits,
    )
    write_index(directory, index)
    return "\n".join(lines)


def _read_splits(files: dict[str, Path], config: DataConfig) -> Iterator[tuple[str, Rows]]:
    """The rows of each split, train first."""
    if "test" in files:
        for split, path in files.items():
            yield split, _read(path, config)
        return
    rows = _read(files["train"], config)
    n = len(rows)
    if n < 10:
        raise DataError(f"{files['train']}: {n} rows, expected at least 10 to split by order; give a larger file")
    # In order, for Kaggle's file is ordered by time: nothing of the future may be in the train split.
    yield "train", rows[: n * 8 // 10]
    yield "val", rows[n * 8 // 10 : n * 9 // 10]
    yield "test", rows[n * 9 // 10 :]


def _read(path: Path, config: DataConfig) -> Rows:
    """All rows of a file, in its order."""
    # Counted first, so that the array is allocated once, at its size.
    n = sum(block.count(b"\n") for block in _blocks(path))
    names = [*config.dense, *(f.name for f in config.sparse)]
    rows = np.empty(n, [("label", np.int8), *((name, np.int32) for name in names)])
    progress = _Progress(f"{path.name}: read", n)
    done = 0
    for block in _blocks(path):
        part = _parse(block, config, path=path, first_line=done + 1)
        if done + len(part) <= n:
            rows[done : done + len(part)] = part
        done += len(part)
        progress.show(done)
    if done != n:
        raise DataError(f"{path}: had {n} lines and then {done}; prepare it when nobody writes to it any more")
    return rows


def _blocks(path: Path) -> Iterator[bytes]:
    """The bytes of a file in blocks of whole lines; each line ends with one newline, also the last."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                # The limit is for a file without newlines; its pieces fail as lines of too few columns.
                block += file.readline(_BLOCK_BYTES)
                if b"\r" in block:
                    block = block.replace(b"\r\n", b"\n")
                yield block if block.endswith(b"\n") else block + b"\n"
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); get the file again") from error


def _parse(block: bytes, config: DataConfig, *, path: Path, first_line: int) -> Rows:
    """The rows of a block of lines. Raises DataError for the first bad line, and the first bad column in it."""
    lines = block.removesuffix(b"\n").split(b"\n")
    # Counted here, for Polars pads a short line with nulls and makes a row of nulls of a blank one.
    n = next((i for i, line in enumerate(lines) if line.count(b"\t") != len(COLUMNS) - 1), len(lines))
    if n < len(lines):
        if n:
            _parse(b"\n".join(lines[:n]), config, path=path, first_line=first_line)
        raise _bad_columns(lines[n], path=path, number=first_line + n)
    # What is not UTF-8 becomes U+FFFD: no digit either, so it is refused below like any other, with its line.
    # The header names the columns, and keeps Polars 2.1 from taking a block that begins with "x^" for a zlib stream.
    content = "\t".join(COLUMNS).encode() + b"\n" + block
    content = content.replace(b"\r", b"\0")  # or Polars 2.1 drops it at the end of a field
    text = pl.read_csv(content, separator="\t", quote_char=None, infer_schema=False, encoding="utf8-lossy")
    text = text.with_columns(pl.col("label").fill_null(""))  # so that it counts as bad
    label, integer = pl.col("label").cast(pl.Int8, strict=False), pl.col(config.dense).cast(pl.Int32, strict=False)
    hash_ = pl.col([f.name for f in config.sparse]).str.to_integer(base=16, strict=False)
    values = text.select(
        pl.when(label.is_in([0, 1])).then(label),
        pl.when(integer > _MISSING).then(integer),
        hash_.cast(pl.UInt32, strict=False),
    )
    is_bad = {name: values[name].is_null() & text[name].is_not_null() for name in values.columns}
    if bad := [(bad_B.arg_max(), COLUMNS.index(name)) for name, bad_B in is_bad.items() if bad_B.any()]:
        row, column = min(bad)
        raise _bad_field(lines[row].split(b"\t")[column], column=column, path=path, line=first_line + row)
    dense = pl.col(config.dense).fill_null(_MISSING)
    # The remainder of a division by 0 is null too.
    ids = [(pl.col(f.name) % (f.rows - 1) + 1).fill_null(0).cast(pl.Int32) for f in config.sparse]
    rows: Rows = values.select("label", dense, *ids).to_numpy(structured=True)
    return rows


def _bad_field(text: bytes, *, column: int, path: Path, line: int) -> DataError:
    name = COLUMNS[column]
    number = "a 32-bit integer" if name in DENSE else "1 to 8 hexadecimal digits"
    expected = "0 or 1" if name == "label" else f"{number} or nothing"
    advice = "correct or remove the line"
    decoded = text.decode(errors="replace")
    if "\0" in decoded or "\ufffd" in decoded:
        advice = "the file is damaged or not text; get it again"
    elif line == 1 and column == 0 and any(c.isalpha() for c in decoded):
        advice = "it looks like a header; remove the first line"
    shown = repr(text[:40])[1:] + ("..." if len(text) > 40 else "")
    return DataError(f"{path}, line {line}: {name}={shown}, expected {expected}; {advice}")


def _bad_columns(text: bytes, *, path: Path, number: int) -> DataError:
    num_columns = text.count(b"\t") + 1
    what, advice = f"{num_columns} columns", "correct or remove the line"
    if not text:
        what = "a blank line"
    elif num_columns == 1 and text.count(b",") > 1:
        advice = "replace the commas by tabs"
    elif num_columns < len(COLUMNS):
        advice = "the file was cut off or lost its trailing tabs; get it again"
    return DataError(f"{path}, line {number}: {what}, expected {LAYOUT}; {advice}")


def _fit(dense_B: npt.NDArray[np.int32]) -> dict[str, float]:
    """Parameters of the transform of one dense feature, from its values in the train split."""
    present = dense_B[dense_B != _MISSING]
    return {"min": float(present.min()) if len(present) else 0.0}


def _write_file(
    path: Path, rows: Rows, order: npt.NDArray[np.int64], *, config: DataConfig, transform: dict[str, dict[str, float]]
) -> DataFile:
    """Write rows in this order as an Arrow IPC file, durably."""
    dense_type = pa.list_(pa.float32(), len(config.dense))
    names = [f.name for f in config.sparse]
    schema = pa.schema([("label", pa.int8()), ("dense", dense_type), *((name, pa.int32()) for name in names)])
    low_D = np.array([transform[f]["min"] for f in config.dense])
    progress = _Progress(f"{path.name}: wrote", len(rows))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for start in range(0, len(rows), config.block_rows):
            part = rows[order[start : start + config.block_rows]]
            x_BD = np.stack([part[name] for name in config.dense], axis=1)
            z_BD = np.log1p(np.maximum(x_BD.astype(np.float64) - low_D, 0))
            dense_BD = np.where(x_BD == _MISSING, 0, z_BD).astype(np.float32)
            dense = pa.FixedSizeListArray.from_arrays(pa.array(dense_BD.ravel()), len(config.dense))
            ids = [pa.array(part[name]) for name in names]
            writer.write_batch(pa.record_batch([pa.array(part["label"]), dense, *ids], schema=schema))
            progress.show(start + len(part))
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return DataFile(name=path.name, rows=len(rows), size_bytes=path.stat().st_size, sha256=sha256)


class _Progress:
    """Rows done and rows/s on stderr: one line that is written over on a terminal, else a line now and then."""

    def __init__(self, what: str, num_rows: int) -> None:
        self._what, self._num_rows = what, num_rows
        self._on_terminal = sys.stderr.isatty()
        self._start_s = self._shown_s = time.monotonic()

    def show(self, num_done: int) -> None:
        now_s = time.monotonic()
        is_last = num_done == self._num_rows
        if not is_last and now_s - self._shown_s < (0.2 if self._on_terminal else _PROGRESS_S):
            return
        self._shown_s = now_s
        samples_per_s = num_done / max(now_s - self._start_s, 1e-9)
        text = f"{self._what} {num_done:,} of {self._num_rows:,} rows, {samples_per_s:,.0f} rows/s"
        erase, end = ("\033[K", "\n" if is_last else "\r") if self._on_terminal else ("", "\n")
        print(text + erase, end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    # So that a batch job at its time limit cleans up too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    compose.run(main, HELP)
