"""Global batches: one seeded order, cut the same way whatever the world size."""

import numpy as np
import pytest

from rechpc.config import DataConfig, DataKind, SparseFeature
from rechpc.errors import DataError
from rechpc.rank.blocks import Block
from rechpc.rank.data import GlobalBatches

CONFIG = DataConfig(
    kind=DataKind.synthetic,
    dense=["d0"],
    sparse=[SparseFeature(name="row", rows=10_000), SparseFeature(name="bag", rows=10_000)],
)


class Numbered:
    """A split whose row i has id i, dense value i, and a bag of i % 3 ids."""

    def __init__(self, rows: int, block_rows: int) -> None:
        self.rows = rows
        self.block_rows = block_rows

    def read(self, block: int) -> Block:
        rows = np.arange(block * self.block_rows, min(self.rows, (block + 1) * self.block_rows))
        return Block(
            labels_N=(rows % 2).astype(np.int8),
            dense_NF=rows.reshape(-1, 1).astype(np.float32),
            bags={
                "row": (np.ones(len(rows), np.int32), rows),
                "bag": ((rows % 3).astype(np.int32), rows.repeat(rows % 3)),
            },
        )


def batches(source: Numbered, *, rank: int = 0, world_size: int = 1, seed: int | None = 7, size: int = 42):
    return GlobalBatches(source, CONFIG, global_batch=size, rank=rank, world_size=world_size, seed=seed)


def rows_of(batch) -> list[int]:
    """The rows of a local batch, without padding, and only if all its parts agree on them."""
    count = int((batch.weights_B > 0).sum())
    rows = batch.sparse["row"].values().tolist()
    assert batch.dense_BF[:count, 0].tolist() == rows
    assert batch.labels_B[:count].tolist() == [row % 2 for row in rows]
    assert batch.sparse["bag"].values().tolist() == [row for row in rows for _ in range(row % 3)]
    return rows


def global_rows(source: Numbered, step: int, *, world_size: int = 1, seed: int | None = 7) -> list[int]:
    parts = [batches(source, rank=r, world_size=world_size, seed=seed).batch(step) for r in range(world_size)]
    assert len({len(part.labels_B) for part in parts}) == 1, "every rank has the same number of rows"
    return [row for part in parts for row in rows_of(part)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [997, 42, 43, 1])
def test_each_row_comes_exactly_once_an_epoch(rows: int, world_size: int) -> None:
    source = Numbered(rows, block_rows=64)
    steps = batches(source).steps_per_epoch

    seen = [row for step in range(steps) for row in global_rows(source, step, world_size=world_size)]

    assert sorted(seen) == list(range(rows))


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_global_batches_do_not_depend_on_the_world_size(world_size: int) -> None:
    source = Numbered(500, block_rows=64)

    for step in range(30):  # two epochs and a half, as if the world size changed at any of them
        assert global_rows(source, step, world_size=world_size) == global_rows(source, step)


def test_order_changes_with_epoch_and_seed_and_nothing_else() -> None:
    source = Numbered(420, block_rows=64)

    first = [global_rows(source, step) for step in range(10)]

    assert first == [global_rows(source, step) for step in range(10)]
    assert first != [global_rows(source, step) for step in range(10, 20)]
    assert first != [global_rows(source, step, seed=8) for step in range(10)]
    assert first[0] != sorted(first[0])


def test_without_a_seed_the_order_is_that_of_the_split() -> None:
    assert global_rows(Numbered(100, block_rows=16), 1, seed=None, world_size=2) == list(range(42, 84))


def test_weights_make_the_mean_over_ranks_the_mean_of_the_global_batch() -> None:
    source = Numbered(50, block_rows=64)  # the second batch has 8 rows

    parts = [batches(source, rank=r, world_size=3).batch(1) for r in range(3)]

    assert [len(part.labels_B) for part in parts] == [3, 3, 3]
    assert sum(float(part.weights_B.sum()) for part in parts) / 3 == pytest.approx(1.0)
    assert parts[2].weights_B.tolist() == pytest.approx([3 / 8, 3 / 8, 0])


def test_a_rank_without_rows_still_has_a_batch() -> None:
    part = batches(Numbered(43, block_rows=64), rank=2, world_size=3).batch(1)

    assert len(part.labels_B) == 1
    assert part.weights_B.tolist() == [0]
    assert part.sparse.values().tolist() == []


def test_a_bad_value_stops_the_batch_that_holds_it() -> None:
    source = Numbered(10_001, block_rows=64)  # its last row has id 10,000, one too many

    with pytest.raises(DataError, match="id 10000 of sparse feature 'row'"):
        list(batches(source, seed=None).batches(0, 300))
