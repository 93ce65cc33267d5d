"""What a run tells the outside while it runs: metrics, heartbeat, TensorBoard events, and at the end its result.

Rank 0 writes, the others call the same methods and do nothing. Nothing here is collective.
"""

import contextlib
import json
import logging
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rechpc.rank.metrics import entropy
from rechpc.rank.process import Process
from rechpc.rundir import AttemptDir, Outcome, RunDir, write_json

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 0.5
_SLOW_DATA_SHARE = 0.1


class Report:
    """Files of one attempt that rank 0 keeps up to date."""

    def __init__(self, run: RunDir, attempt: AttemptDir, process: Process) -> None:
        self._run = run
        self._attempt = attempt
        self._ordinal = attempt.ordinal
        self._active = process.is_main
        self._device = process.device
        self._progress: dict[str, Any] = {}
        self._last_heartbeat_s = 0.0
        self._unwritable: set[Path] = set()
        self._metrics = None
        self._events = None
        if self._active:
            self._metrics = _append(run)
            self._events = _event_writer(run)

    def phase(self, name: str, *, step: int = 0) -> None:
        """Say what the attempt is doing now, after so many steps."""
        logger.info("phase=%s step=%d", name, step)
        self._progress["phase"] = name
        self._beat(now=True)

    def progress(self, **values: Any) -> None:
        """Say how far training has come; written at most twice a second."""
        self._progress.update(values)
        self._beat(now=False)

    def record(self, step: int, values: dict[str, Any]) -> None:
        """Append one record to `metrics.jsonl`, and its numbers to TensorBoard.

        A full disk ends nothing: what cannot be written now is written with a later record, and the log has it.
        """
        if self._metrics is None:
            return
        record = {"attempt": self._ordinal, "step": step, "time_s": round(time.time(), 3), **values}
        with self._tolerant(self._run.metrics_path):
            self._metrics.write(json.dumps(record, allow_nan=False) + "\n")
            self._metrics.flush()
        logger.info(" ".join(f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in record.items()))
        if self._events is not None:
            with self._tolerant(self._run.tensorboard_path):
                self._events.add(values, step)

    def data_wait(self, window: dict[str, float | None]) -> None:
        """Say, of the values of a window, that training waits for data, where it does."""
        # Times of steps are known later than their parts: a wait may seem to be longer than a short window.
        share = min(1.0, (window.get("rank0_data_wait_ms") or 0) / (window["step_time_ms"] or 1))
        slow = share > _SLOW_DATA_SHARE
        self.progress(data_wait_share=share if slow else None)
        if slow and self._active:
            logger.warning("waits_for_data=%.0f%% of a step; the file system or the CPUs are too slow", 100 * share)

    def memory(self) -> dict[str, float]:
        """Peak memory of rank 0 so far, under keys with units."""
        peak = {"rank0_peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)}
        if self._device.type == "cuda":
            peak["rank0_peak_hbm_gib"] = torch.cuda.max_memory_allocated(self._device) / (1 << 30)
        return peak

    def end(self, outcome: Outcome, *, step: int, checkpoint_step: int | None, error: str | None = None) -> None:
        """Write how the attempt ended."""
        if not self._active:
            return
        if self._events is not None:
            with self._tolerant(self._run.tensorboard_path):
                self._events.close()
        self.phase("done", step=step)
        write_json(
            self._attempt.outcome_path,
            {"outcome": outcome, "step": step, "checkpoint_step": checkpoint_step, "error": error},
        )

    def result(self, values: dict[str, Any]) -> None:
        """Write the result of the run, which makes it finished."""
        if self._active:
            attempts = self._run.attempts()
            started_s = json.loads(attempts[0].facts_path.read_text())["started_at_s"]
            facts = {"attempts": len(attempts), "wall_s": round(time.time() - started_s, 1)}
            write_json(self._run.result_path, {"state": "finished", **values, **facts})

    def _beat(self, *, now: bool) -> None:
        clock = time.monotonic()
        if not self._active or not (now or clock - self._last_heartbeat_s >= _HEARTBEAT_S):
            return
        self._last_heartbeat_s = clock
        path = self._attempt.heartbeat_path
        temporary = path.with_name(".heartbeat.tmp")
        # Without fsync, unlike everything else: it is worth nothing after a power loss.
        with self._tolerant(path):
            try:
                temporary.write_text(json.dumps({**self._progress, "time_s": time.time()}))
                os.rename(temporary, path)
            except OSError:
                os.utime(path)  # a full disk must not look like a hang
                raise

    @contextlib.contextmanager
    def _tolerant(self, path: Path) -> Iterator[None]:
        """Go on where a file cannot be written; says so once for each, until it can be written again."""
        try:
            yield
            self._unwritable.discard(path)
        except OSError as error:
            if path not in self._unwritable:
                self._unwritable.add(path)
                logger.warning("path=%s cannot be written: %s; training goes on", path, error.strerror)


@dataclass(kw_only=True, slots=True)
class Window:
    """Loss, NE and speed since the last record, from sums over all ranks; saved, so that a resume changes no record."""

    samples: int = 0
    loss_sum: float = 0.0
    positives: float = 0.0
    timed_samples: int = 0
    timed_steps: int = 0
    timed_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)  # of the timed steps, see rechpc.rank.breakdown
    stall_s: float = 0.0  # of the saves since the last record

    def add(
        self, *, samples: int, loss: float, positive_rate: float, step_s: float | None, parts_s: dict[str, float]
    ) -> None:
        """One step; `step_s` is None where the step is not to be timed, `parts_s` are rank 0's."""
        self.samples += samples
        self.loss_sum += samples * loss
        self.positives += samples * positive_rate
        if step_s is not None:
            self.timed_samples += samples
            self.timed_steps += 1
            self.timed_s += step_s
            self.parts_s = {part: self.parts_s.get(part, 0.0) + seconds for part, seconds in parts_s.items()}

    def values(self) -> dict[str, float | None]:
        """Means over the window, under keys with units."""
        loss, base = self.loss_sum / self.samples, entropy(self.positives / self.samples)
        parts_s = {**self.parts_s, "checkpoint_stall": self.stall_s} if self.timed_steps else {}
        return {
            "loss": loss,
            "ne": loss / base if base else None,
            "samples_per_s": self.timed_samples / self.timed_s if self.timed_s else None,
            "step_time_ms": 1000 * self.timed_s / self.timed_steps if self.timed_steps else None,
            **{f"rank0_{part}_ms": 1000 * seconds / self.timed_steps for part, seconds in parts_s.items()},
        }


def _append(run: RunDir) -> Any:
    """`metrics.jsonl`, open for appending after the last complete line."""
    file = open(run.metrics_path, "a+b")  # noqa: SIM115 - open as long as the report
    if file.tell() and not _ends_with_newline(run):
        file.write(b"\n")  # a killed writer left half a line
    file.close()
    return open(run.metrics_path, "a")


def _ends_with_newline(run: RunDir) -> bool:
    with open(run.metrics_path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


class _Events:
    """TensorBoard's file: one event a record, for each one wakes a thread that the step then waits for."""

    def __init__(self, path: Path) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415 - optional
        from torch.utils.tensorboard import FileWriter  # noqa: PLC0415 - optional

        self._summary = Summary
        self._writer = FileWriter(str(path))  # type: ignore[no-untyped-call]

    def add(self, values: dict[str, Any], step: int) -> None:
        """The numbers among the values."""
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        parts = [self._summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
        self._writer.add_summary(self._summary(value=parts), step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Write what is not written yet."""
        self._writer.close()  # type: ignore[no-untyped-call]


def _event_writer(run: RunDir) -> _Events | None:
    try:
        return _Events(run.tensorboard_path)
    except ImportError:
        return None
