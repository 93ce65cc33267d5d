"""The life of a run as spans of time: queued, starting, training, saving, evaluating, and the work that was lost.

From the logs of rank 0, which say when each phase began, and the records of the attempts.
"""

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rechpc.rundir import AttemptDir, RunDir, read_json

_STARTING = ("checking data", "planning", "restoring")
_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) .*?(?:phase=([\w ]+) step=(\d+)|(resumed_at_step)=|$)")
_ZONE_S = 900  # time zones differ by quarters of an hour


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """What an attempt did from one moment to another; `queued` is the wait before it."""

    attempt: int
    phase: str
    start_s: float
    end_s: float
    step: int = 0  # that had been reached when it began

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


def life(run: RunDir, metrics: Sequence[dict[str, Any]]) -> list[Span]:
    """The spans of a run, oldest first; `metrics` are its own."""
    resumes = {record["attempt"]: record for record in metrics if "resumed_at_step" in record}
    steps = {number: record["resumed_at_step"] for number, record in resumes.items()}
    submissions = (read_json(run.job_path) or {}).get("submissions") or [{}]
    spans: list[Span] = []
    for attempt in run.attempts():
        number, started_s = attempt.ordinal, float((read_json(attempt.facts_path) or {})["started_at_s"])
        waited_s = spans[-1].end_s if spans else float(submissions[0].get("submitted_at_s", started_s))
        if waited_s < started_s:
            spans.append(Span(attempt=number, phase="queued", start_s=waited_s, end_s=started_s))
        own = _phases(attempt, number, started_s, resumes.get(number, {}).get("time_s"))
        # Training stops at every save, so no span goes on beyond the step at which a later attempt began.
        kept = min((step for later, step in steps.items() if later > number), default=math.inf)
        spans += [replace(s, phase="lost") if s.phase == "training" and s.step >= kept else s for s in own]
    return spans


def goodput(spans: Sequence[Span]) -> float:
    """The share of the time since the submission in which it trained what counts."""
    trained_s = sum(span.length_s for span in spans if span.phase == "training")
    return trained_s / max(spans[-1].end_s - spans[0].start_s, 1e-9) if spans else 0.0


def _phases(attempt: AttemptDir, number: int, started_s: float, resumed_s: float | None) -> list[Span]:
    """The phases that a log tells; its clock shows the local time of the node, which the metrics tie to ours."""
    path = attempt.rank_log_path(0)
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    found = [m for line in lines if (m := _LINE.match(line))]
    times = [time.mktime(time.strptime(m[1], "%Y-%m-%d %H:%M:%S")) + int(m[2]) / 1000 for m in found]
    known_s = next((at for m, at in zip(found, times, strict=True) if m[5]), None)
    shift_s = 0.0 if known_s is None or resumed_s is None else round((resumed_s - known_s) / _ZONE_S) * _ZONE_S
    marks = [(started_s, "starting", 0)]
    marks += [(at + shift_s, m[3], int(m[4])) for m, at in zip(found, times, strict=True) if m[3]]
    beat_s = float((read_json(attempt.heartbeat_path) or {}).get("time_s", started_s))  # a killed rank logs no end
    ends = [*(at for at, *_ in marks[1:]), max(beat_s, times[-1] + shift_s if times else started_s)]
    return [
        Span(attempt=number, phase="starting" if phase in _STARTING else phase, start_s=at, end_s=end, step=step)
        for (at, phase, step), end in zip(marks, ends, strict=True)
        if end > at and phase != "done"
    ]
