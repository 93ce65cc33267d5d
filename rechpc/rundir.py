"""The run directory: every path in it, and how a file in it is written and read.

Nobody else joins strings into run paths. A write is invisible until complete (temporary name, fsync, rename);
a read believes only final names. Standard library only.
"""

import contextlib
import functools
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rechpc.errors import ConfigError


class StopReason(StrEnum):
    """Why a running attempt is asked to save and end."""

    drain = "drain"  # a person asked: stay stopped until somebody resumes
    requeue = "requeue"  # the time limit is near: start again


class Outcome(StrEnum):
    """How an attempt ended."""

    finished = "finished"
    drained = "drained"
    requeued = "requeued"
    failed = "failed"


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """Files of one start of a run."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def facts_path(self) -> Path:
        """Written once at the start: ordinal, host, pid, start time."""
        return self.path / "attempt.json"

    @property
    def stop_path(self) -> Path:
        return self.path / "stop"

    @property
    def heartbeat_path(self) -> Path:
        return self.path / "heartbeat"

    @property
    def hang_path(self) -> Path:
        """Made by the first host task that sees no rank move, for the others."""
        return self.path / "hang"

    def hang_report_path(self, node_rank: int) -> Path:
        """Where the ranks of a node were when none moved."""
        return self.path / f"hang-node-{node_rank:05d}.json"

    @property
    def outcome_path(self) -> Path:
        return self.path / "outcome.json"

    @property
    def rendezvous_path(self) -> Path:
        """Where the ranks of several nodes meet; node 0 writes it."""
        return self.path / "rendezvous.json"

    @property
    def preflight_path(self) -> Path:
        """The verdict over all nodes, before step 1; beside it a folder with what each node says."""
        return self.path / "preflight.json"

    @property
    def preflight_folder(self) -> Path:
        return self.path / "preflight"

    def node_report_path(self, node_rank: int) -> Path:
        return self.preflight_folder / f"node-{node_rank:05d}.json"

    def error_path(self, rank: int) -> Path:
        """Written by a rank that raises: rank, time_s, error (one line), traceback."""
        return self.path / f"error-rank-{rank:05d}.json"

    def first_error(self) -> dict[str, Any] | None:
        """What the rank that failed first left: the cause, where later ones only lost their peer.

        A rank that was killed leaves its word through its host task, which takes longer than the peers do.
        """
        records = []
        for path in self.path.glob("error-rank-*.json"):
            with contextlib.suppress(OSError, ValueError):  # a rank may be killed while it writes
                records.append(read_json(path) or {})
        found = (r for r in records if "rank" in r)
        return min(found, key=lambda r: (not r.get("killed", False), float(r["time_s"])), default=None)

    @property
    def verdict_path(self) -> Path:
        """What was decided after the attempt: start again, or give up, and why."""
        return self.path / "verdict.json"

    @property
    def image_path(self) -> Path:
        """Which container image the attempt ran in."""
        return self.path / "image.json"

    def rank_log_path(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.log"

    def node_log_path(self, node_rank: int) -> Path:
        return self.path / f"node-{node_rank:05d}.log"

    @property
    def ordinal(self) -> int:
        return int((read_json(self.facts_path) or {}).get("ordinal", -1))

    def request_stop(self, reason: StopReason) -> None:
        """Ask the ranks to save and end at the next step boundary; asking again changes nothing."""
        if not self.stop_path.exists():
            write_text(self.stop_path, reason)

    def stop_reason(self) -> StopReason | None:
        """The reason somebody asked this attempt to stop, if anybody did."""
        try:
            return StopReason(self.stop_path.read_text())
        except FileNotFoundError:
            return None


@dataclass(frozen=True, slots=True)
class RunDir:
    """Files of one run; the layout is described in docs/architecture.md."""

    path: Path

    @classmethod
    def create(cls, root: Path, name: str, run_id: str | None = None) -> "RunDir":
        """Make `<root>/<name>/<run_id>`, private to the user and never an existing one."""
        run_id = run_id or new_id()
        path = root.expanduser().absolute() / name / run_id
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(f"runs_root={root}: cannot make {path}: {error.strerror}; set runs_root=") from error
        run = cls(path)
        run.attempts_path.mkdir()
        run.checkpoints_path.mkdir()
        return run

    @classmethod
    def open(cls, path: str | Path) -> "RunDir":
        """An existing run directory. Raises ConfigError when it is none."""
        run = cls(Path(path).expanduser().absolute())
        if not run.config_path.is_file():
            raise ConfigError(f"{path}: not a run directory; expected one with a config.yaml in it")
        return run

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def provenance_path(self) -> Path:
        return self.path / "provenance.json"

    @property
    def code_path(self) -> Path:
        return self.path / "code"

    @property
    def job_path(self) -> Path:
        """Every submission, oldest first: launcher, job id, host, process id, overrides."""
        return self.path / "job.json"

    @property
    def submission_path(self) -> Path:
        """Folder of submitit's own files."""
        return self.path / "submission"

    @property
    def plan_path(self) -> Path:
        return self.path / "plan.json"

    @property
    def plan_text_path(self) -> Path:
        return self.path / "plan.txt"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard_path(self) -> Path:
        return self.path / "tensorboard"

    def profile_path(self, first: int, last: int, rank: int) -> Path:
        """A torch profiler trace of these steps."""
        return self.path / "profile" / f"steps-{first}-{last}-rank-{rank:05d}.json.gz"

    @property
    def result_path(self) -> Path:
        return self.path / "result.json"

    @property
    def lock_path(self) -> Path:
        """Held by rank 0 of the running attempt."""
        return self.path / "lock"

    @property
    def attempts_path(self) -> Path:
        return self.path / "attempts"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints_path / f"step-{step:09d}"

    def committed_steps(self) -> list[int]:
        """Steps of the committed checkpoints, newest first. Torn ones have another name."""
        names = [entry.name for entry in _entries(self.checkpoints_path)]
        return sorted((int(n[5:]) for n in names if n.startswith("step-") and n[5:].isdigit()), reverse=True)

    def attempt(self, name: str) -> AttemptDir:
        return AttemptDir(self.attempts_path / name)

    def attempts(self) -> list[AttemptDir]:
        """The attempts that have started, oldest first."""
        found = [AttemptDir(entry) for entry in _entries(self.attempts_path)]
        return sorted((a for a in found if a.facts_path.exists()), key=lambda a: a.ordinal)

    def start_attempt(self, name: str) -> AttemptDir:
        """Make the directory of a new attempt and number it. Called by one process an attempt."""
        attempt = self.attempt(name)
        ordinal = len(self.attempts())
        attempt.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = {
            "ordinal": ordinal,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started_at_s": time.time(),
            "checkpoint_step": next(iter(self.committed_steps()), None),
        }
        write_json(attempt.facts_path, facts)
        return attempt

    def metrics(self) -> list[dict[str, Any]]:
        """Records of `metrics.jsonl` that count: steps that a later attempt did again are left out.

        A line that a killed writer left unfinished is skipped.
        """
        records: list[dict[str, Any]] = []
        for record in _json_lines(self.metrics_path):
            if records and record["attempt"] != records[-1]["attempt"]:
                resumed_at = record.get("resumed_at_step", record["step"] - 1)
                records = [r for r in records if r["step"] <= resumed_at]
            records.append(record)
        return records


@dataclass(frozen=True, slots=True)
class SweepDir:
    """Files of a sweep; the runs are directories in it, named by what they compute."""

    path: Path

    @property
    def facts_path(self) -> Path:
        """The objective and the arguments of the newest command."""
        return self.path / "sweep.json"

    @property
    def arrays_path(self) -> Path:
        """The arrays that were submitted, each with its batch script and the list of its runs."""
        return self.path / "arrays"

    def run(self, run_id: str) -> RunDir:
        return RunDir(self.path / run_id)


def new_id() -> str:
    """A name that sorts by time and that no other command gets."""
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)


@functools.cache
def code_sha256() -> str:
    """The digest of this package's code, be it the checkout's or the copy in a run directory."""
    package, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def write_text(path: Path, text: str) -> None:
    """Replace `path` by a file with this text, durably and at once."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
    fsync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by this value as JSON, durably and at once."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None where there is no such file."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    assert isinstance(value, dict), path
    return value


def fsync_directory(path: Path) -> None:
    """Make renames in a directory survive a power loss."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _entries(path: Path) -> list[Path]:
    return list(path.iterdir()) if path.is_dir() else []


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with open(path) as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
