"""A block of rows in memory, and the checks that every value passes before a model sees it.

Arrays carry their shape: N rows of the block, F dense features. Must not know torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from rechpc.config import SparseFeature
from rechpc.errors import DataError

_ONE: Any = np.int32(1).tobytes()  # read-only


@dataclass(frozen=True)
class Block:
    """Rows of a data set: labels (N,), dense values (N, F), and a bag of ids for each sparse feature.

    A bag is (lengths_N, values): the ids of all rows one after the other, and how many each row has.
    """

    labels_N: np.ndarray
    dense_NF: np.ndarray
    bags: dict[str, tuple[np.ndarray, np.ndarray]]

    def __len__(self) -> int:
        return len(self.labels_N)

    def values(self, name: str, start: int, stop: int) -> np.ndarray:
        """The ids of a feature in rows [start, stop)."""
        offsets = self._offsets[name]
        return self.bags[name][1][offsets[start] : offsets[stop]]

    @cached_property
    def _offsets(self) -> dict[str, np.ndarray]:
        """Where the bag of each row begins, and the last one ends; not of features with one id in each row."""
        lists = {name: lengths_N for name, (lengths_N, _) in self.bags.items() if not _is_one_each(lengths_N)}
        return {name: np.concatenate([[0], np.cumsum(lengths_N)]) for name, lengths_N in lists.items()}


class Source(Protocol):
    """One split of a data set, read by blocks of `block_rows` rows; only the last block may have fewer."""

    rows: int
    block_rows: int

    def read(self, block: int) -> Block:
        """Rows [block * block_rows, ...) of the split."""
        ...


def one_each(rows: int) -> np.ndarray:
    """Lengths of bags of one id each, without memory of their own, by which `Block` knows them."""
    return np.ndarray(rows, np.int32, _ONE, strides=(0,))  # np.broadcast_to takes 20 us


def _is_one_each(lengths_N: np.ndarray) -> bool:
    return lengths_N.base is _ONE


def gather(parts: Sequence[tuple[Block, int, int]]) -> Block:
    """Rows [start, stop) of each block in turn."""
    bags = {}
    for name, (lengths_N, _) in parts[0][0].bags.items():
        if _is_one_each(lengths_N):
            values = np.concatenate([block.bags[name][1][start:stop] for block, start, stop in parts])
            bags[name] = one_each(len(values)), values
        else:
            values = np.concatenate([block.values(name, start, stop) for block, start, stop in parts])
            bags[name] = np.concatenate([block.bags[name][0][start:stop] for block, start, stop in parts]), values
    return Block(
        labels_N=np.concatenate([block.labels_N[start:stop] for block, start, stop in parts]),
        dense_NF=np.concatenate([block.dense_NF[start:stop] for block, start, stop in parts]),
        bags=bags,
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
