"""The learning rate of a step, against numbers worked out by hand."""

import pytest

from rechpc.config import DenseOptimizer, OptimizerConfig, SparseOptimizer
from rechpc.rank.optim import learning_rate


def rates(steps, *, peak=0.8, **values) -> list[float]:
    config = OptimizerConfig(
        sparse=SparseOptimizer.sgd, dense=DenseOptimizer.sgd, learning_rate=peak, min_learning_rate=0.01, **values
    )
    return [learning_rate(config, step, peak=peak) for step in steps]


def test_without_a_schedule_it_is_constant():
    assert rates([0, 1, 10, 10**9]) == [0.8] * 4


def test_warm_up_is_a_line_from_the_first_step_to_the_peak():
    assert rates(range(5), warmup_steps=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])


def test_a_warm_up_of_one_step_is_none():
    assert rates(range(2), warmup_steps=1) == [0.8, 0.8]


def test_between_warm_up_and_decay_it_stays_at_the_peak():
    assert rates(range(3, 10), warmup_steps=4, decay_start_step=10, decay_steps=5) == [0.8] * 7


def test_decay_falls_with_the_square_of_the_steps_left():
    # The 10th step is the last one at the peak, then 4, 3, 2, 1 and 0 fifths are left.
    found = rates(range(9, 15), decay_start_step=10, decay_steps=5)
    assert found == pytest.approx([0.8, 0.8 * 0.64, 0.8 * 0.36, 0.8 * 0.16, 0.8 * 0.04, 0.01])


def test_the_power_of_the_decay_is_a_choice():
    found = rates(range(9, 15), decay_start_step=10, decay_steps=5, decay_power=1.0)
    assert found == pytest.approx([0.8, 0.64, 0.48, 0.32, 0.16, 0.01])


def test_after_decay_it_stays_at_the_floor():
    assert rates([15, 16, 10**6], decay_start_step=10, decay_steps=5) == [0.01] * 3


def test_it_never_falls_below_the_floor_during_decay():
    found = rates(range(1000), decay_start_step=10, decay_steps=900, decay_power=4.0)
    assert min(found) == 0.01
    assert found == sorted(found, reverse=True)


def test_decay_may_begin_as_soon_as_warm_up_ends():
    found = rates(range(7), warmup_steps=4, decay_start_step=4, decay_steps=2)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.2, 0.01, 0.01])


def test_tables_and_the_rest_follow_the_same_shape_to_their_own_peaks():
    slow, fast = (rates(range(20), peak=p, warmup_steps=4, decay_start_step=8, decay_steps=9) for p in (0.4, 0.8))
    assert [b / a for a, b in zip(slow[:15], fast[:15], strict=True)] == pytest.approx([2.0] * 15)
