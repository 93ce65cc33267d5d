"""`python -m rechpc.status [RUN|SWEEP|RUNS_ROOT]`: where runs stand; also their logs, and how to stop them.

Exit status: 0 finished, 1 failed or lost, 2 no run directory, 3 anything else; of several runs the worst.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rechpc import table
from rechpc.choices import Launcher
from rechpc.errors import ConfigError, LaunchError, RechpcError
from rechpc.host import slurm
from rechpc.rundir import RunDir, StopReason
from rechpc.state import RunStatus, State, current_attempt, entry, expectation, read_status, render, shown

_EXIT = {State.finished: 0, State.failed: 1, State.lost: 1}
_WATCH_S = 3.0
_LOG_S = 0.5
_VERBS = {
    "cancel": "end it: a job of Slurm saves if there is time, a local run is killed",
    "drain": "have it save and stop; one that waits in the queue is taken out of it",
    "requeue": "have it save, stop and be started again by Slurm",
}


def main() -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m rechpc.status", description=__doc__)
    parser.add_argument("path", nargs="?", default="runs", help="run, sweep or directory of runs (default: runs)")
    does = parser.add_mutually_exclusive_group()
    does.add_argument("--watch", action="store_true", help="show it again and again until all runs have ended")
    does.add_argument("--json", action="store_true", help="everything that is known, for programs")
    does.add_argument("--logs", action="store_true", help="follow the log of a run, across attempts")
    for verb, text in _VERBS.items():
        does.add_argument(
            f"--{verb}", dest="verb", action="store_const", const=verb, help=f"{text}; every run of a sweep"
        )
    parser.add_argument("--rank", type=int, default=0, help="whose log (default: 0)")
    given = parser.parse_args()
    path = Path(given.path).expanduser().absolute()
    try:
        if given.logs:
            return _follow_log(RunDir.open(given.path), given.rank)
        if given.verb:
            return _tell(table.find(path), given.verb)
        return _show(path, as_json=given.json, watch=given.watch)
    except RechpcError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except PermissionError as error:
        print(f"{path}: {error.strerror}; a run directory is private to the user who submitted it", file=sys.stderr)
        return ConfigError.exit_status
    except KeyboardInterrupt:
        return 130


def _show(path: Path, *, as_json: bool, watch: bool) -> int:
    is_run = (path / "config.yaml").exists()
    while True:
        found = table.read(path)
        text = _render(found.entries[0].status) if is_run else table.render(found)
        text = table.as_json(found.entries) if as_json else text
        if watch and sys.stdout.isatty():
            print("\x1b[H\x1b[2J", end="")
        print(text, flush=True)
        if not watch or all(e.status.state in table.ENDED for e in found.entries):
            return _EXIT.get(found.entries[0].status.state if len(found.entries) == 1 else found.state_of_all(), 3)
        time.sleep(_WATCH_S)


def _render(status: RunStatus) -> str:
    expected = expectation(RunDir.open(str(status.path))) if status.state is State.finished else None
    return render(status) + (f"\nexpected   {expected}" if expected else "")


def _tell(runs: list[RunDir], verb: str) -> int:
    """Stop runs in the way that `verb` says; those that have ended are left alone."""
    problems = []
    for run in runs:
        job = slurm.newest_job(run)
        if job is None or run.result_path.exists() or not slurm.is_alive(job, run):
            print(f"{shown(run.path)}: {read_status(run).state}, left alone")
            continue
        try:
            print(f"{shown(run.path)}: {_stop(run, job, verb)}", flush=True)
        except LaunchError as error:
            problems.append(f"{shown(run.path)}: {error}")
    if problems:
        raise LaunchError("\n".join(problems))
    return 0


def _stop(run: RunDir, job: slurm.Job, verb: str) -> str:
    """Do it, and say what happens now. Raises LaunchError where it cannot be done."""
    if verb == "requeue" and job.launcher is Launcher.local:
        raise LaunchError(f"a local run is not requeued; stop it with --drain, then {entry('submit')} resume=")
    said = slurm.state(job)
    attempt = current_attempt(run)
    if verb == "cancel" or (verb == "drain" and said and said.pending):
        slurm.cancel(job)
        return "cancelled" if verb == "cancel" else "taken out of the queue"
    if said and said.pending:
        return "waits in the queue already"
    if attempt is None:
        raise LaunchError(f"it is just starting; ask again for --{verb} in a moment")
    attempt.request_stop(StopReason(verb))
    return "saves, then stops" if verb == "drain" else "saves, then starts again"


def _follow_log(run: RunDir, rank: int) -> int:
    """Print a rank's log as it grows, attempt by attempt, until the run has ended."""
    read: dict[str, int] = {}
    while True:
        status = read_status(run)  # before the log, for what it says last comes before its end
        for name, data in _new_data(run, rank, read):
            if name not in read:
                print(f"==> attempt {name} <==", flush=True)
            sys.stdout.buffer.write(data)  # a log may end within a character, or hold what is no text
            sys.stdout.flush()
            read[name] = read.get(name, 0) + len(data)
        if status.state in table.ENDED or (status.state is State.requeued and _is_local(status)):
            if not read:
                raise ConfigError(f"{shown(run.path)}: no log of rank {rank}; see {run.attempts_path}")
            return _EXIT.get(status.state, 3)
        time.sleep(_LOG_S)


def _new_data(run: RunDir, rank: int, read: dict[str, int]) -> Iterator[tuple[str, bytes]]:
    """What each attempt's log holds beyond the bytes that were read."""
    for attempt in run.attempts():
        with contextlib.suppress(FileNotFoundError), attempt.rank_log_path(rank).open("rb") as file:
            file.seek(read.get(attempt.name, 0))
            if data := file.read():
                yield attempt.name, data


def _is_local(status: RunStatus) -> bool:
    return status.job is not None and status.job.launcher is Launcher.local


if __name__ == "__main__":
    sys.exit(main())
