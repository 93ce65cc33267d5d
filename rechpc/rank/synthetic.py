"""The default data: a click log drawn from a planted teacher, so that the best possible score is known.

Ids follow a power law, some features are bags of ids, and the label is a Bernoulli draw with a probability that
the teacher knows. Every block is a pure function of (data.seed, split, block): nothing is stored, any rank can
make any block, and no world size changes a sample.
"""

import itertools

import numpy as np

from rechpc.config import DataConfig, SparseFeature
from rechpc.rank.blocks import Block, one_each

# Independent streams of random numbers below data.seed.
_SPLITS = {"train": 0, "val": 1, "test": 2, "calibration": 3}
_TEACHER = 4
_LATENT_DIM = 4
_PAIR_WEIGHT = 0.2  # of the interactions beside the effects of single ids, which have weight 1
_BASE_LOGIT = -1.2  # about a quarter of the labels are positive


class Synthetic:
    """One split of the synthetic click log."""

    def __init__(self, config: DataConfig, split: str) -> None:
        sizes = {"train": config.synthetic.train_rows, "val": config.synthetic.val_rows}
        self.rows = sizes.get(split, config.synthetic.test_rows)
        self.block_rows = config.block_rows
        self._config = config
        self._split = split
        self._teacher = _Teacher(config)

    def read(self, block: int) -> Block:
        """Rows [block * block_rows, ...) of the split."""
        rows = min(self.block_rows, self.rows - block * self.block_rows)
        return self._draw(block, rows)[0]

    def probabilities(self, block: int) -> np.ndarray:
        """The teacher's click probability of each row, float64 (N,): no model can score better than this."""
        rows = min(self.block_rows, self.rows - block * self.block_rows)
        return self._draw(block, rows)[1]

    def _draw(self, block: int, rows: int) -> tuple[Block, np.ndarray]:
        config = self._config
        rng = np.random.default_rng([config.seed, _SPLITS[self._split], block])
        dense_NF, bags = _features(config, self._teacher.id_order, rng, rows)
        noise = config.synthetic.label_noise
        clean_N = 1 / (1 + np.exp(-self._teacher.logits(dense_NF, bags)))
        probability_N = (1 - noise) * clean_N + noise / 2
        labels_N = (rng.random(rows) < probability_N).astype(np.int8)
        return Block(labels_N=labels_N, dense_NF=dense_NF, bags=bags), probability_N


class _Teacher:
    """A fixed function of dense values, ids and pairs of them, scaled to `signal` standard deviations."""

    def __init__(self, config: DataConfig) -> None:
        rng = np.random.default_rng([config.seed, _TEACHER])
        tables = config.tables()
        self.id_order = {name: rng.permutation(t.rows).astype(np.int32) for name, t in tables.items()}
        self._effect = {name: rng.standard_normal(t.rows) for name, t in tables.items()}
        self._latent = {name: rng.standard_normal((t.rows, _LATENT_DIM)) for name, t in tables.items()}
        self._dense_weight = rng.standard_normal(len(config.dense))
        self._features = config.sparse
        self._mean, self._scale = 0.0, 1.0
        sample = _features(config, self.id_order, np.random.default_rng([config.seed, _SPLITS["calibration"]]), 8192)
        raw_N = self.logits(*sample) - _BASE_LOGIT
        self._mean, self._scale = raw_N.mean(), config.synthetic.signal / max(raw_N.std(), 1e-12)

    def logits(self, dense_NF: np.ndarray, bags: dict[str, tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """The teacher's logit of each row, float64 (N,)."""
        dense_N = dense_NF @ self._dense_weight
        raw_N = dense_N + 0.5 * dense_NF[:, 0] * dense_N
        latents = []
        for feature in self._features:
            lengths_N, values = bags[feature.name]
            raw_N += _bag_mean(self._effect[feature.table_name][values], lengths_N)
            latents.append(_bag_mean(self._latent[feature.table_name][values], lengths_N))
        # Neighbours in the list of features interact, which a model without products cannot express.
        for left_ND, right_ND in itertools.pairwise(latents):
            raw_N += _PAIR_WEIGHT * (left_ND * right_ND).sum(axis=1)
        return (raw_N - self._mean) * self._scale + _BASE_LOGIT


def _features(
    config: DataConfig, id_order: dict[str, np.ndarray], rng: np.random.Generator, rows: int
) -> tuple[np.ndarray, dict[str, tuple[np.ndarray, np.ndarray]]]:
    dense_NF = rng.standard_normal((rows, len(config.dense)), dtype=np.float32)
    bags = {}
    for feature in config.sparse:
        if feature.ids_per_sample == 1:
            lengths_N = one_each(rows)
        else:  # a bag: some are empty, some are long
            lengths_N = rng.poisson(feature.ids_per_sample, rows).astype(np.int32)
        popularity = _power_law(rng, feature, config.synthetic.id_skew, int(lengths_N.sum()))
        bags[feature.name] = lengths_N, id_order[feature.table_name][popularity]
    return dense_NF, bags


def _power_law(rng: np.random.Generator, feature: SparseFeature, skew: float, count: int) -> np.ndarray:
    """Draws from 0 to rows - 1 with P(i) about (i + 1) ** -skew, by the inverse of the continuous distribution."""
    uniform = rng.random(count)
    if abs(skew - 1) < 1e-6:
        position = (feature.rows + 1) ** uniform
    else:
        power = 1 - skew
        position = (((feature.rows + 1) ** power - 1) * uniform + 1) ** (1 / power)
    return np.minimum(position.astype(np.int64) - 1, feature.rows - 1)


def _bag_mean(values: np.ndarray, lengths_N: np.ndarray) -> np.ndarray:
    """Mean of the values of each bag, 0 for an empty one."""
    ends = np.cumsum(lengths_N)
    total = np.concatenate([np.zeros((1, *values.shape[1:])), np.cumsum(values, axis=0)])
    count = np.maximum(lengths_N, 1).reshape(-1, *[1] * (values.ndim - 1))
    mean: np.ndarray = (total[ends] - total[ends - lengths_N]) / count
    return mean
