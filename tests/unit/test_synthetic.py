"""The synthetic click log: the same everywhere, hard in the way real logs are, and with a known optimum."""

import dataclasses

import numpy as np
import pytest

from rechpc.config import DataConfig, DataKind, SparseFeature, SyntheticConfig
from rechpc.rank.synthetic import Synthetic
from tests.configs import compose

DEFAULT = compose().data


def read(config: DataConfig, split: str = "test") -> tuple[np.ndarray, np.ndarray]:
    """Labels and the teacher's probabilities of a whole split."""
    source = Synthetic(config, split)
    blocks = range(-(-source.rows // source.block_rows))
    labels_N = np.concatenate([source.read(b).labels_N for b in blocks])
    return labels_N, np.concatenate([source.probabilities(b) for b in blocks])


def changed(**values) -> DataConfig:
    return dataclasses.replace(DEFAULT, synthetic=dataclasses.replace(DEFAULT.synthetic, **values))


def one_table(rows: int, skew: float) -> DataConfig:
    sparse = [SparseFeature(name="x", rows=rows)]
    synthetic = SyntheticConfig(test_rows=200_000, id_skew=skew)
    return DataConfig(kind=DataKind.synthetic, dense=["d"], sparse=sparse, block_rows=200_000, synthetic=synthetic)


def ids(config: DataConfig) -> np.ndarray:
    return Synthetic(config, "test").read(0).bags["x"][1]


def expected_auc(probability_N: np.ndarray, labels_N: np.ndarray) -> float:
    """Pairs of a positive and a negative that the probabilities put in order, one by one."""
    positives, negatives = probability_N[labels_N == 1][:, None], probability_N[labels_N == 0]
    return float(((positives > negatives) + 0.5 * (positives == negatives)).mean())


def same(a, b) -> bool:
    bags = all(np.array_equal(x, y) for name in a.bags for x, y in zip(a.bags[name], b.bags[name], strict=True))
    return bags and np.array_equal(a.labels_N, b.labels_N) and np.array_equal(a.dense_NF, b.dense_NF)


def test_a_block_is_the_same_whoever_makes_it_and_whatever_was_made_before():
    one, other = Synthetic(DEFAULT, "train"), Synthetic(DEFAULT, "train")
    for block in (0, 1, 2):
        one.read(block)
    assert same(one.read(3), other.read(3))


def test_blocks_splits_and_seeds_differ():
    first = Synthetic(DEFAULT, "train").read(0)
    assert not same(first, Synthetic(DEFAULT, "train").read(1))
    assert not same(first, Synthetic(DEFAULT, "val").read(0))
    assert not same(first, Synthetic(dataclasses.replace(DEFAULT, seed=1), "train").read(0))


def test_the_split_has_as_many_rows_as_asked_for():
    config = changed(train_rows=20_001, val_rows=7, test_rows=8192)
    sizes = {}
    for split in ("train", "val", "test"):
        source = Synthetic(config, split)
        sizes[split] = sum(len(source.read(b)) for b in range(-(-source.rows // source.block_rows)))
    assert sizes == {"train": 20_001, "val": 7, "test": 8192}


def test_ids_fit_their_tables_and_bags_have_the_mean_length():
    block = Synthetic(DEFAULT, "train").read(0)
    for feature in DEFAULT.sparse:
        lengths_N, values = block.bags[feature.name]
        assert lengths_N.sum() == len(values)
        assert 0 <= values.min() <= values.max() < feature.rows
        assert lengths_N.mean() == pytest.approx(feature.ids_per_sample, rel=0.05)
    assert (block.bags["history"][0] == 0).any()


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0, 1.05, 2.0, 3.0])
def test_ids_follow_the_power_law(skew):
    counts = np.sort(np.bincount(ids(one_table(1000, skew)), minlength=1000))[::-1]
    # The i-th most frequent id has about the mass of the law's density between i and i + 1.
    edges = np.arange(1, 1002, dtype=float)
    mass = np.log(edges) if skew == 1 else edges ** (1 - skew) / (1 - skew)
    expected = np.diff(mass) / (mass[-1] - mass[0])
    for top in (1, 10, 100, 1000):
        assert counts[:top].sum() / counts.sum() == pytest.approx(expected[:top].sum(), abs=0.01), top


def test_frequent_ids_are_not_the_small_ones():
    counts = np.bincount(ids(one_table(1000, 1.05)), minlength=1000)
    assert np.argsort(counts)[::-1][:10].tolist() != list(range(10))


def test_a_table_of_one_row_has_one_id():
    assert set(ids(one_table(1, 1.05))) == {0}


def test_about_a_quarter_of_the_default_labels_are_positive():
    for split in ("val", "test"):
        assert 0.2 < read(DEFAULT, split)[0].mean() < 0.4


def test_labels_are_drawn_with_the_probabilities_of_the_teacher():
    labels_N, probability_N = read(DEFAULT)
    for low in np.arange(0, 1, 0.1):
        chosen = (probability_N >= low) & (probability_N < low + 0.1)
        if chosen.sum() > 500:
            error = 5 * np.sqrt(0.25 / chosen.sum())
            assert labels_N[chosen].mean() == pytest.approx(probability_N[chosen].mean(), abs=error)


def test_the_optimum_is_what_brute_force_over_the_probabilities_expects():
    labels_N, probability_N = (part[:4000] for part in read(changed(test_rows=4000)))
    # Over the draw of the labels: every pair in every order, weighted with its probability.
    positive, negative = probability_N[:, None], 1 - probability_N
    order = (probability_N[:, None] > probability_N) + 0.5 * (probability_N[:, None] == probability_N)
    weight = positive * negative
    np.fill_diagonal(weight, 0)
    assert expected_auc(probability_N, labels_N) == pytest.approx((weight * order).sum() / weight.sum(), abs=0.025)


def test_nothing_scores_better_than_the_teacher():
    labels_N, probability_N = (part[:4000] for part in read(DEFAULT))
    best = expected_auc(probability_N, labels_N)
    rng = np.random.default_rng(0)
    for noise in (0.1, 0.5, 2.0):
        logit_N = np.log(probability_N / (1 - probability_N)) + noise * rng.standard_normal(len(labels_N))
        assert expected_auc(logit_N, labels_N) < best
    assert 0.75 < best < 0.9


def test_nothing_can_be_learned_from_labels_that_are_all_noise():
    _, probability_N = read(changed(label_noise=1.0, test_rows=1000))
    assert probability_N.tolist() == [0.5] * 1000


def test_more_signal_makes_an_easier_log():
    scores = []
    for signal in (0.5, 1.8, 4.0):
        labels_N, probability_N = read(changed(signal=signal, test_rows=4000))
        scores.append(expected_auc(probability_N, labels_N))
    assert scores == sorted(scores)
    assert scores[0] < scores[2] - 0.1
