"""When a run saves itself, and what goes on beside training while it does.

The loop stops for a copy to host memory; a thread of every rank writes, checks and commits it, and removes what is
not kept. One save at a time. All ranks learn of its outcome at the same step, so that they go on or stop together.
"""

import datetime
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

import rechpc
from rechpc import manifest
from rechpc.choices import KeepBest
from rechpc.config import AUTO, RunConfig
from rechpc.errors import CheckpointError, RechpcError
from rechpc.rank import checkpoint
from rechpc.rank.optim import Optimizers
from rechpc.rank.process import Process
from rechpc.rundir import RunDir, code_sha256, read_json

logger = logging.getLogger(__name__)

_FIRST_AUTO_STEPS = 100  # with checkpoint.every=auto, before anything is measured
_LONGEST_AUTO_S = 1800.0
# Ranks write for different times, and who has finished waits here; a rank that dies is noticed at once all the same.
_PATIENCE = datetime.timedelta(days=1)
_DISTRIBUTIONS = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")

Record = Callable[[int, dict[str, Any]], None]


@dataclass(slots=True)
class _Save:
    """A save that is under way; the future has the bytes written, on rank 0."""

    step: int
    began_s: float
    future: "Future[tuple[int, float]]"  # bytes, and when it was committed
    stall_s: float = 0.0


class Saver:
    """The checkpoints of one attempt."""

    def __init__(
        self, run: RunDir, model: DistributedModelParallel, optimizers: Optimizers, config: RunConfig,
        process: Process, record: Record,
    ) -> None:  # fmt: skip
        """Collective: every rank."""
        self._run, self._model, self._optimizers, self._config = run, model, optimizers, config
        self._process, self._record = process, record
        # A group of its own: the thread's collectives must not mix with those of the loop.
        group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._beside = replace(process, host_group=group)
        self._host = checkpoint.HostCopy() if config.checkpoint.asynchronous else None
        made_by = _made_by(run, config) if process.is_main else {}
        self._facts = {"made_for": checkpoint.made_for(config), "made_by": made_by}
        self._save: _Save | None = None
        self._misses, self._failure = 0, ""  # saves in a row that failed, and the last of them
        self._warned: set[str] = set()
        self._auto_steps = _FIRST_AUTO_STEPS
        self._step_s = 0.0
        self._clock = (0, time.monotonic())
        self.started_step: int | None = None  # the last save that was begun
        self.committed_step: int | None = None  # the last one that is complete

    def restore(self) -> checkpoint.State | None:
        """The state of the newest checkpoint, loaded; None for a run that has none, after any warm start.

        Collective: every rank. Raises CheckpointError on every rank.
        """
        found = checkpoint.restore(self._run, self._model, self._optimizers, self._config, self._process)
        if found is None:
            if self._config.checkpoint.init_from:
                path, names = checkpoint.warm_start(
                    self._config.checkpoint, self._model, self._optimizers, self._process
                )
                logger.info("init_from=%s tensors=%d: %s", path, len(names), " ".join(names))
                self._record(0, {"init_from": str(path), "init_tensors": len(names)})
            return None
        if self._process.is_main:
            now = {**self._facts["made_by"], "attempts": found.made_by.get("attempts")}  # of which there is a new one
            changed = checkpoint.differences(found.made_by, now)
            if changed:
                logger.warning("step=%d changed since the checkpoint: %s", found.step, ", ".join(changed))
        self.started_step = self.committed_step = found.step
        self._clock = (found.step, time.monotonic())
        return found.state

    def due(self, step: int) -> bool:
        """Whether the run saves itself after this step; the same on every rank."""
        every, eval_every = self._config.checkpoint.every, self._config.trainer.eval_every
        if self._config.checkpoint.keep_best is not KeepBest.none and step % eval_every == 0:
            return True
        if every == AUTO:
            return step >= (self.started_step or 0) + self._auto_steps
        assert isinstance(every, int)
        return every > 0 and step % every == 0

    @property
    def busy(self) -> bool:
        """Whether this rank's thread is at work. Raises what it raised, if that is nothing it could report to all."""
        if self._save is None or not self._save.future.done():
            return self._save is not None
        error = self._save.future.exception()
        if error is not None and not isinstance(error, RechpcError):
            raise error
        return False

    def save(self, step: int, state: checkpoint.State) -> None:
        """Begin to save this step; waits for the save before, and for the copy to host memory.

        Collective: every rank. Raises as `settle` does, for the save before.
        """
        if self._save is not None and self.busy:
            self._warn("interval", f"a save takes longer than the steps between two: checkpoint.every="
                       f"{self._config.checkpoint.every} is too small for it")  # fmt: skip
        self.settle()
        began_s = time.monotonic()
        last_step, last_s = self._clock
        self._step_s = (began_s - last_s) / max(1, step - last_step)
        mine = checkpoint.share(step, state, self._model, self._optimizers, self._process.env.rank, self._host)
        self._save = _Save(step, began_s, Future())
        threading.Thread(target=self._write, args=(mine, self._save.future), name="checkpoint", daemon=True).start()
        self.started_step = step
        self._clock = (step, time.monotonic())
        self._save.stall_s = time.monotonic() - began_s
        if self._host is None:
            self.settle()

    def settle(self, *, last: bool = False) -> None:
        """Wait for the save that is under way, if any is, and account for it.

        Collective: every rank; nobody waits where no rank is `busy`. Raises on every rank: TrainingError for a value
        that is not finite; CheckpointError when checkpoint.max_failures saves in a row have failed, or the `last`.
        """
        if self._save is not None:
            began_s, save = time.monotonic(), self._save
            self._save = None
            try:
                size_bytes, committed_s = save.future.result()
                self._misses, self.committed_step = 0, save.step
                self._account(save, size_bytes, committed_s - save.began_s, save.stall_s + time.monotonic() - began_s)
            except CheckpointError as error:
                self._misses += 1
                self._failure = f"step {save.step}: checkpoint not written: {error}"
                self._record(save.step, {"checkpoint_failed": str(error)})
                if self._misses < self._config.checkpoint.max_failures and not last:
                    logger.warning("%s; training goes on", self._failure)
        if self._misses >= self._config.checkpoint.max_failures or (last and self._misses):
            step = self.committed_step
            kept = "there is none" if step is None else f"the last one is of step {step}"
            raise CheckpointError(f"{self._failure} (failures in a row: {self._misses}; {kept})")

    def outlive(self, error: BaseException) -> None:
        """Let the save that is under way end before the error that ends this rank does.

        The others still write their shares: they wait for this rank in their next step.
        """
        if self._save is not None:
            logger.info("step=%d is still being saved; %s ends the run after it", self._save.step, type(error).__name__)
            wait([self._save.future], timeout=self._config.job.signal_lead_s)

    def _account(self, save: _Save, size_bytes: int, duration_s: float, stall_s: float) -> None:
        lead_s = self._config.job.signal_lead_s
        if duration_s > lead_s:
            self._warn("lead", f"a save took {duration_s:.0f} s: it would not end within job.signal_lead_s={lead_s:g}")
        values: dict[str, Any] = {
            "checkpoint_step": save.step,
            "checkpoint_stall_s": round(stall_s, 4),
            "checkpoint_duration_s": round(duration_s, 4),
            "checkpoint_bytes": size_bytes,
            "checkpoint_gb_per_s": round(size_bytes / duration_s / 1e9, 4),
        }
        if self._config.checkpoint.every == AUTO:
            mtbf_s = 3600 * self._config.checkpoint.node_mtbf_h / self._config.job.nodes
            steps = round(interval_s(stall_s, duration_s, mtbf_s) / max(self._step_s, 1e-6))
            # Measured by every rank, decided by one.
            self._auto_steps = values["checkpoint_every"] = self._process.agree(max(1, steps))
        self._record(save.step, values)

    def _write(self, mine: checkpoint.Share, future: "Future[tuple[int, float]]") -> None:
        """The life of the thread. Collective: the threads of all ranks."""
        try:
            whole = checkpoint.write(self._run, mine, self._facts, self._beside)
            committed_s = time.monotonic()
            if whole is not None:
                self._retire(mine.step)
            future.set_result((whole.size_bytes if whole else 0, committed_s))
        except BaseException as error:  # the loop raises it
            future.set_exception(error)

    def _retire(self, newest: int) -> None:
        """Remove what `checkpoint.keep*` does not keep, now that a newer one is complete. Called by rank 0."""
        policy = self._config.checkpoint
        best = None if policy.keep_best is KeepBest.none else manifest.best_step(self._run, policy.keep_best)
        kept = manifest.kept_for(self._run, newest=newest, keep=policy.keep, keep_every=policy.keep_every, best=best)
        manifest.retire(self._run, kept, newest=newest)

    def _warn(self, about: str, message: str) -> None:
        """Say it once an attempt, on rank 0."""
        if self._process.is_main and about not in self._warned:
            self._warned.add(about)
            logger.warning(message)


def interval_s(stall_s: float, duration_s: float, mtbf_s: float) -> float:
    """Seconds between two saves that lose least to saving and to failures (https://doi.org/10.1145/361147.361115).

    `stall_s` is what a save costs training, `duration_s` how long it is under way: no sooner than that, and at least
    every half hour.
    """
    return min(max(math.sqrt(2 * stall_s * mtbf_s), duration_s), max(_LONGEST_AUTO_S, duration_s))


def _made_by(run: RunDir, config: RunConfig) -> dict[str, Any]:
    """What saves, for people and for a later attempt to compare itself with; nothing that may be secret."""
    values = asdict(config)
    installed = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    return {
        "attempts": [{"name": a.name, **(read_json(a.facts_path) or {})} for a in run.attempts()],
        "world_size": config.world_size,
        "code_sha256": code_sha256(),
        "versions": {"rechpc": rechpc.__version__, **{n: installed[n] for n in _DISTRIBUTIONS if n in installed}},
        "config": {key: values[key] for key in ("sharding", "trainer", "checkpoint")},
    }
