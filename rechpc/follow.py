"""Watching a local run: the live line, Ctrl-C, and what is said at the end.

Reads the run directory like everybody else; the run goes on when this process dies. Must not know how a run starts.
"""

import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from types import FrameType

from rechpc.choices import Launcher
from rechpc.errors import LaunchError
from rechpc.host import slurm
from rechpc.rundir import RunDir, StopReason
from rechpc.state import (
    RunStatus,
    State,
    current_attempt,
    duration,
    entry,
    expectation,
    progress,
    read_status,
    result_line,
    shown,
)

_POLL_S = 0.2
_SLURM_POLL_S = 3.0  # each asks slurmctld
_PLAIN_EVERY_S = 10.0
_EXIT_INTERRUPTED = 130  # what a shell says of a command that Ctrl-C ended
_EXIT_NOT_FINISHED = 3


class Interrupts:
    """Counts Ctrl-C from the moment of its creation; a SIGTERM counts as the first."""

    def __init__(self) -> None:
        self.count = 0
        signal.signal(signal.SIGINT, self._note)
        signal.signal(signal.SIGTERM, self._note)

    def wait(self, seconds: float) -> None:
        """Sleep, but not past an interrupt."""
        before, end = self.count, time.monotonic() + seconds
        while self.count == before and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_S))

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.count = max(1, self.count) if number == signal.SIGTERM else self.count + 1


def follow(run: RunDir, job: slurm.Job, interrupts: Interrupts) -> int:
    """Show a local run until it has ended, pass Ctrl-C on to it, and return the exit status of the command."""
    line = _ProgressLine()
    told = killed = False
    while slurm.is_alive(job, run):
        status = read_status(run)
        line.show(status)
        if interrupts.count:
            if not told:
                line.say("saving, then stopping; press Ctrl-C again to kill it now")
            told = True
            # The attempt may not have begun yet; asking again changes nothing.
            if attempt := current_attempt(run):
                attempt.request_stop(StopReason.drain)
        if interrupts.count > 1 and not killed:
            killed = True
            slurm.cancel(job)
            line.say("killed")
        interrupts.wait(_POLL_S if job.launcher is Launcher.local else _SLURM_POLL_S)
    line.end()
    status = read_status(run)
    if killed and status.state is State.lost:
        print(_lost_steps(status))
        _print_next(run, status)
        return _EXIT_INTERRUPTED
    return _report(run, status, interrupted=interrupts.count > 0)


@dataclass(slots=True)
class _ProgressLine:
    """One line that is rewritten in place on a terminal; elsewhere a new line now and then."""

    tty: bool = field(default_factory=sys.stdout.isatty)
    open: bool = False
    phase: str | None = None
    printed_at_s: float = 0.0

    def show(self, status: RunStatus) -> None:
        phase, now, text = status.phase or status.state, time.monotonic(), progress(status)
        if self.tty:
            # A line that wraps could not be rewritten.
            print(f"\r{text[: shutil.get_terminal_size().columns - 1]}\x1b[K", end="", flush=True)
            self.open = True
        elif phase != self.phase or now - self.printed_at_s >= _PLAIN_EVERY_S:
            print(text, flush=True)
            self.printed_at_s = now
        self.phase = phase

    def say(self, text: str) -> None:
        print(f"\n{text}" if self.tty else text, flush=True)  # below the live line, and below the ^C that was typed
        self.open = False

    def end(self) -> None:
        if self.open:
            print(flush=True)
        self.open = False


def _report(run: RunDir, status: RunStatus, *, interrupted: bool) -> int:
    """Say how the run ended. Raises LaunchError when it failed, with the first failing rank's own error on top."""
    if status.state is State.finished and not status.result:  # preflight alone
        return 0
    if status.state is State.finished:
        print(result_line(status.result))
        if expected := expectation(run):
            print(f"expected {expected}")
        if (wall_s := status.result.get("wall_s")) is not None:
            print(f"{status.step:,} steps in {duration(wall_s)}, {status.num_attempts} attempt(s)")
        _print_next(run, status)
        return 0
    if status.state in (State.drained, State.requeued):
        why = "stopped" if status.state is State.drained else "stopped at its time limit (job.time_limit_min)"
        print(f"{why} at step {status.step or 0:,}, {_saved(status)}")
        _print_next(run, status)
        return _EXIT_INTERRUPTED if interrupted else _EXIT_NOT_FINISHED
    rows = [f"{status.state}: {status.error}"]
    rows += [f"  log         {shown(status.log_path)}"] if status.log_path else []
    rows += [f"  checkpoint  {_saved(status)}", f"  resume      {entry('submit')} resume={shown(run.path)}"]
    raise LaunchError("\n".join(rows))


def _print_next(run: RunDir, status: RunStatus) -> None:
    """Where the run is, and the commands that one may want now."""
    path = shown(run.path)
    print(f"  run         {path}")
    print(f"  status      {entry('status')} {path}")
    if run.tensorboard_path.is_dir():
        print(f"  curves      tensorboard --logdir {shown(run.tensorboard_path)}")
    if status.state is State.finished:
        print(f"  another     {entry('submit')} model=dlrm_dcnv2 sharding=row_wise seed=2")
    else:
        print(f"  resume      {entry('submit')} resume={path}")


def _saved(status: RunStatus) -> str:
    step = status.checkpoint_step
    return "nothing saved yet" if step is None else f"last checkpoint at step {step:,}"


def _lost_steps(status: RunStatus) -> str:
    done, kept = status.step or 0, status.checkpoint_step or 0
    return f"{_saved(status)}, {max(0, done - kept):,} steps after it are lost"
