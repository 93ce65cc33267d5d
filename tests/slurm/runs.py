"""Runs on the test cluster, as its user would submit and watch them, and what can befall them."""

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.cluster import IMAGE, SCRATCH, Cluster

# About 120 steps of 50 to 100 ms, a checkpoint every second or two.
TRAIN_ROWS = 120_000
SMALL = (
    f"data.synthetic.train_rows={TRAIN_ROWS}",
    "data.synthetic.test_rows=5003",
    "trainer.global_batch=1000",
    "checkpoint.every=20",
    "sharding=row_wise",  # the planner's other choices depend on how ranks are spread over nodes
)
STEPS = 120
ON_CLUSTER = (
    "cluster=slurm",
    "cluster.gpu_request=gpus_per_node",
    "container=apptainer",
    f"container.image={IMAGE}",
    f"runs_root={SCRATCH}/runs",
    "job.ranks_per_node=2",
    "job.signal_lead_s=20",
    # It has tests of its own (test_preflight.py), and one more import of torch takes a run's start half as long again.
    "preflight.enabled=false",
)
_PATIENCE_S = 240.0


@dataclass(frozen=True)
class ClusterRun:
    """A run on the cluster: its directory inside, its job, and its directory as seen from here."""

    cluster: Cluster
    inside: str
    job_id: str

    @property
    def path(self) -> Path:
        return self.cluster.scratch / Path(self.inside).relative_to(SCRATCH)

    def attempts(self) -> list[Path]:
        """Directories of the attempts that have begun, oldest first."""
        found = [a for a in (self.path / "attempts").iterdir() if (a / "attempt.json").exists()]
        return sorted(found, key=lambda a: int(json.loads((a / "attempt.json").read_text())["ordinal"]))

    def heartbeat(self) -> dict[str, Any]:
        """The newest heartbeat of the newest attempt; empty before there is one."""
        for attempt in reversed(self.attempts()):
            if (attempt / "heartbeat").exists():
                return json.loads((attempt / "heartbeat").read_text())
            return {}
        return {}

    def outcomes(self) -> list[tuple[str, int, int | None]]:
        """How each attempt ended: outcome, step and the newest checkpoint's step."""
        facts = [json.loads((attempt / "outcome.json").read_text()) for attempt in self.attempts()]
        return [(f["outcome"], f["step"], f["checkpoint_step"]) for f in facts]

    def result(self) -> dict[str, Any]:
        return json.loads((self.path / "result.json").read_text())

    def status(self) -> tuple[str, int]:
        """The state that rechpc.status tells, and its exit status."""
        done = self.cluster.run("python", "-m", "rechpc.status", self.inside)
        return said(done.stdout + done.stderr, "state").rstrip(":"), done.returncode

    def status_text(self) -> str:
        return self.cluster.run("python", "-m", "rechpc.status", self.inside).stdout

    def wait_for_step(self, step: int, *, attempt: int = 0) -> None:
        """Wait until the given attempt, or a later one, has done so many steps of the run."""
        self.wait_until(
            lambda: len(self.attempts()) > attempt and self.heartbeat().get("step", 0) >= step,
            f"step {step} of attempt {attempt}",
        )

    def wait_for_state(self, *states: str) -> None:
        self.wait_until(lambda: self.status()[0] in states, f"state {' or '.join(states)}", every_s=1.0)

    def wait_until(
        self, condition: Callable[[], bool], what: str, *, every_s: float = 0.02, patience_s: float = _PATIENCE_S
    ) -> None:
        def told() -> str:
            return f"{what}; now {self.status_text()}\n{self.verdicts()}"

        wait_until(condition, told, every_s=every_s, patience_s=patience_s)

    def verdicts(self) -> str:
        return "\n".join(v.read_text() for v in sorted((self.path / "attempts").glob("*/verdict.json")))

    def send(self, name: str) -> None:
        self.cluster.check("scancel", f"--signal={name}", self.job_id)

    def ranks(self) -> dict[int, int]:
        """Process id of every rank that lives, by rank."""
        found = {}
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                argv = (process / "cmdline").read_bytes().split(b"\0")
                if b"rechpc.train" in argv and b"torch.distributed.run" not in argv and self.inside.encode() in argv:
                    env = dict(e.split(b"=", 1) for e in (process / "environ").read_bytes().split(b"\0") if b"=" in e)
                    found[int(env[b"RANK"])] = int(process.name)
        return found

    def kill_rank(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.ranks()[rank], number)


def submit(cluster: Cluster, *overrides: str, prefix: Sequence[str] = ()) -> ClusterRun:
    """Submit a small run on 2 nodes, 2 ranks each; `prefix` is in front of the command."""
    text = cluster.check(*prefix, "python", "-m", "rechpc.submit", *ON_CLUSTER, *SMALL, "job.nodes=2", *overrides)
    return ClusterRun(cluster=cluster, inside=said(text, "run"), job_id=said(text, "job"))


def resume(run: ClusterRun, *overrides: str) -> ClusterRun:
    text = run.cluster.check("python", "-m", "rechpc.submit", f"resume={run.inside}", *overrides)
    return ClusterRun(cluster=run.cluster, inside=run.inside, job_id=said(text, "job"))


def said(text: str, name: str) -> str:
    """The first word after a name at the start of a line."""
    match = re.search(rf"^{name} +(\S+)", text, re.MULTILINE)
    assert match, text
    return match[1]


def wait_until(
    condition: Callable[[], bool], what: Callable[[], str], *, every_s: float = 0.1, patience_s: float = _PATIENCE_S
) -> None:
    """Wait for a condition, bounded; `what` describes it where it never came."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience_s:.0f} s for {what()}"
        time.sleep(every_s)


def assert_same_end(run: ClusterRun, undisturbed: ClusterRun) -> None:
    """Finished, with the bits of the undisturbed run, and every logged step once."""
    run.wait_for_state("finished")
    assert run.result()["step"] == STEPS
    assert run.result()["test_auc"] == undisturbed.result()["test_auc"]
    assert tensors(run.path) == tensors(undisturbed.path)
    assert logged_steps(run.path) == list(range(10, STEPS + 1, 10))


@contextlib.contextmanager
def cancelled_at_end(*runs: ClusterRun) -> Iterator[None]:
    """Leave no job behind, whatever happens."""
    try:
        yield
    finally:
        for run in runs:
            run.cluster.run("scancel", run.job_id)


def tensors(run_path: Path) -> dict[str, list[tuple[list[int], str]]]:
    """Digest of every part of every tensor of the newest checkpoint, by name, but for the generators of the ranks."""
    import hashlib

    newest = max(p for p in (run_path / "checkpoints").iterdir() if not p.name.endswith(".tmp"))
    manifest = json.loads((newest / "manifest.json").read_text())
    found: dict[str, list[tuple[list[int], str]]] = {}
    for name, tensor in manifest["tensors"].items():
        size = {"float32": 4, "uint8": 1, "float64": 8, "int64": 8}[tensor["dtype"]]
        for part in tensor["parts"]:
            count = size
            for n in part["shape"]:
                count *= n
            with (newest / part["file"]).open("rb") as file:
                file.seek(part["byte"])
                found.setdefault(name, []).append((part["offset"], hashlib.sha256(file.read(count)).hexdigest()))
    return {name: sorted(parts) for name, parts in found.items() if not name.startswith("rng/")}


def logged_steps(run_path: Path) -> list[int]:
    """The steps of the metrics as a reader of the run sees them."""
    from rechpc.rundir import RunDir

    return [record["step"] for record in RunDir(run_path).metrics() if "loss" in record]
