"""Rows in memory stay whole, and no bad value gets past the check."""

import numpy as np
import pytest

from rechpc.config import SparseFeature
from rechpc.errors import DataError
from rechpc.rank.blocks import Block, check, gather, pad
from tests.datasets import numbered, numbers, take


@pytest.mark.parametrize(
    "rows",
    [[], [0], [19], [3, 3, 3], list(range(20)), list(range(19, -1, -1)), [8, 4, 0, 12, 16], [7, 0, 2, 7, 19, 1]],
    ids=["none", "first", "last", "repeated", "all", "reversed", "empty bags", "any"],
)
def test_taken_rows_are_whole_and_in_the_given_order(rows):
    assert numbers(take(numbered(np.arange(20)), rows)) == rows


def test_bags_of_one_id_each_stay_with_their_rows_where_others_are_longer():
    lengths_N = np.array([2, 0, 1], np.int32)  # as many ids as rows, but not one each
    block = Block(np.zeros(3, np.int8), np.zeros((3, 1), np.float32), {"x": (lengths_N, np.array([10, 11, 30]))})
    lengths_N, values = take(block, [2, 0]).bags["x"]
    assert (lengths_N.tolist(), values.tolist()) == ([1, 2], [30, 10, 11])


def test_parts_of_blocks_keep_rows_and_order():
    blocks = [numbered(np.array(rows, int)) for rows in ([5, 1], [], [7, 3], [0, 4, 8, 6])]
    assert numbers(gather([(block, 0, len(block)) for block in blocks])) == [5, 1, 7, 3, 0, 4, 8, 6]
    assert numbers(gather([(blocks[3], 1, 3), (blocks[0], 0, 1), (blocks[3], 3, 3)])) == [4, 8, 5]


def test_padding_adds_rows_without_values():
    block = pad(numbered(np.array([3, 6])), 5)
    assert block.labels_N.tolist() == [1, 0, 0, 0, 0]
    assert block.dense_NF[2:].tolist() == [[0, 0]] * 3
    assert {name: lengths_N[2:].tolist() for name, (lengths_N, _) in block.bags.items()} == {
        "one": [0, 0, 0],
        "many": [0, 0, 0],
    }
    assert numbers(take(block, [0, 1])) == [3, 6]


def test_a_full_block_is_not_padded():
    block = numbered(np.arange(4))
    assert pad(block, 4) is block


# The check

SPARSE = [SparseFeature(name="one", rows=20), SparseFeature(name="many", rows=20, ids_per_sample=1.5)]
DENSE = ["plus", "minus"]


def bad_dense(value):
    def spoil(block):
        block.dense_NF[7, 1] = value

    return spoil


def bad_label(value):
    def spoil(block):
        block.labels_N[7] = value

    return spoil


def bad_id(name, position, value):
    def spoil(block):
        block.bags[name][1][position] = value

    return spoil


# In "many", row 7 has the ids at positions 9 to 11, after row 6 with 2 and row 4 with none.
BAD = {
    "id as large as the table": (bad_id("one", 7, 20), "id 20 of sparse feature 'one', expected 0 to 19"),
    "id far too large": (bad_id("many", 9, 2**31 - 1), "id 2147483647 of sparse feature 'many', expected 0 to 19"),
    "last id of a bag": (bad_id("many", 11, 20), "id 20 of sparse feature 'many', expected 0 to 19"),
    "negative id": (bad_id("one", 7, -1), "id -1 of sparse feature 'one', expected 0 to 19"),
    "negative id in a bag": (bad_id("many", 10, -5), "id -5 of sparse feature 'many', expected 0 to 19"),
    "NaN": (bad_dense(np.nan), "dense feature 'minus' is nan, expected a finite number"),
    "inf": (bad_dense(np.inf), "dense feature 'minus' is inf, expected a finite number"),
    "-inf": (bad_dense(-np.inf), "dense feature 'minus' is -inf, expected a finite number"),
    "label 2": (bad_label(2), "label 2, expected 0 or 1"),
    "label -1": (bad_label(-1), "label -1, expected 0 or 1"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_value_is_named_with_its_feature_and_row(bad):
    spoil, message = BAD[bad]
    block = numbered(np.arange(20))
    spoil(block)
    with pytest.raises(DataError) as error:
        check(block, SPARSE, DENSE, "data x, block 3")
    assert str(error.value).startswith(f"data x, block 3, row 7: {message}")


def test_good_values_pass():
    check(numbered(np.arange(20)), SPARSE, DENSE, "here")
    check(numbered(np.arange(0)), SPARSE, DENSE, "no rows")
    check(numbered(np.array([0, 4, 8])), SPARSE, DENSE, "no ids in a bag")


def test_the_first_of_many_bad_values_is_named():
    block = numbered(np.arange(20))
    block.bags["one"][1][[3, 11, 15]] = [99, -1, 98]
    with pytest.raises(DataError, match="row 3: id 99 "):
        check(block, SPARSE, DENSE, "here")
