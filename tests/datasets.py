"""Prepared data sets for tests, in the format of rechpc.dataset."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from rechpc.config import DataConfig, DataKind, SparseFeature
from rechpc.dataset import DataFile, Index, Split, write_index
from rechpc.rank.blocks import Block, gather, one_each


def numbered(rows_N: np.ndarray) -> Block:
    """Rows of which every value tells the number, to be read back with `numbers`; for `numbered_config`."""
    lengths_N = (rows_N % 4).astype(np.int32)
    return Block(
        labels_N=(rows_N % 2).astype(np.int8),
        dense_NF=np.stack([rows_N, -rows_N], axis=1).astype(np.float32),
        bags={"one": (one_each(len(rows_N)), rows_N), "many": (lengths_N, np.repeat(rows_N, lengths_N))},
    )


def numbered_config(rows: int, block_rows: int) -> DataConfig:
    sparse = [SparseFeature(name="one", rows=rows), SparseFeature(name="many", rows=rows, ids_per_sample=1.5)]
    return DataConfig(kind=DataKind.criteo, dense=["plus", "minus"], sparse=sparse, block_rows=block_rows)


def numbers(block: Block) -> list[int]:
    """The numbers of the rows of a block, whose values must all belong to the same rows."""
    rows_N = block.dense_NF[:, 0].astype(int)
    expected = numbered(rows_N)
    assert np.array_equal(block.dense_NF, expected.dense_NF)
    assert np.array_equal(block.labels_N, expected.labels_N)
    for name, (lengths_N, values) in expected.bags.items():
        assert np.array_equal(block.bags[name][0], lengths_N), name
        assert np.array_equal(block.bags[name][1], values), name
    return rows_N.tolist()


def take(block: Block, rows: Sequence[int]) -> Block:
    """These rows, in this order."""
    return gather([(block, 0, 0), *((block, int(row), int(row) + 1) for row in rows)])


def write(path: Path, config: DataConfig, splits: dict[str, list[Block]], *, blocks_per_file: int = 1000) -> Index:
    """Write the blocks of each split as they are, good or bad, and an index for them."""
    path.mkdir(parents=True, exist_ok=True)
    written = {}
    for name, blocks in splits.items():
        groups = [blocks[i : i + blocks_per_file] for i in range(0, len(blocks), blocks_per_file)]
        files = [_write_file(path / f"{name}-{i}.arrow", config, group) for i, group in enumerate(groups)]
        written[name] = Split(files=files, positives=sum(int((b.labels_N == 1).sum()) for b in blocks))
    index = Index(
        block_rows=config.block_rows,
        dense=config.dense,
        sparse_rows={feature.name: feature.rows for feature in config.sparse},
        mappings=config.mappings(),
        ids_per_sample={feature.name: feature.ids_per_sample for feature in config.sparse},
        id_range={feature.name: [0, feature.rows - 1] for feature in config.sparse},
        dense_transform={},
        dense_statistics={},
        vocabularies={},
        bad_rows={},
        splits=written,
    )
    write_index(path, index)
    return index


def batch(config: DataConfig, block: Block) -> pa.RecordBatch:
    """The rows of a block as Arrow columns."""
    dense = pa.FixedSizeListArray.from_arrays(pa.array(block.dense_NF.ravel(), pa.float32()), len(config.dense))
    columns = {"label": pa.array(block.labels_N, pa.int8()), "dense": dense}
    for feature in config.sparse:
        lengths_N, values = block.bags[feature.name]
        columns[feature.name] = pa.array(values, pa.int32())
        if feature.ids_per_sample != 1:
            offsets = pa.array(np.concatenate([[0], np.cumsum(lengths_N)]), pa.int32())
            columns[feature.name] = pa.ListArray.from_arrays(offsets, columns[feature.name])
    return pa.record_batch(columns)


def write_arrow(path: Path, batches: list[pa.RecordBatch]) -> DataFile:
    """An Arrow file, and what an index says of it."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batches[0].schema) as writer:
        for one in batches:
            writer.write_batch(one)
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return DataFile(name=path.name, rows=sum(map(len, batches)), size_bytes=len(content), sha256=digest)


def _write_file(path: Path, config: DataConfig, blocks: list[Block]) -> DataFile:
    return write_arrow(path, [batch(config, block) for block in blocks])
