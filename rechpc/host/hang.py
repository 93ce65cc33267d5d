"""Ranks that do not move: noticed, asked for their stacks, and the stuck one named; the host task ends them then.

A step is collective, so one stuck rank stops all of them, and with them the heartbeat. Who is stuck is read from their
stacks: it is elsewhere than in the wait for the others. Must not know torch, Slurm or Apptainer.
"""

import contextlib
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rechpc.rundir import AttemptDir, read_json, write_json

# Before the first step nobody knows how long a step takes, and saving or planning may take minutes.
OTHER_PHASES_S = 1800.0
# While it trains: so many times the mean step, for the slowest one may wait for a file system; but not less than this.
_STEPS, _FLOOR_S = 100, 300.0
_ANSWER_S = 3.0
_OTHER_NODES_S = 5.0
_POLL_S = 0.1
STACKS_SIGNAL = signal.SIGUSR1  # rechpc.lifeline has every rank answer it
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*\(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
# Where a rank waits for the others, or for its GPU: in a library, or for the sums of a step.
_LIBRARIES = re.compile(r"/(torch|torchrec)/")
SUMS = "_receive"  # of rechpc.rank.pulse
_TIMES_OTHERS = "/rechpc/rank/breakdown.py"  # stands between every wait and who waits, and is never stuck itself
_STATES = {"T": "stopped (SIGSTOP)", "D": "in an uninterruptible read or write", "Z": "dead"}


class Watch:
    """Whether an attempt still moves, seen from one node; asked again and again by its host task."""

    def __init__(self, attempt: AttemptDir, limit_s: float | None) -> None:
        self._attempt, self._limit_s = attempt, limit_s
        self._moved_at, self._seen = time.monotonic(), 0.0
        self._first: tuple[int, float] | None = None
        self.patience_s = max(limit_s or 0.0, OTHER_PHASES_S)

    def exceeded(self) -> bool:
        """Whether no rank has moved for too long, here or as another node saw it."""
        now = time.monotonic()
        if (beat := _modified_at(self._attempt.heartbeat_path)) != self._seen:
            self._moved_at, self._seen = now, beat
            self.patience_s = self._patience_s(read_json(self._attempt.heartbeat_path) or {})
        return now - self._moved_at > self.patience_s or self._attempt.hang_path.exists()

    def words(self) -> str:
        """How long nothing moved, and the key that says how long is too long."""
        key = "null, from the step time" if self._limit_s is None else f"{self._limit_s:g}"
        return f"no progress for {self.patience_s:.0f} s (job.hang_timeout_s={key})"

    def _patience_s(self, beat: dict[str, Any]) -> float:
        if "step" not in beat:
            return max(self._limit_s or 0.0, OTHER_PHASES_S)
        if self._limit_s is not None:
            return self._limit_s
        if beat["phase"] != "training":
            return OTHER_PHASES_S
        step, time_s = int(beat["step"]), float(beat["time_s"])
        self._first = self._first or (step, time_s)
        steps = step - self._first[0]
        return max(_FLOOR_S, _STEPS * (time_s - self._first[1]) / steps) if steps else OTHER_PHASES_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A rank that does not move, as its node saw it."""

    rank: int
    node: str
    state: str  # of its process, one letter, as /proc says
    frames: list[list[str]] = field(default_factory=list)  # file:line and function; innermost first; empty: no answer

    @property
    def waits(self) -> bool:
        """Whether it waits for the others, or for its GPU."""
        if not self.frames or self.state in _STATES:
            return False
        place, function = self.frames[0]
        return bool(_LIBRARIES.search(place)) or function == SUMS

    @property
    def place(self) -> str:
        """Where its own code is, which tells ranks apart that are all in some library."""
        return next((p for p, _ in self.frames if "/rechpc/" in p), self.frames[0][0] if self.frames else "")

    def words(self) -> str:
        """What it does, as far as can be seen."""
        if self.state in _STATES and not self.frames:
            return f"its process is {_STATES[self.state]}"
        if not self.frames:
            return "it did not say where it is"
        (innermost, function), place = self.frames[0], self.place
        caller = "" if place == innermost else f", called from {_short(place)}"
        return f"it is in {function} ({_short(innermost)}){caller}"


def look(torchrun_pid: int, attempt: AttemptDir, *, node_rank: int, node_name: str) -> None:
    """Have every rank of this node write its stacks into its log, and write what was seen for `conclude`."""
    with contextlib.suppress(OSError):
        attempt.hang_path.touch()  # for the other nodes, which may see a heartbeat later
    pids = _ranks_below(torchrun_pid)
    logs = {rank: attempt.rank_log_path(rank) for rank in pids}
    offsets = {rank: _size(log) for rank, log in logs.items()}
    asked = {rank for rank, pid in pids.items() if _catches(pid, STACKS_SIGNAL)}
    for rank in asked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[rank], STACKS_SIGNAL)
    texts: dict[int, str] = {}

    def settled() -> bool:
        before, now = dict(texts), {rank: _tail(logs[rank], offsets[rank]) for rank in asked}
        texts.update(now)
        return before == now and all(_THREAD.search(text) for text in now.values())

    _wait_for(settled, _ANSWER_S)
    seen = [
        Seen(rank=rank, node=node_name, state=_state(pid), frames=main_frames(texts.get(rank, "")))
        for rank, pid in sorted(pids.items())
    ]
    with contextlib.suppress(OSError):  # a full disk must not keep anybody from ending the ranks
        write_json(attempt.hang_report_path(node_rank), {"ranks": [asdict(one) for one in seen]})


def conclude(attempt: AttemptDir, words: str, *, node_rank: int, num_nodes: int) -> str:
    """One line that names the stuck rank first, from what all nodes saw; also left as that rank's error.

    Node 0 concludes; its end ends the others, which therefore wait for it.
    """
    if node_rank:
        _wait_for(attempt.outcome_path.exists, 2 * _OTHER_NODES_S)
        return words
    paths = [attempt.hang_report_path(n) for n in range(num_nodes)]
    _wait_for(lambda: all(path.exists() for path in paths), _OTHER_NODES_S)
    seen = [Seen(**facts) for path in paths for facts in (read_json(path) or {"ranks": []})["ranks"]]
    silent = [str(n) for n, path in enumerate(paths) if not path.exists()]
    unheard = f"; node {', '.join(silent)} did not report" if silent else ""
    stuck = suspects(seen)
    if not stuck:
        place = seen[0].words() if seen else "no rank was found"
        return f"{words}: all {len(seen)} ranks are in the same place (rank 0: {place}); network or GPU?{unheard}"
    first, *others = stuck
    also = f"; so may be rank {', '.join(str(s.rank) for s in others)}" if others else ""
    rest = len(seen) - len(stuck)
    error = (
        f"stuck on {first.node}: {words}, {first.words()}{also}; {rest} other ranks wait{unheard}; "
        "the stacks of all are in rank-*.log"
    )
    record = {"rank": first.rank, "time_s": time.time(), "error": error, "traceback": "", "killed": True}
    with contextlib.suppress(OSError):
        write_json(attempt.error_path(first.rank), record)
    return f"rank {first.rank}: {error}"


def suspects(seen: list[Seen]) -> list[Seen]:
    """The ranks that the others wait for, likeliest first; none where all are in the same place.

    A process that is stopped comes first, then one that is elsewhere than in a wait; where all wait, those that wait
    in a rarer place than most.
    """
    stuck = [s for s in seen if not s.waits]
    if stuck:
        return sorted(stuck, key=lambda s: (s.state not in _STATES, bool(s.frames), s.rank))
    places = Counter(s.place for s in seen)
    most = max(places.values(), default=0)
    return sorted((s for s in seen if places[s.place] < most), key=lambda s: (places[s.place], s.rank))


def main_frames(text: str) -> list[list[str]]:
    """Frames of the main thread, innermost first, in what faulthandler wrote; it comes last there.

    Without those that only time what others do.
    """
    parts = _THREAD.split(text)
    frames = _FRAME.findall(parts[-1]) if len(parts) > 1 else []
    return [[f"{path}:{line}", function] for path, line, function in frames if not path.endswith(_TIMES_OTHERS)]


def _short(place: str) -> str:
    """A file without what is in front of its package."""
    return re.sub(r"^.*/(?=(?:rechpc|torch|torchrec|fbgemm_gpu)/)|^.*/(?=[^/]+$)", "", place, count=1)


def _ranks_below(torchrun_pid: int) -> dict[int, int]:
    """Process id of every rank that torchrun has started, by rank; a container here has no ids of its own."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, LookupError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: dict[int, int] = {}
    below = [torchrun_pid]
    while below:
        pid = below.pop()
        below += children.get(pid, [])
        with contextlib.suppress(OSError, ValueError, LookupError):
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if argv[argv.index(b"-m") + 1] == b"rechpc.train":
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found[int(next(e[5:] for e in environment if e.startswith(b"RANK=")))] = pid
    return found


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process handles a signal, which would end it otherwise."""
    with contextlib.suppress(OSError):
        match = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return bool(match and int(match[1], 16) >> (number - 1) & 1)
    return False


def _state(pid: int) -> str:
    """The state of a process's main thread."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


def _wait_for(condition: Callable[[], bool], limit_s: float) -> None:
    give_up_at = time.monotonic() + limit_s
    while not condition() and time.monotonic() < give_up_at:
        time.sleep(_POLL_S)


def _modified_at(path: Path) -> float:
    """When a file was last replaced, by the file system's clock; 0 before it is there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _tail(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")
    except OSError:
        return ""
