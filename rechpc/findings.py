"""What preflight finds: one line a check, a report a node, and the verdict over all of them.

Must not know how anything is checked. Files are in the attempt's directory; `rechpc.rundir` has their paths.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rechpc.config import RunConfig
from rechpc.rundir import AttemptDir, read_json, write_json


def has_preflight(config: RunConfig) -> bool:
    """Whether a run is checked before it starts."""
    return config.preflight.only or (config.preflight.enabled and config.machines > 1)


class Level(StrEnum):
    """How a check came out."""

    ok = "ok"
    skipped = "skipped"  # it does not apply here
    warning = "warning"
    failed = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One check on one node, or of all together."""

    check: str
    level: Level
    text: str  # of a failure: what is, what was expected, which key or file, what to do


def finding(check: str, problem: str | None, *, good: str) -> Finding:
    """Failed where there is a problem, else ok."""
    return Finding(check=check, level=Level.failed if problem else Level.ok, text=problem or good)


def problems(findings: Iterable[Finding]) -> list[str]:
    """What failed, a line each."""
    return [f"{f.check}: {f.text}" for f in findings if f.level is Level.failed]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What was found on one node, or by all of them together (`node` is then a star)."""

    node: str
    findings: list[Finding]

    @classmethod
    def read(cls, facts: dict[str, Any]) -> "Report":
        found = [Finding(check=f["check"], level=Level(f["level"]), text=f["text"]) for f in facts["findings"]]
        return cls(node=facts["node"], findings=found)


@dataclass(kw_only=True, slots=True)
class Verdict:
    """The outcome of the stages so far: `bad` has the reasons by node; one that belongs to no node is under a star."""

    num_nodes: int
    seconds: float
    bad: dict[str, list[str]]
    reports: list[Report]

    @classmethod
    def of(cls, reports: list[Report], *, num_nodes: int, seconds: float) -> "Verdict":
        bad = {report.node: found for report in reports if (found := problems(report.findings))}
        return cls(num_nodes=num_nodes, seconds=round(seconds, 1), bad=bad, reports=reports)

    @property
    def to_exclude(self) -> dict[str, str]:
        """Nodes to leave out next time, with their first reason: none where all fail alike, for then it is the run."""
        nodes = {node: reasons[0] for node, reasons in self.bad.items() if node != TOGETHER}
        return nodes if len(nodes) < self.num_nodes else {}

    @property
    def line(self) -> str:
        """All of it on one line."""
        if not self.bad:
            warnings = sum(f.level is Level.warning for report in self.reports for f in report.findings)
            noted = f", {warnings} warning(s)" * bool(warnings)
            return f"{self.num_nodes} node(s) ok in {self.seconds:g} s{noted}"
        named = ("all nodes" if node == TOGETHER else f"node {node}" for node in self.bad)
        reasons = "; ".join(f"{who}: {', '.join(why)}" for who, why in zip(named, self.bad.values(), strict=True))
        alike = len(self.bad.keys() - {TOGETHER}) == self.num_nodes > 1
        return f"preflight: {reasons}" + "; every node fails, so it is the run or the site and not a node" * alike

    def write(self, attempt: AttemptDir) -> None:
        write_json(attempt.preflight_path, asdict(self))


TOGETHER = "*"


def read_verdict(attempt: AttemptDir) -> Verdict | None:
    """The verdict of an attempt; None where none was reached, or a copy cut it off."""
    try:
        facts = read_json(attempt.preflight_path)
        return facts and Verdict(**{**facts, "reports": [Report.read(r) for r in facts["reports"]]})  # type: ignore[return-value]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def render(reports: Iterable[Report]) -> str:
    """A line a finding, for people."""
    lines = []
    for report in reports:
        name = "together" if report.node == TOGETHER else report.node
        lines += [f"{name:12} {f.level:8} {f.check:18} {f.text}" for f in report.findings]
    return "\n".join(lines)
