"""Optimizers of tables and of the rest, and the learning-rate schedule, which is a function of the step alone.

Tables update inside the backward pass (FBGEMM's fused optimizers), data-parallel tables and the dense part after
it; all tables follow `optimizer.sparse`, whatever the plan made of them.
"""

from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from rechpc.choices import DenseOptimizer, SparseOptimizer
from rechpc.config import OptimizerConfig
from rechpc.rank.model import WeightedLoss

_TABLE_KEY = ".embedding_bags."


def fuse_sparse(model: WeightedLoss, config: OptimizerConfig) -> None:
    """Make the tables update themselves in the backward pass. Called before the model is sharded."""
    kind, arguments = _sparse(config)
    tables = model.model.sparse_arch.parameters()
    apply_optimizer_in_backward(kind, tables, {"lr": config.learning_rate, **arguments})


class Optimizers:
    """All optimizers of a sharded model, driven as one."""

    def __init__(self, model: DistributedModelParallel, config: OptimizerConfig) -> None:
        self._config = config
        rest = dict(in_backward_optimizer_filter(model.named_parameters()))
        replicated = {name: p for name, p in rest.items() if _TABLE_KEY in name}
        dense = {name: p for name, p in rest.items() if _TABLE_KEY not in name}
        self.fused = model.fused_optimizer
        kind, arguments = _sparse(config)
        self.replicated = KeyedOptimizerWrapper(
            replicated, lambda params: kind(params, lr=config.learning_rate, **arguments)
        ) if replicated else None  # fmt: skip
        self.dense = KeyedOptimizerWrapper(dense, lambda params: _dense(params, config))
        self._sparse = [o for o in (self.fused, self.replicated) if o is not None]
        self.combined = CombinedOptimizer([("fused", self.fused), ("dense", self.dense)] + (
            [("replicated", self.replicated)] if self.replicated else []
        ))  # fmt: skip
        self.make_state()

    def make_state(self) -> None:
        """Give a fresh dense Adam its moments.

        It would make them at its first step; a checkpoint loaded before that finds nothing to load into and the
        moments are lost without a word.
        """
        if self._config.dense is DenseOptimizer.adam:
            for param in self.dense.params.values():
                self.dense.state[param] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }

    def set_step(self, step: int) -> float:
        """Set the learning rates for this step (counted from 0); returns that of the tables."""
        sparse, dense = (learning_rate(self._config, step, peak=lr) for lr in self._peaks())
        for optimizer in self._sparse:
            for group in optimizer.param_groups:
                group["lr"] = sparse
        for group in self.dense.param_groups:
            group["lr"] = dense
        return sparse

    def _peaks(self) -> tuple[float, float]:
        config = self._config
        dense = config.learning_rate if config.dense_learning_rate is None else config.dense_learning_rate
        return config.learning_rate, dense


def learning_rate(config: OptimizerConfig, step: int, *, peak: float) -> float:
    """The learning rate of a step, counted from 0.

    Linear warm-up, a plateau, then polynomial decay to `min_learning_rate`, where it stays. Like LRPolicyScheduler of
    the MLPerf DLRM reference, whose step 1 is step 0 here and whose plateau stays one step short of the peak.
    """
    done = step + 1
    if done < config.warmup_steps:
        return peak * done / config.warmup_steps
    if not config.decay_steps or done <= config.decay_start_step:
        return peak
    left = max(0, config.decay_start_step + config.decay_steps - done)
    scale: float = (left / config.decay_steps) ** config.decay_power
    return max(config.min_learning_rate, peak * scale)


def _sparse(config: OptimizerConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    kinds: dict[SparseOptimizer, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        SparseOptimizer.sgd: (torch.optim.SGD, {}),
        SparseOptimizer.adagrad: (torch.optim.Adagrad, {"eps": config.eps}),
        SparseOptimizer.rowwise_adagrad: (RowWiseAdagrad, {"eps": config.eps}),
    }
    return kinds[config.sparse]


def _dense(params: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    kinds: dict[DenseOptimizer, Any] = {
        DenseOptimizer.sgd: torch.optim.SGD,
        DenseOptimizer.adagrad: torch.optim.Adagrad,
        DenseOptimizer.adam: torch.optim.Adam,
    }
    arguments = {} if config.dense is DenseOptimizer.sgd else {"eps": config.eps}
    return kinds[config.dense](params, lr=config.learning_rate, **arguments)  # type: ignore[no-any-return]
