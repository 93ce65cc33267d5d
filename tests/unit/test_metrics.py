"""Scores against plain formulas and a count of all pairs."""

import math

import numpy as np
import pytest

from rechpc.errors import TrainingError
from rechpc.rank.metrics import auc, score


def pairs(scores: np.ndarray, labels: np.ndarray) -> float:
    """AUC by its definition: the share of (positive, negative) pairs in the right order, a tie counts half."""
    won = [
        1.0 if positive > negative else 0.5 if positive == negative else 0.0
        for positive in scores[labels == 1]
        for negative in scores[labels == 0]
    ]
    return sum(won) / len(won)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("levels", [2, 7, 10**6])
def test_auc_equals_the_count_of_all_pairs(seed: int, levels: int) -> None:
    rng = np.random.default_rng(seed)
    labels = (rng.random(200) < 0.3).astype(int)
    scores = rng.integers(levels, size=200).astype(float)

    assert auc(scores, labels) == pytest.approx(pairs(scores, labels), abs=1e-12)


def test_auc_does_not_depend_on_the_order_of_samples() -> None:
    rng = np.random.default_rng(0)
    labels, scores = rng.integers(2, size=500), rng.integers(20, size=500).astype(float)
    order = rng.permutation(500)

    assert auc(scores[order], labels[order]) == auc(scores, labels)


def test_scores_follow_their_formulas() -> None:
    logits, labels = np.array([-1.0, 0.5, 2.0, -3.0, 0.0]), np.array([0, 1, 0, 0, 1])
    p = 1 / (1 + np.exp(-logits))
    log_loss = -np.mean(np.where(labels == 1, np.log(p), np.log(1 - p)))
    found = score(logits, labels)

    assert found.samples == 5
    assert found.positives == 2
    assert found.log_loss == pytest.approx(log_loss)
    assert found.ne == pytest.approx(log_loss / -(0.4 * math.log(0.4) + 0.6 * math.log(0.6)))
    assert found.calibration == pytest.approx(p.mean() / 0.4)
    assert found.accuracy == pytest.approx(0.8)
    assert found.undefined is None


def test_logits_too_large_for_a_probability_still_have_a_loss() -> None:
    found = score(np.array([800.0, -800.0]), np.array([0, 1]))

    assert found.log_loss == pytest.approx(800)
    assert found.auc == 0.0


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_leaves_auc_and_ne_undefined_and_says_so(label: int) -> None:
    found = score(np.array([0.1, 0.2, 0.3]), np.full(3, label))

    assert found.auc is None
    assert found.ne is None
    assert found.log_loss is not None
    assert f"all 3 labels are {label}" in str(found.undefined)
    assert found.as_record("test")["test_auc_undefined"] == found.undefined


def test_no_samples_leave_everything_undefined() -> None:
    found = score(np.array([]), np.array([]))

    assert (found.auc, found.ne, found.log_loss, found.accuracy) == (None, None, None, None)
    assert found.undefined == "no samples"


def test_a_prediction_that_is_not_a_number_is_an_error() -> None:
    with pytest.raises(TrainingError, match="1 of 3 predictions are NaN"):
        score(np.array([0.1, np.nan, 0.3]), np.array([0, 1, 0]))
