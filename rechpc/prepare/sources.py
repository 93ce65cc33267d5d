"""CSV, Parquet and npy: the rows of one file, a manageable number at a time.

Criteo's text has a file of its own. What the values mean is the business of `rows`.
"""

import gzip
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet

from rechpc.choices import DataKind
from rechpc.config import DataConfig
from rechpc.errors import ConfigError, DataError
from rechpc.prepare import criteo
from rechpc.prepare.rows import LABEL, Finding, Judge, Rows

_ROWS = 2**16
_BLOCK_BYTES = 2**23
LABELS = "_labels.npy"  # the end of the name that stands for the three files of kind=npy


def read(path: Path, config: DataConfig, judge: Judge) -> Iterator[Rows]:
    """All rows of a file in its order. Raises DataError for a file that cannot be read to its end."""
    reader = {
        DataKind.criteo: criteo.read,
        DataKind.csv: _read_csv,
        DataKind.parquet: _read_parquet,
        DataKind.npy: _read_npy,
    }[config.kind]
    try:
        yield from reader(path, config, judge)
    except (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read ({' '.join(str(error).split())}); get the file again") from error


def count(path: Path, config: DataConfig) -> int:
    """The rows of a file, bad ones too, as `read` numbers them."""
    if config.kind is DataKind.criteo:
        return criteo.count(path)
    if config.kind is DataKind.parquet:
        return int(pa_parquet.read_metadata(path).num_rows)
    if config.kind is DataKind.npy:
        return len(np.load(path, mmap_mode="r"))
    last = 0
    for rows in _read_csv(path, config, Judge(config)):
        last = int(rows.numbers_N[-1]) if len(rows.numbers_N) else last
    return last


def _columns(path: Path, have: list[str], config: DataConfig) -> dict[str, str]:
    """The column of each feature, all of which the file has once."""
    names = (LABEL, *config.dense, *(f.name for f in config.sparse))
    wanted = {name: config.columns.get(name, name) for name in names}
    for name, column in wanted.items():
        if have.count(column) != 1:
            how = f"is there {have.count(column)} times" if column in have else "is not there"
            shown = ", ".join(have[:50])
            raise ConfigError(f"{path}: column {column!r} of {name!r} {how}; the file has: {shown}; see data.columns")
    return wanted


def _rows(path: Path, frame: pl.DataFrame, wanted: dict[str, str], numbers_N: np.ndarray, share: float) -> Rows:
    frame = frame.select(pl.col(column).alias(name) for name, column in wanted.items())
    return Rows(frame=frame, path=path, numbers_N=numbers_N, share=share)


def _read_csv(path: Path, config: DataConfig, judge: Judge) -> Iterator[Rows]:
    separator = "\t" if config.separator == "tab" else config.separator
    bad: list[Finding] = []

    def skip(row: pa_csv.InvalidRow) -> str:
        # PyArrow counts the header.
        where, what = row.number - 1, f"{row.actual_columns} columns, expected {row.expected_columns}"
        error = f"{path}, row {where}: {what}; correct or remove it, or set data.bad_rows"
        bad.append(Finding(number=where, kind="columns", error=error, fixable=False))
        return "skip"

    with path.open("rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as again:
            header = again.readline().decode("utf-8-sig", errors="replace").rstrip("\r\n")
        if not header:
            raise DataError(f"{path}: empty, expected a line with the names of the columns; get the file again")
        reader = pa_csv.open_csv(
            file,
            read_options=pa_csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
            parse_options=pa_csv.ParseOptions(
                delimiter=separator, ignore_empty_lines=False, invalid_row_handler=skip, newlines_in_values=True
            ),
            # Bytes: what they mean is decided, and refused, value by value.
            convert_options=pa_csv.ConvertOptions(
                column_types={name: pa.binary() for name in header.replace('"', "").split(separator)},
                strings_can_be_null=True,
                null_values=[""],
                quoted_strings_can_be_null=True,
            ),
        )
        wanted = _columns(path, reader.schema.names, config)
        last, size = 0, path.stat().st_size
        for batch in reader:
            judge.drop(bad)  # they are not in the batch; this counts them
            passed, bad[:] = [f.number for f in bad], []
            numbers_N = np.setdiff1d(np.arange(last + 1, last + 1 + len(batch) + len(passed)), passed)
            last += len(batch) + len(passed)
            yield _rows(path, pl.DataFrame(batch), wanted, numbers_N, raw.tell() / size)
        judge.drop(bad)


def _read_parquet(path: Path, config: DataConfig, _: Judge) -> Iterator[Rows]:
    with pa_parquet.ParquetFile(path) as file:
        wanted = _columns(path, file.schema_arrow.names, config)
        last, size = 0, file.metadata.num_rows
        if not size:
            raise DataError(f"{path}: empty, expected rows; get the file again")
        for batch in file.iter_batches(batch_size=_ROWS, columns=list(wanted.values())):
            numbers_N = np.arange(last + 1, last + 1 + len(batch))
            last += len(batch)
            yield _rows(path, pl.DataFrame(pa.table(batch)), wanted, numbers_N, last / size)


def _read_npy(path: Path, config: DataConfig, _: Judge) -> Iterator[Rows]:
    """NAME_labels.npy (N,), NAME_dense.npy (N, F), and the ids of each feature in NAME_sparse_multi_hot.npz or in a
    column of NAME_sparse.npy; columns are called label, I1, I2 ... and C1, C2 ... in their order."""
    stem = path.name.removesuffix(LABELS)
    labels, dense = np.load(path, mmap_mode="r"), np.load(path.with_name(f"{stem}_dense.npy"), mmap_mode="r")
    if (multi_hot := path.with_name(f"{stem}_sparse_multi_hot.npz")).exists():
        sparse = _Bags(multi_hot)
    else:
        sparse = np.load(path.with_name(f"{stem}_sparse.npy"), mmap_mode="r")
    size = len(labels)
    if not size or {len(dense), len(sparse)} != {size}:
        have = f"{size}, {len(dense)} and {len(sparse)}"
        raise DataError(f"{path}: labels, dense and sparse have {have} rows, expected the same; get the files again")
    for start in range(0, size, _ROWS):
        stop = min(start + _ROWS, size)
        columns = {LABEL: labels[start:stop].reshape(-1)}
        columns |= {f"I{i}": column for i, column in enumerate(dense[start:stop].T, 1)}
        parts = sparse.read(start, stop) if isinstance(sparse, _Bags) else sparse[start:stop].T
        columns |= {f"C{i}": part[:, 0] if part.shape[1:] == (1,) else part for i, part in enumerate(parts, 1)}
        wanted = _columns(path, list(columns), config)
        frame = pl.DataFrame({name: np.ascontiguousarray(columns[name]) for name in wanted.values()})
        yield _rows(path, frame, wanted, np.arange(start + 1, stop + 1), stop / size)


class _Bags:
    """The arrays 0.npy, 1.npy ... (N, ids) of an npz file, read from start to end, for they do not fit memory."""

    def __init__(self, path: Path) -> None:
        archive = zipfile.ZipFile(path)
        self._files = [archive.open(f"{i}.npy") for i in range(len(archive.namelist()))]
        headers = [_header(file) for file in self._files]
        self._types = [(shape[1:], dtype) for shape, dtype in headers]
        self._rows = {shape[0] for shape, _ in headers}

    def __len__(self) -> int:
        return min(self._rows) if len(self._rows) == 1 else 0  # uneven arrays fit no labels

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        """The next rows of each array."""
        arrays = []
        for file, (shape, dtype) in zip(self._files, self._types, strict=True):
            content = file.read((stop - start) * dtype.itemsize * int(np.prod(shape)))
            arrays.append(np.frombuffer(content, dtype).reshape(stop - start, *shape))
        return arrays


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read_header(file)
    if is_fortran:
        raise ValueError("an array is stored by columns")
    return shape, dtype
