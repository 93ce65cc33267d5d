"""Blocks of rows: taking and padding rows, and the checks that stop a bad value before the model sees it."""

import numpy as np
import pytest

from rechpc.config import SparseFeature
from rechpc.errors import DataError
from rechpc.rank.blocks import Block, check, concatenate, pad

SPARSE = [SparseFeature(name="user", rows=10), SparseFeature(name="tags", rows=5)]
DENSE = ["d0", "d1"]


def block() -> Block:
    """Four rows; `tags` has bags of 2, 0, 1 and 3 ids."""
    return Block(
        labels_N=np.array([0, 1, 1, 0], dtype=np.int8),
        dense_NF=np.arange(8, dtype=np.float32).reshape(4, 2),
        bags={
            "user": (np.ones(4, dtype=np.int32), np.array([1, 2, 3, 9])),
            "tags": (np.array([2, 0, 1, 3], dtype=np.int32), np.array([0, 1, 2, 3, 4, 0])),
        },
    )


def test_taking_rows_takes_their_bags() -> None:
    taken = block().take(np.array([3, 1, 0]))

    assert taken.labels_N.tolist() == [0, 1, 0]
    assert taken.dense_NF.tolist() == [[6, 7], [2, 3], [0, 1]]
    assert taken.bags["user"][1].tolist() == [9, 2, 1]
    assert taken.bags["tags"][0].tolist() == [3, 0, 2]
    assert taken.bags["tags"][1].tolist() == [3, 4, 0, 0, 1]


def test_parts_joined_are_the_whole() -> None:
    whole = block()
    joined = concatenate([whole.take(np.array([0])), whole.take(np.array([1, 2])), whole.take(np.array([3]))])

    assert joined.labels_N.tolist() == whole.labels_N.tolist()
    assert joined.bags["tags"][0].tolist() == whole.bags["tags"][0].tolist()
    assert joined.bags["tags"][1].tolist() == whole.bags["tags"][1].tolist()


def test_padding_adds_rows_without_ids() -> None:
    padded = pad(block(), 6)

    assert len(padded) == 6
    assert padded.bags["tags"][0].tolist() == [2, 0, 1, 3, 0, 0]
    assert padded.bags["tags"][1].tolist() == block().bags["tags"][1].tolist()
    assert padded.dense_NF[4:].tolist() == [[0, 0], [0, 0]]


def test_a_good_block_passes() -> None:
    check(block(), SPARSE, DENSE, "here")


@pytest.mark.parametrize("bad", [10, 2**31 - 1, -1])
def test_an_id_outside_its_table_names_feature_value_and_row(bad: int) -> None:
    found = block()
    found.bags["user"][1][2] = bad

    with pytest.raises(DataError, match=rf"here, row 2: id {bad} of sparse feature 'user', expected 0 to 9"):
        check(found, SPARSE, DENSE, "here")


def test_a_bad_id_in_a_bag_names_the_row_of_the_bag() -> None:
    found = block()
    found.bags["tags"][1][2] = 5

    with pytest.raises(DataError, match="row 2: id 5 of sparse feature 'tags'"):
        check(found, SPARSE, DENSE, "here")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_dense_value_that_is_not_finite_names_feature_and_row(bad: float) -> None:
    found = block()
    found.dense_NF[3, 1] = bad

    with pytest.raises(DataError, match=r"row 3: dense feature 'd1' is (nan|inf|-inf), expected a finite number"):
        check(found, SPARSE, DENSE, "here")


@pytest.mark.parametrize("bad", [2, -1])
def test_a_label_other_than_0_and_1_names_it(bad: int) -> None:
    found = block()
    found.labels_N[1] = bad

    with pytest.raises(DataError, match=f"row 1: label {bad}, expected 0 or 1"):
        check(found, SPARSE, DENSE, "here")
