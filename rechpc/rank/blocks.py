"""A block of rows in memory, and the checks that every value passes before a model sees it.

Arrays carry their shape: N rows of the block, F dense features, S sparse features with one id in each row and L with
lists of ids. Must not know torch.
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

    @cached_property
    def singles(self) -> list[str]:
        """The S features with one id in each row, in the order of the bags."""
        return [name for name, (lengths_N, _) in self.bags.items() if lengths_N.base is _ONE]

    @cached_property
    def lists(self) -> list[str]:
        """The L others."""
        return [name for name, (lengths_N, _) in self.bags.items() if lengths_N.base is not _ONE]

    # In one array, so that a run of rows is copied at once. A copy for each feature costs more than the copying: each
    # waits for the interpreter, which the thread that trains needs as well.

    @cached_property
    def singles_SN(self) -> np.ndarray:
        """The ids of the features with one in each row."""
        return _stacked([self.bags[name][1] for name in self.singles], len(self))

    @cached_property
    def lengths_LN(self) -> np.ndarray:
        """How many ids each row has of the others."""
        return _stacked([self.bags[name][0] for name in self.lists], len(self))

    def values(self, start: int, stop: int) -> list[np.ndarray]:
        """The ids in rows [start, stop) of each feature with lists of them."""
        ends = self._offsets_LN[:, [start, stop]].tolist() if self.lists else []
        return [self.bags[name][1][low:high] for name, (low, high) in zip(self.lists, ends, strict=True)]

    @cached_property
    def _offsets_LN(self) -> np.ndarray:
        """Where the bag of each row begins, and the last one ends."""
        return np.pad(np.cumsum(self.lengths_LN, axis=1), ((0, 0), (1, 0)))


def _stacked(arrays: list[np.ndarray], rows: int) -> np.ndarray:
    """Arrays (N,) as one (number of arrays, N)."""
    return np.stack(arrays) if arrays else np.empty((0, rows), np.int32)


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


def gather(parts: Sequence[tuple[Block, int, int]]) -> Block:
    """Rows [start, stop) of each block in turn."""
    first, *_ = parts[0]
    singles_SN = np.concatenate([block.singles_SN[:, start:stop] for block, start, stop in parts], axis=1)
    lengths_LN = np.concatenate([block.lengths_LN[:, start:stop] for block, start, stop in parts], axis=1)
    values = [np.concatenate(v) for v in zip(*(block.values(start, stop) for block, start, stop in parts), strict=True)]
    one_N = one_each(singles_SN.shape[1])
    bags = {name: (one_N, ids_N) for name, ids_N in zip(first.singles, singles_SN, strict=True)}
    bags |= zip(first.lists, zip(lengths_LN, values, strict=True), strict=True)
    gathered = Block(
        labels_N=np.concatenate([block.labels_N[start:stop] for block, start, stop in parts]),
        dense_NF=np.concatenate([block.dense_NF[start:stop] for block, start, stop in parts]),
        bags={name: bags[name] for name in first.bags},
    )
    vars(gathered).update(singles_SN=singles_SN, lengths_LN=lengths_LN)  # else it would make them again
    return gathered


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
    is_finite_NF = np.isfinite(block.dense_NF)
    if not is_finite_NF.all():
        row, column = np.argwhere(~is_finite_NF)[0]
        raise DataError(
            f"{where}, row {row}: dense feature {dense[column]!r} is {block.dense_NF[row, column]}, "
            "expected a finite number"
        )
    ends = _ends(block)
    for feature in sparse:
        low, high = ends.get(feature.name, (0, 0))
        if low < 0 or high >= feature.rows:
            lengths_N, values = block.bags[feature.name]
            position = int(np.flatnonzero((values < 0) | (values >= feature.rows))[0])
            row = int(np.searchsorted(np.cumsum(lengths_N), position, side="right"))
            raise DataError(
                f"{where}, row {row}: id {values[position]} of sparse feature {feature.name!r}, expected 0 to "
                f"{feature.rows - 1}; raise its rows in data.sparse, or map ids at conversion"
            )


def _ends(block: Block) -> dict[str, tuple[int, int]]:
    """The smallest and the largest id of each feature that has one."""
    if not len(block):
        return {}
    singles = zip(block.singles_SN.min(axis=1), block.singles_SN.max(axis=1), strict=True)
    lists = {name: ids for name in block.lists if (ids := block.bags[name][1]).size}
    return dict(zip(block.singles, singles, strict=True)) | {n: (ids.min(), ids.max()) for n, ids in lists.items()}
