"""Every sample comes once an epoch, in an order that the seed alone decides."""

import dataclasses
import itertools
import json
import re
import threading
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pytest

from rechpc.config import DataConfig, DataKind
from rechpc.dataset import INDEX_NAME, read_index, write_index
from rechpc.errors import DataError
from rechpc.rank.blocks import Block
from rechpc.rank.data import ArrowSplit, Batch, GlobalBatches, Rehearsed, open_splits
from rechpc.rank.synthetic import Synthetic
from tests import datasets
from tests.configs import tiny
from tests.datasets import numbered, numbered_config, numbers, take

ROWS = 1009  # 24 global batches of 42, and one row
GLOBAL_BATCH = 42
WORLD_SIZES = (1, 2, 3, 7)
STEPS = 25


class Numbered:
    """A split of numbered rows."""

    def __init__(self, rows: int, block_rows: int) -> None:
        self.rows, self.block_rows = rows, block_rows

    def read(self, block: int) -> Block:
        first = block * self.block_rows
        return numbered(np.arange(first, min(first + self.block_rows, self.rows)))


def of_rank(rank: int, world_size: int, *, rows=ROWS, block_rows=100, seed: int | None = 1) -> GlobalBatches:
    config = numbered_config(rows, block_rows)
    source = Numbered(rows, block_rows)
    return GlobalBatches(source, config, global_batch=GLOBAL_BATCH, rank=rank, world_size=world_size, seed=seed)


def samples(batch: Batch) -> list[int]:
    """The numbers of the real samples of a rank's batch."""
    bags = {name: (jt.lengths().numpy(), jt.values().numpy()) for name, jt in batch.sparse.to_dict().items()}
    block = Block(batch.labels_B.numpy(), batch.dense_BF.numpy(), bags)
    return numbers(take(block, np.flatnonzero(batch.weights_B.numpy())))


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def global_batches(world_size: int, start: int, stop: int, **more) -> list[list[int]]:
    """The samples of each global batch, those of rank 0 first."""
    ranks = [of_rank(rank, world_size, **more) for rank in range(world_size)]
    return [joined(samples(rank.batch(step)) for rank in ranks) for step in range(start, stop)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_an_epoch_holds_every_row_once(world_size):
    assert sorted(joined(global_batches(world_size, 0, STEPS))) == list(range(ROWS))
    assert sorted(joined(global_batches(world_size, STEPS, 2 * STEPS))) == list(range(ROWS))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_global_batch_does_not_depend_on_the_number_of_ranks(world_size):
    assert global_batches(world_size, 0, 2 * STEPS) == global_batches(1, 0, 2 * STEPS)


def test_a_change_of_ranks_in_mid_epoch_loses_and_repeats_nothing():
    parts = [(2, 0, 7), (7, 7, 15), (3, 15, 19), (1, 19, STEPS)]
    assert list(itertools.chain.from_iterable(global_batches(*part) for part in parts)) == global_batches(1, 0, STEPS)


@pytest.mark.parametrize("block_rows", [1, 7, 42, 100, 1008, 1009, 5000])
def test_rows_are_whole_and_come_once_wherever_blocks_end(block_rows):
    assert sorted(joined(global_batches(3, 0, STEPS, block_rows=block_rows))) == list(range(ROWS))


def test_every_epoch_has_an_order_of_its_own():
    first, second, third = (joined(global_batches(1, n * STEPS, (n + 1) * STEPS)) for n in range(3))
    assert first != second != third != first
    assert first != sorted(first)


def test_the_seed_decides_the_order():
    assert global_batches(1, 0, 5, seed=1) == global_batches(1, 0, 5, seed=1)
    assert global_batches(1, 0, 5, seed=1) != global_batches(1, 0, 5, seed=2)


def test_a_step_has_the_same_samples_whatever_was_read_before():
    batches = of_rank(1, 2)
    steps = [30, 3, 24, 3, 49, 0, 30]
    assert [samples(batches.batch(step)) for step in steps] == [samples(of_rank(1, 2).batch(step)) for step in steps]


@pytest.mark.parametrize("block_rows", [7, 100, 5000])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_evaluation_keeps_the_order_of_the_split(world_size, block_rows):
    found = global_batches(world_size, 0, STEPS, block_rows=block_rows, seed=None)
    assert joined(found) == list(range(ROWS))


@pytest.mark.parametrize("rows", [ROWS, 1000, 84, 5, 2, 1])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_ranks_make_the_same_steps_of_the_same_size(world_size, rows):
    ranks = [of_rank(rank, world_size, rows=rows) for rank in range(world_size)]
    steps = -(-rows // GLOBAL_BATCH)
    assert {rank.steps_per_epoch for rank in ranks} == {steps}
    for step in range(steps):
        assert len({len(rank.batch(step).labels_B) for rank in ranks}) == 1


@pytest.mark.parametrize("rows", [ROWS, 1000, 84, 5, 2, 1])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_weights_make_the_mean_over_ranks_the_mean_over_samples(world_size, rows):
    ranks = [of_rank(rank, world_size, rows=rows) for rank in range(world_size)]
    for step in (0, ranks[0].steps_per_epoch - 1):
        batches = [rank.batch(step) for rank in ranks]
        numbers_of_step = joined(samples(b) for b in batches)
        assert len(numbers_of_step) == ranks[0].num_samples(step)
        means = [(b.dense_BF[:, 0] * b.weights_B).sum().item() for b in batches]
        assert np.mean(means) == pytest.approx(np.mean(numbers_of_step), rel=1e-5)


def test_padding_has_no_ids_and_no_weight():
    batch = of_rank(6, 7).batch(STEPS - 1)  # one sample, which rank 0 has
    assert batch.weights_B.tolist() == batch.labels_B.tolist() == [0]
    assert batch.dense_BF.tolist() == [[0, 0]]
    assert (batch.sparse.lengths().tolist(), batch.sparse.values().tolist()) == ([0, 0], [])


# Reading ahead


class Gated(Numbered):
    """A source that reads a block only when it is let."""

    def __init__(self) -> None:
        super().__init__(ROWS, GLOBAL_BATCH)
        self.gate, self.blocks = threading.Semaphore(0), []

    def read(self, block: int) -> Block:
        self.gate.acquire()
        self.blocks.append(block)
        return super().read(block)


def gated() -> tuple[Gated, GlobalBatches]:
    source = Gated()
    config = numbered_config(ROWS, GLOBAL_BATCH)
    return source, GlobalBatches(source, config, global_batch=GLOBAL_BATCH, rank=0, world_size=1, seed=None)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_batches_read_ahead_are_those_of_their_steps():
    batches = of_rank(1, 3)
    found = [samples(batch) for batch in batches.batches(3, 2 * STEPS)]
    assert found == [samples(of_rank(1, 3).batch(step)) for step in range(3, 2 * STEPS)]
    assert list(batches.batches(5, 5)) == []


def test_a_few_batches_and_no_more_are_read_ahead():
    source, batches = gated()
    iterator = batches.batches(0, STEPS)
    source.gate.release(100)
    next(iterator)
    next(iterator)
    iterator.close()
    for thread in readers():
        thread.join()
    assert len(source.blocks) <= 2 + 8


def test_a_bad_value_surfaces_at_the_step_that_needs_it():
    batches = of_rank(0, 1, seed=None)
    whole = batches._source.read

    def read(block: int) -> Block:
        rows = whole(block)
        if block == 2:  # rows 200 to 299: the first of them are in step 4
            rows.labels_N[0] = 2
        return rows

    batches._source.read = read
    iterator = batches.batches(0, STEPS)
    assert [samples(next(iterator))[0] for _ in range(4)] == [0, 42, 84, 126]
    with pytest.raises(DataError, match="block 2, row 0: label 2, expected 0 or 1"):
        next(iterator)


@pytest.mark.parametrize("end", ["exhausted", "closed", "failed", "forgotten"])
def test_the_thread_ends_with_its_batches(end):
    batches = of_rank(0, 1)
    if end == "failed":
        batches._source.rows = 0.5  # nonsense
    iterator = batches.batches(0, STEPS)
    if end == "exhausted":
        list(iterator)
    elif end == "failed":
        with pytest.raises(TypeError):
            next(iterator)
    else:
        next(iterator)
        iterator.close() if end == "closed" else None
    del iterator
    for thread in readers():
        thread.join(timeout=60)
    assert readers() == []


# Prepared data sets


@pytest.fixture
def config() -> DataConfig:
    return tiny().data


def of(config: DataConfig) -> dict[str, list[Block]]:
    """All blocks of the synthetic log, by split."""
    splits = {name: Synthetic(config, name) for name in ("train", "test")}
    return {name: [s.read(b) for b in range(-(-s.rows // s.block_rows))] for name, s in splits.items()}


def prepared(path, config: DataConfig, splits: dict[str, list[Block]], **more) -> DataConfig:
    datasets.write(path, config, splits, **more)
    return dataclasses.replace(config, kind=DataKind.criteo, path=str(path))


@pytest.mark.parametrize("blocks_per_file", [1, 3, 1000])
def test_a_split_is_read_as_it_was_written_however_it_is_cut_into_files(tmp_path, config, blocks_per_file):
    written = of(config)
    splits = open_splits(prepared(tmp_path, config, written, blocks_per_file=blocks_per_file))
    assert {name: split.rows for name, split in splits.items()} == {"train": 1000, "test": 61}
    for name, blocks in written.items():
        for i, block in enumerate(blocks):
            found = splits[name].read(i)
            assert np.array_equal(found.labels_N, block.labels_N)
            assert np.array_equal(found.dense_NF, block.dense_NF)
            for feature, (lengths_N, values) in block.bags.items():
                assert np.array_equal(found.bags[feature][0], lengths_N), feature
                assert np.array_equal(found.bags[feature][1], values), feature


def first_batches(config: DataConfig) -> list[Batch]:
    train = open_splits(config)["train"]
    batches = GlobalBatches(train, config, global_batch=96, rank=0, world_size=1, seed=None)
    return list(batches.batches(0, batches.steps_per_epoch))


def test_a_bad_value_is_found_when_its_batch_is_read(tmp_path, config):
    blocks = of(config)
    blocks["train"][2].bags["item"][1][17] = 97
    with pytest.raises(DataError) as error:
        first_batches(prepared(tmp_path, config, blocks))
    assert str(error.value).startswith(
        f"data {tmp_path}, block 2, row 17: id 97 of sparse feature 'item', expected 0 to 96"
    )


@pytest.mark.parametrize("column", ["label", "dense", "dense value", "item", "history", "id in history"])
def test_a_null_is_not_taken_for_a_value(tmp_path, config, column):
    blocks = of(config)
    batches = [datasets.batch(config, block) for block in blocks["train"]]
    name = {"dense value": "dense", "id in history": "history"}.get(column, column)
    rows = batches[1].column(name).to_pylist()
    row = next(i for i, value in enumerate(rows) if not isinstance(value, list) or value)
    if column in ("dense value", "id in history"):
        rows[row][0] = None
    else:
        rows[row] = None
    place = batches[1].schema.get_field_index(name)
    batches[1] = batches[1].set_column(place, name, pa.array(rows, batches[1].column(name).type))
    settings = prepared(tmp_path, config, blocks)
    index = read_index(tmp_path)
    index.splits["train"].files[:] = [datasets.write_arrow(tmp_path / "nulls.arrow", batches)]
    write_index(tmp_path, index)
    with pytest.raises(DataError) as error:
        first_batches(settings)
    assert name in str(error.value).replace(str(tmp_path), "")


def test_record_batches_of_another_size_are_refused(tmp_path, config):
    blocks = of(config)
    head = blocks["train"][0]
    blocks["train"][:1] = [take(head, range(100)), take(head, range(100, len(head)))]
    with pytest.raises(DataError, match="256"):
        first_batches(prepared(tmp_path, config, blocks))


def test_a_file_that_is_not_arrow_is_named(tmp_path, config):
    settings = prepared(tmp_path, config, of(config))
    path = tmp_path / "train-0.arrow"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(DataError, match=r"train-0\.arrow: not an Arrow file"):
        open_splits(settings)


def test_a_file_without_a_column_is_named(tmp_path, config):
    blocks = of(config)
    settings = prepared(tmp_path, config, blocks)
    index = read_index(tmp_path)
    batches = [datasets.batch(config, block) for block in blocks["train"]]
    index.splits["train"].files[:] = [
        datasets.write_arrow(tmp_path / "less.arrow", [b.drop_columns(["tags"]) for b in batches])
    ]
    write_index(tmp_path, index)
    with pytest.raises(DataError, match=r"less\.arrow: no column \['tags'\]; prepare the data set again"):
        open_splits(settings)


def test_a_split_with_too_few_record_batches_is_refused_before_it_is_read(tmp_path, config):
    blocks = of(config)
    settings = prepared(tmp_path, config, blocks)
    index = read_index(tmp_path)
    file = index.splits["train"].files[0]
    index.splits["train"].files[0] = dataclasses.replace(file, rows=file.rows + 256)
    write_index(tmp_path, index)
    with pytest.raises(DataError, match=r"train-0\.arrow: 4 record batches, expected 5, for 1256 rows of 256 each"):
        open_splits(settings)


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_empty_split_is_an_error(tmp_path, config, split):
    with pytest.raises(DataError) as error:
        open_splits(prepared(tmp_path, config, {**of(config), split: []}))
    assert str(error.value) == f"data {tmp_path}: the {split} split is empty or missing"


def test_a_missing_split_is_an_error(tmp_path, config):
    blocks = of(config)
    del blocks["test"]
    with pytest.raises(DataError, match="the test split is empty or missing"):
        open_splits(prepared(tmp_path, config, blocks))


def test_a_val_split_is_optional(tmp_path, config):
    blocks = of(config)
    for name, val in {"without": [], "with": blocks["test"]}.items():
        splits = open_splits(prepared(tmp_path / name, config, {**blocks, "val": val}))
        assert ("val" in splits) == bool(val)


def test_a_data_set_for_other_tables_is_refused(tmp_path, config):
    settings = prepared(tmp_path, config, of(config))
    settings.sparse[0].rows += 1
    with pytest.raises(DataError, match="feature 'user' has 5004 rows, the data set was prepared for 5003"):
        open_splits(settings)


def test_real_data_without_a_path_is_an_error(config):
    with pytest.raises(
        DataError, match=re.escape("data.path=null: expected a data set made by python -m rechpc.prepare")
    ):
        open_splits(dataclasses.replace(config, kind=DataKind.criteo))


def test_columns_may_stand_in_any_order(tmp_path, config):
    blocks = of(config)
    settings = prepared(tmp_path, config, blocks)
    index = read_index(tmp_path)
    batches = [datasets.batch(config, block) for block in blocks["train"]]
    turned = [b.select(b.schema.names[::-1]) for b in batches]
    index.splits["train"].files[:] = [datasets.write_arrow(tmp_path / "turned.arrow", turned)]
    write_index(tmp_path, index)
    assert json.loads((tmp_path / INDEX_NAME).read_text())["splits"]["train"]["files"][0]["name"] == "turned.arrow"
    split = open_splits(settings)["train"]
    assert isinstance(split, ArrowSplit)
    assert np.array_equal(split.read(0).bags["tags"][1], blocks["train"][0].bags["tags"][1])


# Rehearsals.


def test_a_rehearsal_reads_the_first_rows_with_ids_folded_and_bad_ones_stay_bad():
    split = Rehearsed(Numbered(25, 10), {"one": (13, 4), "many": (100, 7)}, rows=14)
    assert split.rows == 14
    assert split.read(1).labels_N.tolist() == [0, 1, 0, 1]
    assert split.read(1).bags["one"][1].tolist() == [2, 3, 0, 13]  # 13 is no id of the data set
    assert split.read(0).bags["many"][1].tolist() == [1, 2, 2, 3, 3, 3, 5, 6, 6, 0, 0, 0, 2]


def test_only_a_rehearsal_may_have_smaller_tables_than_the_data_set(tmp_path):
    config = numbered_config(100, 10)
    datasets.write(tmp_path, config, {"train": [numbered(np.arange(10))], "test": [numbered(np.arange(10))]})
    for feature in config.sparse:
        feature.rows = 4
    config.path = str(tmp_path)
    with pytest.raises(DataError, match="has 4 rows, the data set was prepared for 100"):
        open_splits(config)
    config.rehearsal_rows = 6
    train = open_splits(config)["train"].read(0)
    assert train.bags["one"][1].tolist() == [0, 1, 2, 3, 0, 1]
