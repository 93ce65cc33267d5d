"""Whole attempts as processes of their own: how they end, and how the next one goes on."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rechpc import lifeline
from rechpc.config import RunConfig
from rechpc.rules import dump
from rechpc.rundir import Outcome, RunDir, StopReason, read_json, write_text
from tests.configs import tiny
from tests.distributed.trainer import attempt_in_process

LOG_EVERY = 10
SAVE_EVERY = 40
EPOCHS = 20  # 220 steps, a second or more
START_S = 240.0  # bounds what takes 5 s on an idle machine: torchrun and two ranks that import torch

# The attempts of `troubled` are the setup of one test.
pytestmark = pytest.mark.timeout(1200)


class Attempt:
    """torchrun with the ranks of an attempt."""

    def __init__(self, run: RunDir, world_size: int) -> None:
        self.run, self._world_size = run, world_size
        argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(world_size)]
        argv += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
        self._log = run.path / f"torchrun-{len(run.attempts())}.log"
        with open(self._log, "wb") as log:
            self.torchrun = subprocess.Popen(
                [*argv, "-m", "rechpc.train", str(run.path)],
                stdout=log,
                stderr=log,
                cwd=Path(__file__).resolve().parents[2],
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )
        self.files = run.attempt(f"by-hand-{self.torchrun.pid}.0")

    def ranks(self) -> list[int]:
        """Process ids of the ranks in order; empty before all have started."""
        pids = {}
        for children in Path(f"/proc/{self.torchrun.pid}/task").glob("*/children"):
            for pid in children.read_text().split():
                with contextlib.suppress(OSError):
                    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    pids |= {int(v[11:]): int(pid) for v in variables if v.startswith(b"LOCAL_RANK=")}
        return [pids[local_rank] for local_rank in sorted(pids)] if len(pids) == self._world_size else []

    def last_step(self) -> int:
        """The last step in metrics.jsonl that this attempt wrote."""
        ordinal = self.files.ordinal
        return max((r["step"] for r in self.run.metrics() if r["attempt"] == ordinal and "loss" in r), default=0)

    def wait_for(self, condition: Callable[[], Any]) -> None:
        give_up_at = time.monotonic() + START_S
        while not condition():
            assert self.torchrun.poll() is None, self.output()
            assert time.monotonic() < give_up_at, self.output()
            time.sleep(0.02)

    def freeze_when(self, condition: Callable[[], bool]) -> None:
        """Stop the ranks at a moment at which the condition holds."""

        def frozen_at_the_right_moment() -> bool:
            if self.last_step() == 0:
                return False
            for pid in self.ranks():
                os.kill(pid, signal.SIGSTOP)
            if condition():
                return True
            self.thaw()
            return False

        self.wait_for(frozen_at_the_right_moment)

    def thaw(self) -> None:
        for pid in self.ranks():
            os.kill(pid, signal.SIGCONT)

    def end(self, within_s: float = START_S) -> int:
        """Wait until torchrun and so all ranks have ended; its exit status."""
        try:
            return self.torchrun.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within_s} s:\n{self.output()}") from None

    def kill(self) -> None:
        """Kill what is left; the ranks die with torchrun."""
        self.torchrun.kill()
        self.torchrun.wait()

    def output(self) -> str:
        return self._log.read_text(errors="replace")


@contextlib.contextmanager
def started(run: RunDir, *, world_size: int = 2) -> Iterator[Attempt]:
    attempt = Attempt(run, world_size)
    try:
        yield attempt
    finally:
        attempt.kill()


def new_run(path: Path, config: RunConfig) -> RunDir:
    run = RunDir.create(path, "run")
    write_text(run.config_path, dump(config))
    return run


CONFIG = tiny(
    "sharding.type=auto",
    "optimizer.dense=adam",
    "optimizer.learning_rate=0.005",
    f"trainer.epochs={EPOCHS}",
    f"trainer.log_every={LOG_EVERY}",
    f"checkpoint.every={SAVE_EVERY}",
    "trainer.collective_timeout_s=600",
    world_size=2,
)


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory) -> RunDir:
    run = new_run(tmp_path_factory.mktemp("uninterrupted"), CONFIG)
    run.start_attempt("only.0")
    assert ranks(2, attempt_in_process, CONFIG, run, "only.0", timeout_s=START_S) == [Outcome.finished] * 2
    return run


@dataclass
class Troubled:
    """A run that was killed, lost a rank, was stopped and then finished, in four attempts."""

    run: RunDir
    attempts: list[Attempt]
    killed_at_step: int
    checkpoints_when_killed: list[int]
    survivor_lived_s: float
    checkpoints_when_drained: list[int]
    exit_statuses: list[int]


@pytest.fixture(scope="module")
def troubled(tmp_path_factory) -> Troubled:
    run = new_run(tmp_path_factory.mktemp("troubled"), CONFIG)
    attempts, statuses = [], []

    with started(run) as attempt:
        attempt.freeze_when(lambda: attempt.last_step() > next(iter(run.committed_steps()), attempt.last_step()))
        killed_at_step, checkpoints_when_killed = attempt.last_step(), run.committed_steps()
        for pid in attempt.ranks():
            os.kill(pid, signal.SIGKILL)
        attempts.append(attempt)
        statuses.append(attempt.end())

    with started(run) as attempt:
        attempt.wait_for(lambda: attempt.last_step() > 0)
        _, victim = attempt.ranks()
        os.kill(victim, signal.SIGKILL)
        killed_at_s = time.monotonic()
        attempts.append(attempt)
        statuses.append(attempt.end())
        survivor_lived_s = time.monotonic() - killed_at_s

    with started(run) as attempt:
        # Far enough from the next checkpoint to stop before it.
        attempt.freeze_when(lambda: attempt.last_step() % SAVE_EVERY in (LOG_EVERY, 2 * LOG_EVERY))
        attempt.files.request_stop(StopReason.drain)
        attempt.thaw()
        attempts.append(attempt)
        statuses.append(attempt.end())
        checkpoints_when_drained = run.committed_steps()

    with started(run) as attempt:
        attempts.append(attempt)
        statuses.append(attempt.end())

    return Troubled(
        run, attempts, killed_at_step, checkpoints_when_killed, survivor_lived_s, checkpoints_when_drained, statuses
    )


def final_bits(run: RunDir) -> dict[str, Any]:
    """Checksums and places of every weight, optimizer state and random state at the end."""
    manifest = read_json(run.checkpoint_path(run.committed_steps()[0]) / "manifest.json")
    assert manifest is not None
    return {key: manifest[key] for key in ("step", "files", "tensors")}


def test_a_run_that_was_killed_and_stopped_ends_with_the_bits_of_an_uninterrupted_one(uninterrupted, troubled):
    assert troubled.exit_statuses[-1] == 0, troubled.attempts[-1].output()
    assert final_bits(troubled.run) == final_bits(uninterrupted)


def test_sigkill_loses_the_steps_since_the_last_checkpoint_and_no_more(troubled):
    assert troubled.exit_statuses[0] != 0
    assert troubled.killed_at_step > troubled.checkpoints_when_killed[0] >= SAVE_EVERY
    restart = f"start_step={troubled.checkpoints_when_killed[0]} "
    assert restart in troubled.attempts[1].output()


def test_every_logged_step_counts_once_whatever_happened(uninterrupted, troubled):
    expected, found = ([r for r in run.metrics() if "loss" in r] for run in (uninterrupted, troubled.run))
    assert [r["step"] for r in found] == list(range(LOG_EVERY, 11 * EPOCHS + 1, LOG_EVERY))
    assert [(r["step"], r["loss"], r["ne"]) for r in found] == [(r["step"], r["loss"], r["ne"]) for r in expected]


def test_results_are_those_of_the_uninterrupted_run(uninterrupted, troubled):
    expected, found = (read_json(run.result_path) for run in (uninterrupted, troubled.run))
    assert (expected.pop("attempts"), found.pop("attempts")) == (1, 4)
    for result in (expected, found):
        assert result.pop("samples_per_s") > 0
        assert result.pop("wall_s") > 0
    assert found == expected


def test_a_rank_that_dies_ends_the_others_within_seconds(troubled):
    assert troubled.exit_statuses[1] != 0
    assert troubled.survivor_lived_s < 20  # the collectives would wait for 600
    assert troubled.attempts[1].ranks() == []


def test_a_stop_request_saves_once_and_ends_well(troubled):
    attempt = troubled.attempts[2]
    assert troubled.exit_statuses[2] == 0, attempt.output()
    outcome = read_json(attempt.files.outcome_path)
    assert (outcome["outcome"], outcome["checkpoint_step"]) == (Outcome.drained, outcome["step"])
    assert outcome["step"] == troubled.checkpoints_when_drained[0]
    assert outcome["step"] % SAVE_EVERY != 0
    assert f"start_step={outcome['step']} " in troubled.attempts[3].output()


def test_a_stop_before_the_first_step_ends_with_nothing_to_save(ranks, tmp_path):
    run = new_run(tmp_path, CONFIG)
    attempt = run.start_attempt("early.0")
    attempt.request_stop(StopReason.requeue)
    assert ranks(2, attempt_in_process, CONFIG, run, "early.0", timeout_s=START_S) == [Outcome.requeued] * 2
    outcome = read_json(attempt.outcome_path)
    assert (outcome["outcome"], outcome["step"], outcome["checkpoint_step"]) == (Outcome.requeued, 0, None)
    assert run.committed_steps() == []


def test_a_loss_that_is_not_a_number_ends_all_ranks_and_names_step_and_checkpoint(tmp_path):
    values = ["optimizer.sparse=sgd", "optimizer.dense=sgd", "optimizer.learning_rate=1e12", "checkpoint.every=1"]
    run = new_run(tmp_path, tiny(*values, world_size=2))
    with started(run) as attempt:
        assert attempt.end() != 0
        errors = [read_json(attempt.files.error_path(rank)) for rank in range(2)]
        assert all(e["error"].startswith("loss is ") for e in errors), attempt.output()
        message = attempt.files.first_error()["error"]
    assert message.removeprefix("loss is nan").startswith(
        " at step 2; the last checkpoint is of step 1; lower optimizer.learning_rate"
    )
    assert run.committed_steps() == [1]
    assert not run.result_path.exists()


def test_a_second_attempt_is_refused_and_told_who_holds_the_run(tmp_path):
    run = new_run(tmp_path, tiny())
    with lifeline.lock(run), started(run, world_size=1) as attempt:
        assert attempt.end() != 0
        error = attempt.files.first_error()
    expected = f"{run.path}: another attempt is writing this run (pid {os.getpid()} on {os.uname().nodename}); stop it"
    assert error["error"].startswith(expected), error
    assert "LaunchError" in error["traceback"]
    assert run.metrics() == []
