"""The synthetic click log: deterministic, of the promised shape, and with a known optimum."""

import numpy as np
import pytest

from rechpc.config import DataConfig
from rechpc.rank.metrics import auc
from rechpc.rank.synthetic import Synthetic
from tests.configs import compose


@pytest.fixture(scope="module")
def config() -> DataConfig:
    return compose("data.synthetic.test_rows=20000").data


def all_labels(split: Synthetic) -> np.ndarray:
    return np.concatenate([split.read(b).labels_N for b in range(-(-split.rows // split.block_rows))])


def all_probabilities(split: Synthetic) -> np.ndarray:
    return np.concatenate([split.probabilities(b) for b in range(-(-split.rows // split.block_rows))])


def test_the_same_seed_makes_the_same_rows(config: DataConfig) -> None:
    first, second = Synthetic(config, "train").read(3), Synthetic(config, "train").read(3)

    assert np.array_equal(first.labels_N, second.labels_N)
    assert np.array_equal(first.dense_NF, second.dense_NF)
    assert all(np.array_equal(first.bags[name][1], second.bags[name][1]) for name in first.bags)


def test_splits_blocks_and_seeds_differ(config: DataConfig) -> None:
    blocks = [
        Synthetic(config, "train").read(0),
        Synthetic(config, "train").read(1),
        Synthetic(config, "test").read(0),
        Synthetic(compose("data.seed=1").data, "train").read(0),
    ]

    assert len({block.dense_NF.tobytes() for block in blocks}) == 4


def test_the_last_block_has_what_is_left(config: DataConfig) -> None:
    assert len(Synthetic(config, "test").read(2)) == 20_000 - 2 * config.block_rows


def test_ids_follow_a_power_law(config: DataConfig) -> None:
    ids = Synthetic(config, "train").read(0).bags["user"][1]
    counts = np.sort(np.bincount(ids, minlength=10_000))[::-1]

    assert counts[:100].sum() > 0.4 * len(ids)
    assert (counts > 0).sum() > 1000


def test_bags_have_the_mean_that_the_configuration_says(config: DataConfig) -> None:
    lengths, _ = Synthetic(config, "train").read(0).bags["history"]

    assert lengths.mean() == pytest.approx(4, rel=0.05)
    assert lengths.min() == 0


def test_labels_are_drawn_with_the_probability_that_the_teacher_tells(config: DataConfig) -> None:
    split = Synthetic(config, "test")
    labels, probabilities = all_labels(split), all_probabilities(split)

    for low in np.arange(0, 1, 0.1):
        inside = (probabilities >= low) & (probabilities < low + 0.1)
        if inside.sum() > 500:
            assert labels[inside].mean() == pytest.approx(probabilities[inside].mean(), abs=0.05)


def test_the_optimum_leaves_room_on_both_sides(config: DataConfig) -> None:
    split = Synthetic(config, "test")

    assert 0.78 < auc(all_probabilities(split), all_labels(split)) < 0.86
    assert 0.2 < all_labels(split).mean() < 0.4


def test_pure_noise_cannot_be_predicted() -> None:
    split = Synthetic(compose("data.synthetic.label_noise=1").data, "test")

    assert set(all_probabilities(split)) == {0.5}
