"""A shuffle that needs no more memory however many rows there are, and the files that a split is written to."""

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from rechpc.dataset import DataFile

_BUCKETS = 64
_CHUNK_BYTES = 2**25  # dealt out at once: most of it stays in the cache
_BUCKET_BYTES = 2**27  # shuffled in memory
_SHARD_BYTES = 2**28


def chunked(frames: Iterable[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """The same rows in fewer frames, of about 32 MiB."""
    parts: list[pl.DataFrame] = []
    size_bytes = 0.0
    for frame in frames:
        parts.append(frame)
        size_bytes += frame.estimated_size()
        if size_bytes >= _CHUNK_BYTES:
            yield pl.concat(parts, how="vertical_relaxed", rechunk=True)
            parts, size_bytes = [], 0.0
    if parts:
        yield pl.concat(parts, how="vertical_relaxed", rechunk=True)


def shuffled(frames: Iterable[pl.DataFrame], scratch: Path, rng: np.random.Generator) -> Iterator[pl.DataFrame]:
    """All rows in a random order. More of them than fit memory are first dealt out to files in `scratch`, at random.

    Every order is as likely as any other: the file of each row is independent of the others, and so is its place there.
    """
    chunks = chunked(frames)
    first, second = next(chunks, None), next(chunks, None)
    if second is None:
        if first is not None:
            yield _take(first, rng.permutation(len(first)))
        return
    chunks = itertools.chain([first, second], chunks)
    del first, second
    scratch.mkdir()
    buckets = [scratch / f"{i:02d}.arrows" for i in range(_BUCKETS)]
    for chunk in chunks:
        bucket_N = rng.integers(_BUCKETS, size=len(chunk), dtype=np.uint8)
        table = _take(chunk, np.argsort(bucket_N, kind="stable")).to_arrow()
        ends = np.cumsum(np.bincount(bucket_N, minlength=_BUCKETS))
        for path, start, end in zip(buckets, [0, *ends], ends, strict=False):
            with path.open("ab") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table.slice(start, end - start))
    del chunk, table
    for i, path in enumerate(buckets):
        if path.stat().st_size > _BUCKET_BYTES:
            yield from shuffled(_read(path), scratch / str(i), rng)
        else:
            whole = pl.concat(_read(path), how="vertical_relaxed", rechunk=True)
            yield _take(whole, rng.permutation(len(whole)))
        path.unlink()


def _take(frame: pl.DataFrame, order_N: np.ndarray) -> pl.DataFrame:
    """The rows in this order."""
    # NumPy takes numbers without nulls several times as fast as Polars 2.1 does.
    plain = [s for s in frame.get_columns() if s.dtype.is_numeric() and not s.null_count()]
    taken = [pl.Series(s.name, s.to_numpy()[order_N]) for s in plain]
    return frame.drop(s.name for s in plain)[order_N].hstack(taken).select(frame.columns)


def _read(path: Path) -> Iterator[pl.DataFrame]:
    with pa.memory_map(str(path)) as file:
        while file.tell() < file.size():
            with pa.ipc.open_stream(file) as reader:
                yield pl.DataFrame(reader.read_all())


class Shards:
    """Writes rows to the files of a split, in record batches of `block_rows`."""

    def __init__(self, directory: Path, split: str, block_rows: int) -> None:
        self._directory, self._split, self._block_rows = directory, split, block_rows
        self._files: list[DataFile] = []
        self._rest: pa.Table | None = None
        self._writer: pa.RecordBatchFileWriter | None = None

    def add(self, table: pa.Table) -> None:
        """Write as many whole blocks as there are, and keep the rest."""
        if self._rest is not None:
            table = pa.concat_tables([self._rest, table])
        whole = len(table) // self._block_rows * self._block_rows
        for start in range(0, whole, self._block_rows):
            self._write(table.slice(start, self._block_rows))
        # A copy, or the few rows would keep all of the table in memory.
        self._rest = table.slice(whole).take(pa.array(np.arange(len(table) - whole)))

    def close(self) -> list[DataFile]:
        """Write the rest; the files of the split in order, durable."""
        if self._rest is not None and len(self._rest):
            self._write(self._rest)
        self._end_file()
        return self._files

    def _write(self, block: pa.Table) -> None:
        if self._writer is None:
            self._path = self._directory / f"{self._split}-{len(self._files):05d}.arrow"
            self._rows = 0
            self._sink = pa.OSFile(str(self._path), "wb")
            self._writer = pa.ipc.new_file(self._sink, block.schema)
        self._writer.write_batch(block.combine_chunks().to_batches()[0])
        self._rows += len(block)
        if self._sink.tell() >= _SHARD_BYTES:
            self._end_file()

    def _end_file(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._sink.close()
        self._writer = None
        self._files.append(data_file(self._path, self._rows))


def data_file(path: Path, rows: int) -> DataFile:
    """What an index says of a file, which is on the disk then."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return DataFile(name=path.name, rows=rows, size_bytes=path.stat().st_size, sha256=sha256)
