"""Many runs: found below a directory, read together, and shown as one table.

Must not know how a run is started or stopped.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rechpc.errors import ConfigError
from rechpc.host import slurm
from rechpc.rundir import RunDir, SweepDir, read_json
from rechpc.state import RunStatus, State, checkpoint, duration, read_status
from rechpc.study import is_minimized

_DEPTH = 3  # runs_root/name/sweep/run
FAILED = (State.failed, State.lost)
ENDED = (*FAILED, State.finished, State.drained, State.cancelled)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One run of many."""

    status: RunStatus
    swept: dict[str, str]  # the keys that are not the same in all runs of its sweep
    objective: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The runs below a directory."""

    path: Path
    objective: str  # a number in result.json
    is_sweep: bool
    entries: list[Entry]

    def state_of_all(self) -> State:
        """One word for all: failed if a run failed, running if one is on its way, finished if all are."""
        states = {entry.status.state for entry in self.entries}
        return State.failed if states & set(FAILED) else State.finished if states == {State.finished} else State.running

    def summary(self) -> str:
        """How many runs there are in every state, on one line."""
        counts = Counter(str(entry.status.state) for entry in self.entries)
        return f"{len(self.entries)} runs: " + ", ".join(f"{n} {state}" for state, n in counts.most_common())


def find(path: Path) -> list[RunDir]:
    """The run directories at or below `path`, by name. Raises ConfigError where there are none."""
    found = []
    # A link in a sweep is a run of another one, which it has kept; seen from above it would be there twice.
    for folder, names, files in os.walk(path, followlinks=(path / "sweep.json").exists()):
        if "config.yaml" in files:
            found.append(RunDir(Path(folder)))
        if "config.yaml" in files or len(Path(folder).relative_to(path).parts) >= _DEPTH:
            names.clear()
    if not found and not (path / "sweep.json").exists():
        raise ConfigError(
            f"{path}: not a run directory; expected one with a config.yaml in it, a sweep, or a directory of runs"
        )
    return sorted(found, key=lambda run: run.path)


def read(path: Path) -> Table:
    """Where all runs at or below `path` stand; Slurm is asked once for all. In a sweep, the best come first."""
    runs = find(path)
    sweep = read_json(SweepDir(path).facts_path)
    objective = str((sweep or {}).get("objective", "test_auc"))
    open_jobs = [job for run in runs if not run.result_path.exists() and (job := slurm.newest_job(run))]
    known = slurm.snapshot(open_jobs)
    given = {path / name: _by_key(words) for name, words in kept(SweepDir(path)).items()} if sweep else {}
    swept = differing({run.path: given.get(run.path) or overrides(run) for run in runs}) if sweep else {}
    entries = []
    for run in runs:
        status = read_status(run, known)
        value = status.result.get(objective)
        number = float(value) if isinstance(value, int | float) else None
        entries.append(Entry(status=status, swept=swept.get(run.path, {}), objective=number))
    if sweep:
        sign = 1 if is_minimized(objective) else -1
        entries.sort(key=lambda e: (e.objective is None, sign * (e.objective or 0.0)))
    return Table(path=path, objective=objective, is_sweep=sweep is not None, entries=entries)


def overrides(run: RunDir) -> dict[str, str]:
    """What the command line set for a run, by key; what it set for the sweep may change when that goes on."""
    submissions = (read_json(run.job_path) or {}).get("submissions") or [{}]
    return _by_key(submissions[-1].get("overrides", []))


def kept(sweep: SweepDir) -> dict[str, list[str]]:
    """The runs that a sweep has found in others, by name, with what its own command line set for them."""
    found = (read_json(sweep.facts_path) or {}).get("kept") or {}
    return {name: given for name, given in found.items() if (sweep.path / name).is_symlink()}


def _by_key(given: Iterable[str]) -> dict[str, str]:
    pairs = [str(override).lstrip("+").partition("=") for override in given]
    return {key: value for key, _, value in pairs if not key.startswith("sweep.")}


def differing(values: dict[Path, dict[str, str]]) -> dict[Path, dict[str, str]]:
    """Of every run the keys that are not the same in all."""
    keys = dict.fromkeys(key for of_run in values.values() for key in of_run)
    swept = [key for key in keys if len({of_run.get(key) for of_run in values.values()}) > 1]
    return {path: {key: of_run.get(key, "") for key in swept} for path, of_run in values.items()}


def render(table: Table) -> str:
    """The table as text, without the columns that say nothing."""
    return f"{aligned([cells(entry, table) for entry in table.entries])}\n{table.summary()}"


def aligned(rows: Sequence[dict[str, str]]) -> str:
    """Rows under a line of names."""
    names = columns(rows)
    lines = [names, *([row.get(name, "") for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join("  ".join(f"{t:{w}}" for t, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def columns(rows: Sequence[dict[str, str]]) -> list[str]:
    """The names of the columns that are not empty in all rows."""
    return [name for name in dict.fromkeys(n for row in rows for n in row) if any(row.get(name) for row in rows)]


def as_json(entries: Iterable[Entry]) -> str:
    """Everything that is known of the runs, for programs."""

    def facts(entry: Entry) -> dict[str, Any]:
        return {**asdict(entry.status), "swept": entry.swept, "objective": entry.objective}

    return json.dumps([facts(entry) for entry in entries], indent=2, default=str)


def cells(entry: Entry, table: Table) -> dict[str, str]:
    """What the table says of a run, by column."""
    status = entry.status

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    why = status.error if status.state in FAILED else status.reason
    return {
        "run": status.path.name if status.path == table.path else str(status.path.relative_to(table.path)),
        "state": status.state,
        **entry.swept,
        table.objective: number(entry.objective, ".4f"),
        "attempt": str(status.num_attempts or ""),
        "step": number(status.step, ",") + (f"/{status.total_steps:,}" if status.step and status.total_steps else ""),
        "samples/s": number(status.result.get("samples_per_s", status.samples_per_s), ",.0f"),
        "loss": number(status.loss, ".4f"),
        "val AUC": number(status.val_auc, ".4f"),
        "left": duration(status.seconds_left) if status.seconds_left and status.state is State.running else "",
        "checkpoint": checkpoint(status),
        "kept from": status.path.readlink().parent.name if status.path.is_symlink() else "",
        "why": (why or "").splitlines()[0][:100] if why else "",
    }
