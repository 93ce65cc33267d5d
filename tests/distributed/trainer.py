"""The parts of an attempt put together by hand, so that tests can look between its steps."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from rechpc.config import RunConfig
from rechpc.errors import RechpcError
from rechpc.rank import checkpoint, process
from rechpc.rank.data import GlobalBatches, open_splits
from rechpc.rank.loop import run_attempt
from rechpc.rank.model import build
from rechpc.rank.optim import Optimizers, fuse_sparse
from rechpc.rank.saver import Saver
from rechpc.rank.sharding import shard
from rechpc.rundir import Outcome, RunDir
from rechpc.topology import RankEnv

Parts = dict[str, list[tuple[tuple[int, ...], tuple[int, ...], np.ndarray]]]  # of one rank: shape, offset, values


@dataclass
class Trainer:
    """One rank, ready to train."""

    config: RunConfig
    run: RunDir
    here: process.Process
    model: DistributedModelParallel
    optimizers: Optimizers
    batches: GlobalBatches

    def __post_init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.saver = Saver(
            self.run, self.model, self.optimizers, self.config, self.here, lambda _, values: self.records.append(values)
        )
        # One for life, like the loop's: it rewrites the model at its first batch.
        self._pipeline = TrainPipelineSparseDist(
            self.model, self.optimizers.combined, self.here.device, execute_all_batches=True
        )

    def train(self, start: int, stop: int) -> list[float]:
        """This rank's losses of the steps [start, stop)."""
        iterator = self.batches.batches(start, stop)
        losses = []
        for step in range(start, stop):
            self.optimizers.set_step(step)
            loss, *_ = self._pipeline.progress(iterator)
            losses.append(loss.item())
        return losses

    @torch.no_grad()
    def score(self, step: int) -> np.ndarray:
        """This rank's logits of the samples of a step, without training on them."""
        self.model.eval()
        _, logits_B, _, _ = self._pipeline.progress(self.batches.batches(step, step + 1))
        self.model.train()
        return logits_B.numpy()

    def parts(self) -> Parts:
        """A copy of every tensor that a checkpoint would hold, random state excepted."""
        found: Parts = {}
        for part in checkpoint.parts(self.model, self.optimizers, self.here.env.rank):
            if not part.name.startswith("rng/"):
                found.setdefault(part.name, []).append((part.shape, part.offset, part.tensor.numpy().copy()))
        return found

    def save(self, step: int, **more: Any) -> None:
        """Save as a run does at its end: what fails is raised."""
        self.saver.save(step, {"step": step, **more})
        self.saver.settle(last=True)

    def restore(self) -> dict[str, Any] | None:
        return self.saver.restore()


@contextlib.contextmanager
def trainer(env: RankEnv, config: RunConfig, run: RunDir) -> Iterator[Trainer]:
    """A rank that has joined the others, with initial weights."""
    with process.start(config, env) as here:
        model = build(config.model, config.data, seed=config.seed, device=here.device)
        fuse_sparse(model, config.optimizer)
        sharded = shard(model, config, run, here)
        batches = GlobalBatches(
            open_splits(config.data)["train"],
            config.data,
            global_batch=config.trainer.global_batch,
            rank=env.rank,
            world_size=env.world_size,
            seed=config.seed,
        )
        yield Trainer(config, run, here, sharded, Optimizers(sharded, config.optimizer), batches)


def attempt_in_process(env: RankEnv, config: RunConfig, run: RunDir, name: str) -> Outcome | str:
    """The outcome of an attempt that has been started under this name, or how it failed."""
    try:
        return run_attempt(config, run, run.attempt(name), env)
    except RechpcError as error:
        return f"{type(error).__name__}: {error}"


def whole(by_rank: list[Parts]) -> dict[str, np.ndarray]:
    """The full tensors that the parts of all ranks make; replicas must be equal and no element may be missing."""
    tensors: dict[str, np.ndarray] = {}
    covered: dict[str, np.ndarray] = {}
    named = [(name, *part) for parts in by_rank for name, found in parts.items() for part in found]
    for name, shape, offset, values in named:
        tensor = tensors.setdefault(name, np.zeros(shape, values.dtype))
        seen = covered.setdefault(name, np.zeros(shape, bool))
        place = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
        assert np.array_equal(tensor[place][seen[place]], values[seen[place]]), f"replicas of {name} differ"
        tensor[place], seen[place] = values, True
    assert all(seen.all() for seen in covered.values()), [n for n, seen in covered.items() if not seen.all()]
    return tensors
