"""What a set of predictions is worth: exact AUC, normalized entropy and their companions, over all ranks.

An undefined value is None with a reason, never 0.5 or 1.0.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from rechpc.errors import TrainingError
from rechpc.rank.process import Process


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Quality of predictions; `undefined` says why a value is None."""

    samples: int
    positives: int
    auc: float | None
    log_loss: float | None  # mean binary cross-entropy, nats
    ne: float | None  # log loss over the entropy of the label's mean, https://dl.acm.org/doi/10.1145/2648584.2648589
    calibration: float | None  # mean prediction over mean label
    accuracy: float | None  # at a threshold of 0.5
    undefined: str | None

    def as_record(self, prefix: str) -> dict[str, float | int | str | None]:
        """The values under `<prefix>_<name>`, the reason only where there is one."""
        names = ("auc", "ne", "log_loss", "calibration", "accuracy", "samples")
        record: dict[str, float | int | str | None] = {f"{prefix}_{name}": getattr(self, name) for name in names}
        return {**record, f"{prefix}_auc_undefined": self.undefined} if self.undefined else record


def score(logits_N: np.ndarray, labels_N: np.ndarray) -> Scores:
    """Scores of logits against labels 0 and 1, in float64.

    Raises TrainingError for a logit that is not finite: a NaN, sorted, would look like a perfect score.
    """
    logits_N = logits_N.astype(np.float64)
    if bad := int((~np.isfinite(logits_N)).sum()):
        raise TrainingError(f"{bad} of {len(logits_N)} predictions are not finite; training has diverged")
    samples, positives = len(labels_N), int(labels_N.sum())
    if not samples:
        undefined = "no samples"
        return Scores(samples=0, positives=0, auc=None, log_loss=None, ne=None, calibration=None, accuracy=None,
                      undefined=undefined)  # fmt: skip
    log_loss = float(np.mean(np.logaddexp(0, logits_N) - labels_N * logits_N))
    rate = positives / samples
    one_class = positives in (0, samples)
    entropy = 0.0 if one_class else -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
    prediction = float(np.mean(1 / (1 + np.exp(-np.clip(logits_N, -700, 700)))))
    return Scores(
        samples=samples,
        positives=positives,
        auc=None if one_class else auc(logits_N, labels_N),
        log_loss=log_loss,
        ne=None if one_class else float(log_loss / entropy),
        calibration=prediction / rate if positives else None,
        accuracy=float(np.mean((logits_N >= 0) == (labels_N == 1))),
        undefined=f"all {samples} labels are {labels_N[0]:.0f}: AUC and NE need both classes" if one_class else None,
    )


def auc(scores_N: np.ndarray, labels_N: np.ndarray) -> float:
    """The exact area under the ROC curve; a tied pair counts half. Both classes must be present."""
    order = np.argsort(scores_N, kind="stable")
    sorted_N = scores_N[order]
    last = np.append(np.flatnonzero(np.diff(sorted_N)), len(sorted_N) - 1)  # the last of each group of ties
    positives = np.diff(np.cumsum(labels_N[order].astype(np.int64))[last], prepend=0)
    negatives = np.diff(last + 1, prepend=0) - positives
    below = np.cumsum(negatives) - negatives
    pairs = float((positives * (below + 0.5 * negatives)).sum())
    return pairs / (float(positives.sum()) * float(negatives.sum()))


def gather_predictions(logits: list[torch.Tensor], labels: list[torch.Tensor], process: Process) -> Scores | None:
    """Scores over all ranks, on rank 0; None elsewhere. Lists hold this rank's batches, without padding.

    Collective: every rank. Rank 0 holds 8 bytes a sample of the whole split.
    """
    local = torch.stack([_cat(logits), _cat(labels)]).float().cpu()
    counts = [torch.zeros((), dtype=torch.int64) for _ in range(process.env.world_size)]
    dist.all_gather(counts, torch.tensor(local.shape[1]), group=process.host_group)
    longest = int(max(counts))
    padded = torch.zeros(2, longest)
    padded[:, : local.shape[1]] = local
    parts = [torch.empty_like(padded) for _ in counts] if process.is_main else None
    dist.gather(padded, parts, dst=0, group=process.host_group)
    if parts is None:
        return None
    whole = torch.cat([part[:, : int(n)] for part, n in zip(parts, counts, strict=True)], dim=1).numpy()
    return score(whole[0], whole[1])


def _cat(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if parts else torch.empty(0)


def entropy(rate: float) -> float | None:
    """Entropy of a label that is 1 with this rate, nats; None for one class."""
    return float(-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))) if 0 < rate < 1 else None
