"""The life of a run as spans of time: queued, starting, training, saving, evaluating, and the work that was lost.

From the logs of rank 0, which say when each phase began, and the records of the attempts.
"""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rechpc.host import slurm
from rechpc.rundir import AttemptDir, RunDir, read_json

_PHASES = {"planning": "starting", "restoring": "starting"}
_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) .*?(?:phase=(\w+)|(resumed_at_step)=|$)")
_ZONE_S = 900  # time zones differ by quarters of an hour


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """What an attempt did from one moment to another; `queued` is the wait before it."""

    attempt: int
    phase: str
    start_s: float
    end_s: float


def life(run: RunDir) -> list[Span]:
    """The spans of a run, oldest first; time that nothing is known of is left out."""
    resumed = _resumes(run)
    spans: list[Span] = []
    job = slurm.newest_job(run)
    attempts = run.attempts()
    for attempt in attempts:
        facts = read_json(attempt.facts_path) or {}
        ordinal, started_s = attempt.ordinal, float(facts["started_at_s"])
        waited_s = spans[-1].end_s if spans else _first_submission_s(run) if job else started_s
        if waited_s < started_s:
            spans.append(Span(attempt=ordinal, phase="queued", start_s=waited_s, end_s=started_s))
        spans += _phases(attempt, ordinal, started_s, resumed.get(ordinal, (0, None))[1])
        step = (read_json(attempt.outcome_path) or read_json(attempt.heartbeat_path) or {}).get("step", 0)
        back_to, _ = resumed.get(ordinal + 1, (step, None))
        if back_to < step:
            spans = _lost(spans, ordinal)
    return spans


def goodput(spans: Sequence[Span]) -> float:
    """The share of the time since the submission in which it trained what counts."""
    trained_s = sum(span.end_s - span.start_s for span in spans if span.phase == "training")
    return trained_s / max(spans[-1].end_s - spans[0].start_s, 1e-9) if spans else 0.0


def _resumes(run: RunDir) -> dict[int, tuple[int, float]]:
    """Step and time at which each attempt began to train."""
    found = {}
    if run.metrics_path.exists():
        for line in run.metrics_path.read_text().splitlines():
            if '"resumed_at_step"' in line and line.endswith("}"):
                record = json.loads(line)
                found[int(record["attempt"])] = int(record["resumed_at_step"]), float(record["time_s"])
    return found


def _first_submission_s(run: RunDir) -> float:
    return float((read_json(run.job_path) or {})["submissions"][0]["submitted_at_s"])


def _phases(attempt: AttemptDir, ordinal: int, started_s: float, resumed_s: float | None) -> list[Span]:
    """The phases that a log tells; its clock shows the local time of the node, which the metrics tie to ours."""
    path = attempt.rank_log_path(0)
    lines = (
        [m for line in path.read_text(errors="replace").splitlines() if (m := _LINE.match(line))]
        if path.exists()
        else []
    )
    times = [time.mktime(time.strptime(m[1], "%Y-%m-%d %H:%M:%S")) + int(m[2]) / 1000 for m in lines]
    known = next((at for m, at in zip(lines, times, strict=True) if m[4]), None)
    shift = 0.0 if known is None or resumed_s is None else round((resumed_s - known) / _ZONE_S) * _ZONE_S
    marks = [(at + shift, m[3]) for m, at in zip(lines, times, strict=True) if m[3]]
    end_s = times[-1] + shift if times else started_s
    starts = [(started_s, "starting"), *((at, _PHASES.get(name, name)) for at, name in marks)]
    spans = []
    for (at, phase), (until, _) in zip(starts, [*starts[1:], (end_s, "")], strict=True):
        if until > at and phase != "done":
            spans.append(Span(attempt=ordinal, phase=phase, start_s=at, end_s=until))
    return spans


def _lost(spans: list[Span], ordinal: int) -> list[Span]:
    """What was trained after the last save of an attempt, which the next one did again."""
    saved_s = max((s.end_s for s in spans if s.attempt == ordinal and s.phase == "saving"), default=0.0)
    return [
        Span(attempt=s.attempt, phase="lost", start_s=s.start_s, end_s=s.end_s)
        if s.attempt == ordinal and s.phase == "training" and s.start_s >= saved_s
        else s
        for s in spans
    ]
