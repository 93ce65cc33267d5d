"""A block of rows in memory, and the checks that every value passes before a model sees it.

Arrays carry their shape: N rows of the block, F dense features. Must not know torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rechpc.config import SparseFeature
from rechpc.errors import DataError


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of a data set: labels (N,), dense values (N, F), and a bag of ids for each sparse feature.

    A bag is (lengths_N, values): the ids of all rows one after the other, and how many each row has.
    """

    labels_N: np.ndarray
    dense_NF: np.ndarray
    bags: dict[str, tuple[np.ndarray, np.ndarray]]

    def __len__(self) -> int:
        return len(self.labels_N)

    def take(self, rows: np.ndarray) -> "Block":
        """The given rows, in the given order."""
        bags = {name: _take_bags(lengths_N, values, rows) for name, (lengths_N, values) in self.bags.items()}
        return Block(labels_N=self.labels_N[rows], dense_NF=self.dense_NF[rows], bags=bags)


class Source(Protocol):
    """One split of a data set, read by blocks of `block_rows` rows; only the last block may have fewer."""

    rows: int
    block_rows: int

    def read(self, block: int) -> Block:
        """Rows [block * block_rows, ...) of the split."""
        ...


def one_each(rows: int) -> np.ndarray:
    """Lengths of bags of one id each, without memory of their own, by which `Block.take` knows them."""
    return np.broadcast_to(np.int32(1), rows)


def concatenate(blocks: Sequence[Block]) -> Block:
    """The rows of all blocks in turn."""
    if len(blocks) == 1:
        return blocks[0]
    return Block(
        labels_N=np.concatenate([b.labels_N for b in blocks]),
        dense_NF=np.concatenate([b.dense_NF for b in blocks]),
        bags={
            name: (
                np.concatenate([b.bags[name][0] for b in blocks]),
                np.concatenate([b.bags[name][1] for b in blocks]),
            )
            for name in blocks[0].bags
        },
    )


def pad(block: Block, rows: int) -> Block:
    """The block with empty rows added up to `rows`: zero dense values, no ids, label 0."""
    missing = rows - len(block)
    if not missing:
        return block
    return Block(
        labels_N=np.pad(block.labels_N, (0, missing)),
        dense_NF=np.pad(block.dense_NF, ((0, missing), (0, 0))),
        bags={name: (np.pad(lengths_N, (0, missing)), values) for name, (lengths_N, values) in block.bags.items()},
    )


def check(block: Block, sparse: Sequence[SparseFeature], dense: Sequence[str], where: str) -> None:
    """Raise DataError for the first value that would train garbage; `where` names the block.

    What the kernels do with such a value depends on the sharding plan (FBGEMM maps an id that is too large to
    row 0 with one warning, a negative one raises or wraps), so nothing of the kind may get past here.
    """
    bad = np.flatnonzero((block.labels_N != 0) & (block.labels_N != 1))
    if bad.size:
        raise DataError(f"{where}, row {bad[0]}: label {block.labels_N[bad[0]]}, expected 0 or 1")
    bad = np.flatnonzero(~np.isfinite(block.dense_NF).all(axis=1))
    if bad.size:
        row = bad[0]
        column = int(np.flatnonzero(~np.isfinite(block.dense_NF[row]))[0])
        raise DataError(
            f"{where}, row {row}: dense feature {dense[column]!r} is {block.dense_NF[row, column]}, "
            "expected a finite number"
        )
    for feature in sparse:
        lengths_N, values = block.bags[feature.name]
        if values.size and (values.min() < 0 or values.max() >= feature.rows):
            position = int(np.flatnonzero((values < 0) | (values >= feature.rows))[0])
            row = int(np.searchsorted(np.cumsum(lengths_N), position, side="right"))
            raise DataError(
                f"{where}, row {row}: id {values[position]} of sparse feature {feature.name!r}, expected 0 to "
                f"{feature.rows - 1}; raise its rows in data.sparse, or map ids at conversion"
            )


def _take_bags(lengths_N: np.ndarray, values: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if lengths_N.strides == (0,):
        return one_each(len(rows)), values[rows]
    taken = lengths_N[rows]
    ends = np.cumsum(taken)
    starts = (np.cumsum(lengths_N) - lengths_N)[rows]
    # Position of each taken id: the start of its bag, plus its place in the bag.
    position = np.repeat(starts - (ends - taken), taken)
    position += np.arange(len(position))
    return taken, values[position]
