"""Scores are those of the plain formulas, and what is undefined is said to be so."""

import numpy as np
import pytest
import torch

from rechpc.errors import TrainingError
from rechpc.rank.metrics import entropy, score
from rechpc.rank.process import Process
from rechpc.rank.report import Report, Window
from rechpc.rundir import RunDir, read_json
from rechpc.topology import RankEnv


def auc(scores_N: np.ndarray, labels_N: np.ndarray) -> float | None:
    return score(scores_N, labels_N).auc


def pairs_in_order(scores_N: np.ndarray, labels_N: np.ndarray) -> float:
    """The share of pairs of a positive and a negative that the scores put in order, a tie counting half."""
    count = 0.0
    for positive in scores_N[labels_N == 1]:
        for negative in scores_N[labels_N == 0]:
            count += 1.0 if positive > negative else 0.5 if positive == negative else 0.0
    return count / ((labels_N == 1).sum() * (labels_N == 0).sum())


@pytest.mark.parametrize("levels", [2, 5, 50, 10**9], ids=lambda n: f"{n} levels")
@pytest.mark.parametrize("positive_share", [0.01, 0.3, 0.99])
def test_auc_is_the_share_of_pairs_in_order(levels, positive_share):
    rng = np.random.default_rng([levels, int(100 * positive_share)])
    labels_N = (rng.random(300) < positive_share).astype(float)
    labels_N[:2] = 0, 1
    scores_N = rng.integers(levels, size=300) / levels + (labels_N * 2 // levels)
    assert auc(scores_N, labels_N) == pytest.approx(pairs_in_order(scores_N, labels_N), abs=1e-12)


@pytest.mark.parametrize(
    ("scores", "labels", "expected"),
    [
        ([1, 2, 3, 4], [0, 0, 1, 1], 1.0),
        ([4, 3, 2, 1], [0, 0, 1, 1], 0.0),
        ([1, 1, 1, 1], [0, 1, 0, 1], 0.5),
        ([1, 2, 2, 3], [0, 0, 1, 1], 0.875),
        ([1, 2], [1, 0], 0.0),
    ],
)
def test_auc_by_hand(scores, labels, expected):
    assert auc(np.array(scores, float), np.array(labels)) == expected


@pytest.mark.parametrize(
    ("seed", "samples", "levels", "area", "log_loss", "accuracy"),
    [
        (0, 1000, 3, 0.7085629513884045, 0.9467771626776513, 0.313),
        (1, 1000, 10**9, 0.7188511610854998, 0.6876221108074704, 0.591),
        (2, 100_000, 50, 0.7487470420331277, 0.6864931194339393, 0.59156),
        (3, 100_000, 10**6, 0.7453977456573488, 0.6922019900013107, 0.58944),
        (4, 1_000_000, 2000, 0.7462729863684017, 0.6902577932423486, 0.590321),
    ],
)
def test_scores_are_those_of_scikit_learn(seed, samples, levels, area, log_loss, accuracy):
    """What scikit-learn 1.9.1 gives: roc_auc_score(labels, logits), and log_loss, accuracy_score of probabilities."""
    rng = np.random.default_rng(seed)
    smooth_N = np.floor(rng.standard_normal(samples) * levels) / levels if levels > 3 else rng.integers(3, size=samples)
    logits_N = smooth_N.astype(np.float32)
    labels_N = (rng.random(samples) < 1 / (1 + np.exp(2 - logits_N))).astype(np.int8)

    found = score(logits_N, labels_N)

    assert found.auc == pytest.approx(area, abs=1e-12)
    assert found.log_loss == pytest.approx(log_loss, rel=1e-9)
    assert found.accuracy == pytest.approx(accuracy, abs=1e-12)


def test_auc_depends_on_the_order_of_scores_alone():
    rng = np.random.default_rng(0)
    scores_N, labels_N = rng.standard_normal(500), rng.integers(2, size=500)
    shuffle = rng.permutation(500)
    assert auc(scores_N, labels_N) == auc(scores_N[shuffle], labels_N[shuffle]) == auc(np.exp(scores_N), labels_N)


def test_auc_counts_more_pairs_than_a_32_bit_number_holds():
    half = 70_000  # 4.9e9 pairs
    scores_N = np.arange(2 * half, dtype=float)
    assert auc(scores_N, (scores_N >= half).astype(np.int8)) == 1.0


def test_scores_are_those_of_the_plain_formulas():
    rng = np.random.default_rng(1)
    logits_N = rng.standard_normal(400).astype(np.float32)
    labels_N = rng.integers(2, size=400).astype(np.float32)
    p_N = 1 / (1 + np.exp(-logits_N.astype(float)))
    rate = labels_N.mean(dtype=float)
    log_loss = -np.mean(labels_N * np.log(p_N) + (1 - labels_N) * np.log(1 - p_N))
    base = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))

    found = score(logits_N, labels_N)

    assert (found.samples, found.positives, found.undefined) == (400, int(labels_N.sum()), None)
    assert found.auc == pytest.approx(pairs_in_order(logits_N, labels_N), abs=1e-12)
    assert found.log_loss == pytest.approx(log_loss, rel=1e-12)
    assert found.ne == pytest.approx(log_loss / base, rel=1e-12)
    assert found.calibration == pytest.approx(p_N.mean() / rate, rel=1e-12)
    assert found.accuracy == np.mean((p_N >= 0.5) == (labels_N == 1))


def test_the_mean_label_as_prediction_has_ne_and_calibration_of_one():
    labels_N = np.array([1.0, 0, 0, 0])
    found = score(np.full(4, np.log(0.25 / 0.75)), labels_N)
    assert (found.ne, found.calibration, found.auc) == (pytest.approx(1), pytest.approx(1), 0.5)


def test_extreme_logits_neither_overflow_nor_saturate():
    with np.errstate(all="raise", under="ignore"):
        found = score(np.array([2000.0, -2000.0, 2000.0, -2000.0]), np.array([1, 0, 0, 1]))
    assert found.log_loss == 1000
    assert found.calibration == pytest.approx(1)


@pytest.mark.parametrize("label", [0, 1])
def test_with_one_class_auc_and_ne_are_undefined_and_said_so(label):
    found = score(np.array([0.5, -1.0, 2.0]), np.full(3, label))
    assert (found.auc, found.ne) == (None, None)
    assert found.undefined == f"all 3 labels are {label}: AUC and NE need both classes"
    assert found.log_loss > 0
    assert found.accuracy == pytest.approx([1 / 3, 2 / 3][label])
    assert (found.calibration is None) == (label == 0)


def test_without_samples_everything_is_undefined():
    found = score(np.empty(0), np.empty(0))
    assert (found.samples, found.undefined) == (0, "no samples")
    assert {found.auc, found.log_loss, found.ne, found.calibration, found.accuracy} == {None}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_prediction_that_is_not_a_finite_number_is_no_score(bad):
    logits_N = np.array([0.1, bad, 0.3, bad])
    with pytest.raises(TrainingError, match="2 of 4 predictions are "):
        score(logits_N, np.array([0, 1, 1, 0]))


def test_records_say_why_a_value_is_missing_and_only_then():
    both, one = score(np.array([0.0, 1.0]), np.array([0, 1])), score(np.array([0.0]), np.array([1]))
    assert "val_auc_undefined" not in both.as_record("val")
    assert one.as_record("val")["val_auc_undefined"] == one.undefined
    assert {k for k in both.as_record("test") if not k.startswith("test_")} == set()


@pytest.mark.parametrize(("rate", "expected"), [(0.5, np.log(2)), (0.25, 0.5623351446188083), (0.0, None), (1.0, None)])
def test_entropy_of_a_label(rate, expected):
    assert entropy(rate) == (expected if expected is None else pytest.approx(expected, rel=1e-12))


@pytest.mark.parametrize(("data_wait_s", "share"), [(0.09, None), (0.5, 0.5)])
def test_waiting_for_data_is_measured_and_said_where_it_costs_more_than_a_tenth(
    tmp_path, caplog, data_wait_s, share
) -> None:
    run = RunDir.create(tmp_path, "run")
    env = RankEnv(rank=0, local_rank=0, world_size=1, local_world_size=1)
    report = Report(run, run.start_attempt("a.0"), Process(env, torch.device("cpu"), host_group=None))
    window = Window()
    window.add(samples=8, loss=0.5, positive_rate=0.5, step_s=None, parts_s={"data_wait": 9.0})  # warming up
    window.add(samples=8, loss=0.5, positive_rate=0.5, step_s=1.0, parts_s={"data_wait": data_wait_s})
    values = window.values()
    assert values["rank0_data_wait_ms"] == pytest.approx(1000 * data_wait_s)
    report.data_wait(values)
    report.phase("training")
    assert read_json(run.attempt("a.0").heartbeat_path)["data_wait_share"] == share
    assert ("waits_for_data=50% of a step" in caplog.text) == bool(share)
