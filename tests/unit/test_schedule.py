"""The learning rate of a step, by hand."""

import pytest

from rechpc.config import DenseOptimizer, OptimizerConfig, SparseOptimizer
from rechpc.rank.optim import learning_rate


def rates(steps: list[int], **schedule: float) -> list[float]:
    config = OptimizerConfig(sparse=SparseOptimizer.sgd, dense=DenseOptimizer.sgd, learning_rate=8.0, **schedule)
    return [learning_rate(config, step, peak=8.0) for step in steps]


def test_without_a_schedule_it_is_constant() -> None:
    assert rates([0, 1, 10**6]) == [8.0, 8.0, 8.0]


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    assert rates([0, 1, 2, 3, 4], warmup_steps=4) == [2.0, 4.0, 6.0, 8.0, 8.0]


def test_decay_is_polynomial_between_its_ends() -> None:
    found = rates([0, 9, 10, 11, 12, 13], decay_start_step=10, decay_steps=4)

    assert found == pytest.approx([8.0, 8.0, 8.0 * 9 / 16, 8.0 * 4 / 16, 8.0 / 16, 1e-7])


def test_after_decay_it_stays_at_the_floor() -> None:
    assert rates([50, 10**6], decay_start_step=10, decay_steps=4, min_learning_rate=0.5) == [0.5, 0.5]


def test_the_power_shapes_the_decay() -> None:
    assert rates([1], decay_start_step=0, decay_steps=4, decay_power=1.0) == [4.0]


def test_warm_up_plateau_and_decay_follow_each_other() -> None:
    found = rates([0, 1, 2, 5, 6, 7], warmup_steps=2, decay_start_step=6, decay_steps=2)

    assert found == pytest.approx([4.0, 8.0, 8.0, 8.0, 2.0, 1e-7])
