"""The life of a rank: from a configuration to a trained model, or to a checkpoint that another attempt goes on from.

Every rank takes the same branch at the same step. What rank 0 alone knows (that somebody asked to stop) and what
each knows in part (the loss) travels in an all-reduce beside the steps that follow (`rechpc.rank.pulse`), so that
nobody waits for it.
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields

import numpy as np
import torch

from rechpc import lifeline
from rechpc.choices import DataKind
from rechpc.config import RunConfig
from rechpc.errors import ConfigError, DataError, TrainingError
from rechpc.rank import breakdown, process, together
from rechpc.rank.blocks import Source
from rechpc.rank.data import GlobalBatches, open_checked
from rechpc.rank.metrics import Scores, gather_predictions, score
from rechpc.rank.model import Output, build
from rechpc.rank.optim import Optimizers, fuse_sparse
from rechpc.rank.profiling import Profiler
from rechpc.rank.pulse import Pulse, Pulses
from rechpc.rank.report import Report, Window
from rechpc.rank.saver import Saver
from rechpc.rank.sharding import settle, shard
from rechpc.rank.synthetic import Synthetic
from rechpc.rundir import AttemptDir, Outcome, RunDir, StopReason
from rechpc.topology import RankEnv

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class State:
    """What a checkpoint carries beside tensors. The step is also the position in the data."""

    step: int = 0
    samples: int = 0
    timed_samples: int = 0  # of samples_per_s in the result, over all attempts
    timed_s: float = 0.0
    window: Window = field(default_factory=Window)


def run_attempt(config: RunConfig, run: RunDir, attempt: AttemptDir, env: RankEnv) -> Outcome:
    """Train until the end or until asked to stop; writes everything that `docs/architecture.md` lists.

    Collective: every rank.
    """
    with contextlib.ExitStack() as stack:
        if env.rank == 0:
            stack.enter_context(lifeline.lock(run))
        here = stack.enter_context(together.start(config, attempt, env))
        report = Report(run, attempt, here)
        if config.preflight.only:
            report.end(Outcome.finished, step=0, checkpoint_step=None)
            return Outcome.finished
        parts = breakdown.on(here.device)
        stack.enter_context(parts.counting_waits())
        loop = _Loop(config, run, attempt, here, report, parts)
        try:
            reason = loop.train()
            if reason is None:
                loop.finish()
        except BaseException as error:
            loop.saver.outlive(error)
            raise
        outcomes = {None: Outcome.finished, StopReason.drain: Outcome.drained, StopReason.requeue: Outcome.requeued}
        outcome = outcomes[reason]
        report.end(outcome, step=loop.state.step, checkpoint_step=loop.saver.committed_step)
        return outcome


class _Loop:
    """One attempt's model, optimizers, data and progress."""

    def __init__(
        self, config: RunConfig, run: RunDir, attempt: AttemptDir, here: process.Process, report: Report,
        parts: breakdown.Breakdown,
    ) -> None:  # fmt: skip
        self._parts = parts
        self._config, self._run, self._attempt, self._here, self._report = config, run, attempt, here, report
        process.seed(config.seed, here.env.rank, step=0)
        report.phase("checking data")
        splits = open_checked(config.data, here, report.progress)
        report.phase("planning")
        if splits["train"].rows < config.trainer.global_batch:
            raise DataError(
                f"trainer.global_batch={config.trainer.global_batch}: the train split has only "
                f"{splits['train'].rows} samples; lower it"
            )
        self._test = self._batches(splits["test"])
        self._val = self._batches(splits["val"]) if "val" in splits else None
        if config.trainer.eval_every and self._val is None:
            raise DataError(f"trainer.eval_every={config.trainer.eval_every}: there is no val split; set it to 0")
        self._train = self._batches(splits["train"], training=True)
        self.total_steps = config.trainer.epochs * self._train.steps_per_epoch
        if config.trainer.max_steps is not None:
            self.total_steps = min(self.total_steps, config.trainer.max_steps)
        profile = config.trainer.profile_steps
        if profile and profile[-1] > self.total_steps:
            raise ConfigError(f"trainer.profile_steps={profile}: the run has {self.total_steps} steps")
        self._profiler = Profiler(config.trainer, run, rank=here.env.rank)
        model = build(config.model, config.data, seed=config.seed, device=here.device)
        fuse_sparse(model, config.optimizer)
        self._model = shard(model, config, run, here)
        self._optimizers = Optimizers(self._model, config.optimizer)
        settle(self._model, self._train.nothing().to(here.device))
        self._pipeline = breakdown.Pipeline(self._model, self._optimizers, here.device, parts)
        self.saver = Saver(run, self._model, self._optimizers, config, here, report.record)
        with parts.paused():
            self._restore()
        self._pulses = Pulses(here)
        self._first_timed_step = self.state.step + config.trainer.timing_warmup_steps + 1
        self._clock_s = time.perf_counter()

    def train(self) -> StopReason | None:
        """Train to the end; the reason when somebody asked to stop first, and the run is saved.

        A stop that comes before the first step finds nothing new to save.
        Collective: every rank.
        """
        every = self._config.trainer.eval_every
        reason: StopReason | None = self._here.agree(self._stop_requested())
        if reason is not None:
            return reason
        while self.state.step < self.total_steps and reason is None:
            end = self.total_steps
            if every:
                end = min(end, (self.state.step // every + 1) * every)
            reason = self._train_until(end)
            if every and reason is None and self._val is not None and self.state.step % every == 0:
                scores = self._evaluate(self._val)
                if scores is not None:
                    self._report.record(self.state.step, scores.as_record("val"))
                    self._report.progress(val_auc=scores.auc)
        if self.saver.started_step != self.state.step:
            self._save()
        with self._stall("saving"):
            self.saver.settle(last=True)
        return reason

    def finish(self) -> None:
        """Evaluate the test split and write the result.

        Collective: every rank.
        """
        scores = self._evaluate(self._test)
        if scores is None:
            return
        record = scores.as_record("test")
        self._report.record(self.state.step, record)
        speed = self.state.timed_samples / self.state.timed_s if self.state.timed_s else None
        facts = {"step": self.state.step, "samples_per_s": speed, "world_size": self._here.env.world_size}
        self._report.result({**facts, **record, **self._optimal()})

    def _train_until(self, end: int) -> StopReason | None:
        self._model.train()
        self._report.phase("training", step=self.state.step)
        batches = self._train.batches(self.state.step, end)
        while self.state.step < end:
            rate = self._optimizers.set_step(self.state.step)
            self._profiler.begin(self.state.step + 1)
            output: Output = self._pipeline.progress(batches)
            self._parts.end_step()
            samples = self._train.num_samples(self.state.step)
            self.state.step += 1
            self.state.samples += samples
            arrived = self._pulses.push(
                output, self._stop_requested(), saving=self.saver.busy, step=self.state.step, samples=samples, rate=rate
            )
            reason = self._take(arrived)
            self._report.progress()  # sums of several steps may come together
            due = self.saver.due(self.state.step)
            # The sums of the last step that is not timed are waited for: what is timed begins at its end.
            warm = self.state.step + 1 == self._first_timed_step or self._profiler.slows(self.state.step)
            if due or warm or reason is not None or self.state.step == end:
                reason = self._take(self._pulses.flush()) or reason
            if due or reason is not None:
                self._save()
            traced = self._profiler.is_due(self.state.step, last=reason is not None)
            if traced:
                with self._stall("profiling"):
                    self._profiler.write(self.state.step)
            if due or reason is not None or traced:
                self._report.phase("training", step=self.state.step)
            if reason is not None:
                batches.close()
                return reason
        return None

    def _stop_requested(self) -> StopReason | None:
        return self._attempt.stop_reason() if self._here.is_main else None

    def _take(self, pulses: list[Pulse]) -> StopReason | None:
        """Account for steps whose sums have arrived together; the reason to stop that came with one."""
        now_s = time.perf_counter()
        reason = None
        for pulse in pulses:
            self._account(pulse, (now_s - self._clock_s) / len(pulses))
            reason = pulse.stop or reason
        if pulses:
            self._clock_s = now_s
        return reason

    def _account(self, pulse: Pulse, step_s: float) -> None:
        if not np.isfinite(pulse.loss):
            self.saver.settle()
            saved = self.saver.committed_step
            last = f"the last checkpoint is of step {saved}" if saved else "there is no checkpoint"
            raise TrainingError(
                f"loss is {pulse.loss} at step {pulse.step}; {last}; lower optimizer.learning_rate, or give "
                "optimizer.warmup_steps"
            )
        if not pulse.saving:
            self.saver.settle()
        is_timed = pulse.step >= self._first_timed_step and not self._profiler.slows(pulse.step)
        self.state.window.add(
            samples=pulse.samples,
            loss=pulse.loss,
            positive_rate=pulse.positive_rate,
            step_s=step_s if is_timed else None,
            parts_s=self._parts.take(),
        )
        if is_timed:
            self.state.timed_samples += pulse.samples
            self.state.timed_s += step_s
        if pulse.step % self._config.trainer.log_every == 0 or pulse.step == self.total_steps:
            values = self.state.window.values()
            self.state.window = Window()
            self._report.record(pulse.step, {**values, "learning_rate": pulse.rate, **self._report.memory()})
            self._report.progress(**{k: values[k] for k in ("loss", "ne", "samples_per_s")})
            self._report.data_wait(values)
        speed = self.state.timed_samples / self.state.timed_s if self.state.timed_s else None
        left = (self.total_steps - pulse.step) * self._config.trainer.global_batch
        self._report.progress(
            step=pulse.step, total_steps=self.total_steps, seconds_left=left / speed if speed else None
        )

    def _save(self) -> None:
        began_s = time.perf_counter()
        with self._stall("saving"):
            self.saver.save(self.state.step, asdict(self.state))
        self.state.window.stall_s += time.perf_counter() - began_s

    def _restore(self) -> None:
        self._report.phase("restoring")
        saved = self.saver.restore()
        known = {f.name for f in fields(Window)}  # a checkpoint of another version may have summed up something else
        window = Window(**{name: value for name, value in (saved or {}).get("window", {}).items() if name in known})
        self.state = State(**{**(saved or {}), "window": window})
        logger.info("start_step=%d total_steps=%d", self.state.step, self.total_steps)
        self._report.record(self.state.step, {"resumed_at_step": self.state.step})
        if self._here.is_main:
            scores = [record["val_auc"] for record in self._run.metrics() if "val_auc" in record]
            self._report.progress(val_auc=scores[-1] if scores else None)

    @torch.no_grad()
    def _evaluate(self, batches: GlobalBatches) -> Scores | None:
        """Scores of a whole split, on rank 0; None elsewhere.

        Collective: every rank.
        """
        with self._stall("evaluating"):
            self._model.eval()
            logits, labels = [], []
            iterator = batches.batches(0, batches.steps_per_epoch)
            for step in range(batches.steps_per_epoch):
                output: Output = self._pipeline.progress(iterator)
                self._report.progress()
                _, logits_B, labels_B, _ = output
                real = slice(batches.num_local_samples(step))  # weights would have to come from the device for that
                logits.append(logits_B[real])
                labels.append(labels_B[real])
            return gather_predictions(logits, labels, self._here)

    def _optimal(self) -> dict[str, float | None]:
        """What a model that knows the teacher would score, where there is one."""
        if self._config.data.kind is not DataKind.synthetic:
            return {}
        test = Synthetic(self._config.data, "test")
        blocks = range(-(-test.rows // test.block_rows))
        probability_N = np.concatenate([test.probabilities(b) for b in blocks])
        labels_N = np.concatenate([test.read(b).labels_N for b in blocks])
        best = score(np.log(probability_N) - np.log1p(-probability_N), labels_N)
        return {"optimal_auc": best.auc, "optimal_ne": best.ne}

    def _batches(self, source: Source, *, training: bool = False) -> GlobalBatches:
        trainer, env = self._config.trainer, self._here.env
        return GlobalBatches(
            source,
            self._config.data,
            global_batch=trainer.global_batch if training else trainer.eval_global_batch or trainer.global_batch,
            rank=env.rank,
            world_size=env.world_size,
            seed=self._config.seed if training else None,
            pin=self._here.device.type == "cuda",
        )

    @contextlib.contextmanager
    def _stall(self, phase: str) -> Iterator[None]:
        """Time that is not training: shown as its own phase, and left out of samples/s and the parts of a step."""
        self._report.phase(phase, step=self.state.step)
        with self._parts.paused():
            yield
        self._clock_s = time.perf_counter()
