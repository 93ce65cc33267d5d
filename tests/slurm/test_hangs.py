"""A rank that does not move, on a real Slurm in real containers: named, shown, ended, and the run goes on."""

import json
from pathlib import Path

import pytest

from tests.cluster.cluster import SCRATCH, Cluster
from tests.slurm.runs import ClusterRun, assert_same_end, cancelled_at_end, submit

pytestmark = pytest.mark.timeout(600)

STUCK = 2  # the first rank of the second node
LIMIT_S = 20
# Added to the run's own copy of the code by the batch script: what breaks, once, in one rank, after a checkpoint.
ONCE = f"""

def _once():
    import pathlib, sys
    import torch.distributed as dist
    saved = [p for p in pathlib.Path(sys.argv[1], "checkpoints").iterdir() if p.suffix != ".tmp"]
    try:
        return bool(saved) and dist.get_rank() == {STUCK} and bool(open(sys.argv[1] + "/once", "x"))
    except FileExistsError:
        return False
"""
BEFORE_A_STEP = """
import torch.distributed as dist
_init, _set_step = Optimizers.__init__, Optimizers.set_step
def init(self, *arguments):
    _init(self, *arguments)
    self.lonely = dist.new_group()
def set_step(self, step):
    if _once():
        WHAT
    return _set_step(self, step)
Optimizers.__init__, Optimizers.set_step = init, set_step
"""
BEFORE_A_BLOCK = """
_read = Synthetic.read
def read(self, block):
    if self._split == "train" and _once():
        import os, sys
        os.mkfifo(sys.argv[1] + "/fifo")
        open(sys.argv[1] + "/fifo").read()  # nobody writes, as a file system that does not answer
    return _read(self, block)
Synthetic.read = read
"""
CASES = {
    "stuck in Python": ("while True: pass", "it is in set_step (rechpc/rank/optim.py:"),
    "stopped with SIGSTOP": ("import os; os.kill(os.getpid(), 19)", "its process is stopped (SIGSTOP)"),
    "blocked in a collective": (
        "dist.all_reduce(torch.zeros(1), group=self.lonely)",  # the others never come
        "called from rechpc/rank/optim.py:",
    ),
    "reading from a stuck file system": (None, "called from rechpc/rank/data.py:"),
}


def broken(cluster: Cluster, name: str) -> str:
    """The override that has the batch script break the code of the run."""
    what, _ = CASES[name]
    file, text = ("optim.py", BEFORE_A_STEP.replace("WHAT", what)) if what else ("synthetic.py", BEFORE_A_BLOCK)
    key = name.replace(" ", "-")
    patch = cluster.scratch / f"{key}.py"
    patch.write_text(ONCE + text)
    patch.chmod(0o644)
    # Once: a requeued job finds the code of the run as it was left.
    line = f"grep -q _once $PYTHONPATH/rechpc/rank/{file} || cat {SCRATCH}/{key}.py >>$PYTHONPATH/rechpc/rank/{file}"
    return f"job.setup=['{line}']"


def processes(run: ClusterRun) -> dict[int, str]:
    """Start time of everything that has the run on its command line, by process id."""
    found = {}
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and run.inside.encode() in (process / "cmdline").read_bytes():
                found[int(process.name)] = (process / "stat").read_text().rpartition(")")[2].split()[19]
        except OSError:
            continue
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_stuck_rank_is_named_all_show_their_stacks_and_the_run_goes_on(
    cluster: Cluster, undisturbed: ClusterRun, name: str
) -> None:
    run = submit(cluster, f"job.hang_timeout_s={LIMIT_S}", broken(cluster, name))
    with cancelled_at_end(run):
        run.wait_for_step(1)
        first, before = run.attempts()[0], processes(run)
        run.wait_until(lambda: (first / "outcome.json").exists(), "the end of the hanging attempt")
        run.wait_until(lambda: not before.items() & processes(run).items(), "the end of all its processes")
        assert_same_end(run, undisturbed)

    error = json.loads((first / "outcome.json").read_text())["error"]
    assert error.startswith(f"rank {STUCK}: stuck on n"), error
    assert f"job.hang_timeout_s={LIMIT_S}" in error
    assert CASES[name][1] in error, error
    stacks = [r for r in range(4) if "most recent call first" in (first / f"rank-{r:05d}.log").read_text()]
    assert stacks == [r for r in range(4) if r != STUCK or "SIGSTOP" not in name]  # a stopped process says nothing
    moved_s = json.loads((first / "heartbeat").read_text())["time_s"]
    named = json.loads((first / f"error-rank-{STUCK:05d}.json").read_text())
    assert named["error"] in error
    assert named["time_s"] - moved_s < LIMIT_S + 10
    assert "starts again" in json.loads((first / "verdict.json").read_text())["reason"]
