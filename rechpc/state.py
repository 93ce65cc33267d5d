"""Where a run stands, from its directory and what Slurm says of its job.

Works on a running, finished, half-written, copied or read-only directory.
"""

import shutil
import sys
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rechpc.choices import Launcher
from rechpc.errors import ConfigError
from rechpc.findings import read_verdict
from rechpc.host import slurm
from rechpc.rules import load
from rechpc.rundir import AttemptDir, Outcome, RunDir, read_json

_STALE_S = 60.0
_STARTING_PHASES = ("starting", "checking data", "planning", "restoring")


class State(StrEnum):
    """Where a run stands."""

    queued = "queued"
    starting = "starting"
    running = "running"
    finished = "finished"
    drained = "drained"
    requeued = "requeued"
    failed = "failed"
    cancelled = "cancelled"
    preempted = "preempted"  # Slurm took the nodes, or lost one, and starts the job again
    lost = "lost"  # its process is gone and left no outcome
    unknown = "unknown"  # silent, and not on this machine


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """What a run directory says; None where it says nothing (yet)."""

    path: Path
    state: State
    num_attempts: int
    job: slurm.Job | None
    reason: str | None  # why Slurm does not start it
    image_changed_from: str | None
    preflight: str | None  # its verdict in the newest attempt
    excluded: dict[str, str]  # nodes that it found bad in any attempt, with why
    phase: str | None
    heartbeat_age_s: float | None
    step: int | None
    total_steps: int | None
    samples_per_s: float | None
    loss: float | None
    ne: float | None
    val_auc: float | None
    seconds_left: float | None
    data_wait_share: float | None
    checkpoint_step: int | None
    checkpoint_age_s: float | None
    error: str | None
    log_path: Path | None
    result: dict[str, Any]


def read_status(run: RunDir, known: slurm.Known | None = None) -> RunStatus:
    """Where the run stands now; never raises for what is missing or torn in the directory.

    `known` is what Slurm said of many jobs; without it Slurm is asked for this one.
    """
    job, attempt = slurm.newest_job(run), current_attempt(run)
    heartbeat = _read(attempt.heartbeat_path) if attempt else {}
    outcome = _read(attempt.outcome_path) if attempt else {}
    result = _read(run.result_path)
    beat_at_s = heartbeat.get("time_s")
    age_s = None if beat_at_s is None else max(0.0, time.time() - beat_at_s)
    # A copy of the directory, and an attempt that was started by hand, say nothing about the job.
    about_job = job is not None and job.path == str(run.path) and (attempt is None or _is_of(attempt, job))
    said = None
    if job and about_job and not result:
        said = slurm.state(job) if known is None else known.get(job.job_id)
    state = State.finished if result else _state(run, job, attempt, outcome, heartbeat, age_s, known)
    if said and said.name == slurm.FORGOTTEN and attempt is None:
        # One that was cancelled in the queue leaves nothing; one that Slurm had begun to start has a log.
        began = any(run.submission_path.glob(f"{job.job_id if job else ''}_*_log.*"))
        state = State.lost if began else State.cancelled
    elif said and said.name != slurm.FORGOTTEN:
        state = _slurm_state(said, attempt, outcome, heartbeat)
    checkpoint_step = next(iter(run.committed_steps()), None)
    error, log_path = _error(run, job, attempt, outcome, state, said)
    return RunStatus(
        path=run.path,
        state=state,
        num_attempts=len(_attempts(run)),
        job=job,
        reason=said.reason if said and said.pending else None,
        image_changed_from=_read(attempt.image_path).get("changed_from") if attempt else None,
        preflight=verdict.line.removeprefix("preflight: ") if attempt and (verdict := read_verdict(attempt)) else None,
        excluded=excluded_nodes(run),
        phase=heartbeat.get("phase"),
        heartbeat_age_s=age_s,
        step=result.get("step", outcome.get("step", heartbeat.get("step"))),
        total_steps=heartbeat.get("total_steps"),
        samples_per_s=heartbeat.get("samples_per_s"),
        loss=heartbeat.get("loss"),
        ne=heartbeat.get("ne"),
        val_auc=heartbeat.get("val_auc"),
        seconds_left=heartbeat.get("seconds_left"),
        data_wait_share=heartbeat.get("data_wait_share"),
        checkpoint_step=checkpoint_step,
        checkpoint_age_s=_age_s(run.checkpoint_path(checkpoint_step)) if checkpoint_step is not None else None,
        error=error,
        log_path=log_path,
        result=result,
    )


def excluded_nodes(run: RunDir) -> dict[str, str]:
    """Nodes that preflight found bad, with why, over all attempts."""
    verdicts = [verdict for attempt in _attempts(run) if (verdict := read_verdict(attempt))]
    return {node: why for verdict in verdicts for node, why in verdict.to_exclude.items()}


def current_attempt(run: RunDir) -> AttemptDir | None:
    """The newest attempt, unless the newest submission came after it and has not started one yet."""
    attempts, job = _attempts(run), slurm.newest_job(run)
    if not attempts or job is None:
        return attempts[-1] if attempts else None
    # Clocks of a cluster differ, so its ids count; a process id may come again, but there the clock is the same.
    same_id = job.launcher is Launcher.slurm and _is_of(attempts[-1], job)
    return attempts[-1] if same_id or _started_at_s(attempts[-1]) >= job.submitted_at_s else None


def shown(path: Path) -> str:
    """A path as short as one can type it here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def entry(name: str) -> str:
    """How one types `python -m rechpc.<name>` here, where this Python need not be the one on the PATH."""
    is_on_path = shutil.which("python") == sys.executable
    return f"{'python' if is_on_path else shown(Path(sys.executable))} -m rechpc.{name}"


def progress(status: RunStatus) -> str:
    """What the run does now, on one line."""
    # A step says that it trains.
    parts = [] if status.phase == "training" and status.step is not None else [status.phase or status.state]
    if status.step is not None:
        parts.append(f"step {status.step:,}" + (f"/{status.total_steps:,}" if status.total_steps else ""))
    if status.samples_per_s is not None:
        parts.append(f"{status.samples_per_s:,.0f} samples/s")
    if status.data_wait_share is not None:
        parts.append(f"{status.data_wait_share:.0%} of the time waiting for data")
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.ne is not None:
        parts.append(f"NE {status.ne:.4f}")
    if status.val_auc is not None:
        parts.append(f"val AUC {status.val_auc:.4f}")
    if status.seconds_left is not None and status.state is State.running:
        parts.append(f"{duration(status.seconds_left)} left")
    return "  ".join(parts)


def result_line(result: dict[str, Any]) -> str:
    """What a finished run reached, on one line."""
    auc, ne, rate = result.get("test_auc"), result.get("test_ne"), result.get("samples_per_s")
    parts = [f"test AUC undefined ({result.get('test_auc_undefined', 'no reason given')})"]
    if auc is not None:
        parts = [f"test AUC {auc:.4f}" + _of_possible(result.get("optimal_auc"))]
    if ne is not None:
        parts.append(f"NE {ne:.4f}" + _of_possible(result.get("optimal_ne")))
    if rate is not None:
        parts.append(f"{rate:,.0f} samples/s on {result.get('world_size', '?')} ranks")
    return ", ".join(parts)


def expectation(run: RunDir) -> str | None:
    """What the configuration expects of a finished run and when that was reached, on one line; None for nothing."""
    try:
        expected = load(run.config_path).expected
    except ConfigError:  # that of another version: where a run stands can be shown nevertheless
        return None
    if expected.auc is None:
        return None
    names = ("val_auc", "test_auc")
    seen = [(r["step"], r[name]) for r in run.metrics() for name in names if r.get(name) is not None]
    first = next((step for step, auc in seen if auc >= expected.auc), None)
    best = f"the best is {max(auc for _, auc in seen):.5f}" if seen else "there is no AUC"
    reached = f"not reached, {best}" if first is None else f"reached by step {first:,}, {best}"
    return f"AUC {expected.auc:g} ({expected.source}): {reached}"


def checkpoint(status: RunStatus) -> str:
    """The newest checkpoint and its age."""
    if status.checkpoint_step is None:
        return ""
    old = "" if status.checkpoint_age_s is None else f", {duration(status.checkpoint_age_s)} old"
    return f"step {status.checkpoint_step:,}" + (old if status.state is not State.finished else "")


def render(status: RunStatus) -> str:
    """The text of the command: a line for everything that is known."""
    silent = status.heartbeat_age_s is not None and status.heartbeat_age_s > _STALE_S
    age = f"last heartbeat {duration(status.heartbeat_age_s or 0)} ago" if silent else ""
    started = status.state in (State.starting, State.running, State.unknown)
    rows = {
        "run": str(status.path),
        "state": status.state + (f": {age or 'no heartbeat'}" if status.state is State.unknown else ""),
        "warning": age if started and status.state is not State.unknown else "",
        "reason": status.reason or "",
        "image": f"not the one before, which had sha256 {status.image_changed_from}" * bool(status.image_changed_from),
        "preflight": status.preflight or "",
        "left out": "; ".join(f"{node}: {why}" for node, why in status.excluded.items()),
        "attempt": str(status.num_attempts or ""),
        "job": "" if status.job is None else f"{status.job.job_id} ({status.job.launcher}, from {status.job.host})",
        "progress": progress(status) if status.step is not None or started else "",
        "checkpoint": checkpoint(status),
        "result": result_line(status.result) if status.result else "",
        "error": status.error or "",
        "log": str(status.log_path or ""),
    }
    if status.state in (State.drained, State.cancelled, State.failed, State.lost) or (
        status.state is State.requeued and status.job and status.job.launcher is Launcher.local
    ):
        rows["continue"] = f"{entry('submit')} resume={shown(status.path)}"
    return "\n".join(f"{name:11}{text}" for name, text in rows.items() if text)


def duration(seconds: float) -> str:
    """A length of time in its two largest units."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    first = next((i for i, (n, _) in enumerate(units) if n), 3)
    return " ".join(f"{n} {unit}" for n, unit in units[first : first + 2] if n) or "0 s"


def _state(
    run: RunDir,
    job: slurm.Job | None,
    attempt: AttemptDir | None,
    outcome: dict[str, Any],
    heartbeat: dict[str, Any],
    age_s: float | None,
    known: slurm.Known | None,
) -> State:
    if outcome.get("outcome") in list(Outcome):
        return State(outcome["outcome"])
    # An attempt that was started by hand says nothing about the job, nor the job about it.
    alive = slurm.is_alive(job, run, known) if attempt is None or (job and _is_of(attempt, job)) else None
    if alive is False:
        return State.lost
    if attempt is None:
        return State.queued if alive or (job and job.launcher is Launcher.slurm) else State.unknown
    if alive is None and (time.time() - _started_at_s(attempt) if age_s is None else age_s) > _STALE_S:
        return State.unknown
    return State.starting if heartbeat.get("phase", "starting") in _STARTING_PHASES else State.running


def _slurm_state(
    said: slurm.JobState, attempt: AttemptDir | None, outcome: dict[str, Any], heartbeat: dict[str, Any]
) -> State:
    """Where a Slurm job stands: its queue knows whether it lives, the run directory what it does."""
    if said.pending:
        if attempt is None:
            return State.queued
        return State.requeued if _read(attempt.verdict_path).get("again") else State.preempted
    if said.name == "CANCELLED":
        return State.cancelled
    if said.ended:
        planned = outcome.get("outcome") in (Outcome.drained, Outcome.finished)  # preflight alone leaves no result
        return State(outcome["outcome"]) if planned else State.failed
    if attempt is None or outcome:  # the attempt of this start has not begun yet, or is being wound up
        return State.starting
    return State.starting if heartbeat.get("phase", "starting") in _STARTING_PHASES else State.running


def _error(
    run: RunDir,
    job: slurm.Job | None,
    attempt: AttemptDir | None,
    outcome: dict[str, Any],
    state: State,
    said: slurm.JobState | None,
) -> tuple[str | None, Path | None]:
    """The first failing rank's own error, and the log to read."""
    if state not in (State.failed, State.lost):
        return None, None
    given_up = _read(attempt.verdict_path).get("reason") if attempt else None
    if attempt is None:
        log_path = run.submission_path / f"{job.job_id if job else '*'}_0_log.err"
        return "the job ended before its attempt began", log_path
    if first := attempt.first_error():
        return f"rank {first['rank']}: {' '.join(str(first['error']).split())}", attempt.rank_log_path(
            int(first["rank"])
        )
    if said and said.name == "TIMEOUT":
        return (
            "its time limit came before it had saved; raise job.time_limit_min, or job.signal_lead_s if a save takes "
            "longer"
        ), attempt.node_log_path(0)
    if given_up:
        return str(given_up), attempt.node_log_path(0)
    gone = "its processes are gone and left no outcome (killed, or the machine went down)"
    return str(outcome.get("error") or gone), attempt.node_log_path(0)


def _of_possible(optimum: float | None) -> str:
    return "" if optimum is None else f" of {optimum:.4f} possible"


def _attempts(run: RunDir) -> list[AttemptDir]:
    try:
        return run.attempts()
    except ValueError:  # a copy that was cut off in an attempt.json
        return []


def _is_of(attempt: AttemptDir, job: slurm.Job) -> bool:
    return attempt.name.rpartition(".")[0] == job.job_id


def _started_at_s(attempt: AttemptDir) -> float:
    return float(_read(attempt.facts_path).get("started_at_s", 0.0))


def _age_s(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:  # a newer one has just taken its place
        return None


def _read(path: Path) -> dict[str, Any]:
    """The object in a file; nothing where a copy left it out, cut it off or may not read it."""
    try:
        return read_json(path) or {}
    except (OSError, ValueError):
        return {}
