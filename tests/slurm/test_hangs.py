"""A rank that does not move, on a real Slurm in real containers: named, shown, ended, and the run goes on."""

import json
import signal
from pathlib import Path

import pytest

from tests.cluster.cluster import SCRATCH, Cluster
from tests.slurm.runs import ClusterRun, assert_same_end, cancelled_at_end, submit

pytestmark = pytest.mark.timeout(600)

STUCK = 2  # the first rank of the second node
LIMIT_S = 20
# Laid under the run's own copy of the code by the batch script: what breaks, once, in one rank.
ONCE = f"""

def _once(step):
    import torch.distributed as dist
    try:
        return dist.get_rank() == {STUCK} and step >= 30 and bool(open("MARK", "x"))
    except FileExistsError:
        return False
"""
IN_PYTHON = """
_set_step = Optimizers.set_step
def set_step(self, step):
    while _once(step):
        import time
        while True:
            time.sleep(0.1)
    return _set_step(self, step)
Optimizers.set_step = set_step
"""
IN_A_COLLECTIVE = """
_set_step = Optimizers.set_step
def set_step(self, step):
    if _once(step):
        import torch
        torch.distributed.recv(torch.zeros(1), src=0)  # nobody sends
    return _set_step(self, step)
Optimizers.set_step = set_step
"""
READING = """
_read = Synthetic.read
def read(self, block):
    if self.split == "train" and _once(30):
        open("FIFO").read()  # nobody writes, as a file system that does not answer
    return _read(self, block)
Synthetic.read = read
"""
CASES = {
    "stuck in Python": ("optim.py", IN_PYTHON, "it is in set_step (rechpc/rank/optim.py:"),
    "stopped with SIGSTOP": (None, "", "its process is stopped (SIGSTOP)"),
    "blocked in a collective": ("optim.py", IN_A_COLLECTIVE, "called from rechpc/rank/optim.py:"),
    "reading from a stuck file system": ("synthetic.py", READING, "called from rechpc/rank/data.py:"),
}


def broken(cluster: Cluster, name: str) -> list[str]:
    """The override that has the batch script break the code of the run."""
    file, text, _ = CASES[name]
    if file is None:
        return []
    key = name.replace(" ", "-")
    fifo, mark = f"{SCRATCH}/{key}.fifo", f"{SCRATCH}/{key}.mark"
    cluster.check("sh", "-c", f"rm -f {mark} {fifo}; mkfifo {fifo}")
    patch = cluster.scratch / f"{key}.py"
    patch.write_text((ONCE + text).replace("MARK", mark).replace("FIFO", fifo))
    patch.chmod(0o644)
    # Once: a requeued job finds the code of the run as it was left.
    lines = f"grep -q _once $PYTHONPATH/rechpc/rank/{file} || cat {SCRATCH}/{key}.py >>$PYTHONPATH/rechpc/rank/{file}"
    return [f'job.setup=["{lines}"]']


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
    run = submit(cluster, f"job.hang_timeout_s={LIMIT_S}", *broken(cluster, name))
    with cancelled_at_end(run):
        run.wait_for_step(25)
        first, before = run.attempts()[0], processes(run)
        if name == "stopped with SIGSTOP":
            run.kill_rank(STUCK, signal.SIGSTOP)
        run.wait_until(lambda: (first / "outcome.json").exists(), "the end of the hanging attempt")
        run.wait_until(lambda: not before.items() & processes(run).items(), "the end of all its processes")
        assert_same_end(run, undisturbed)

    error = json.loads((first / "outcome.json").read_text())["error"]
    assert error.startswith(f"rank {STUCK}: stuck on n"), error
    assert f"job.hang_timeout_s={LIMIT_S}" in error
    assert CASES[name][2] in error, error
    stacks = [r for r in range(4) if "most recent call first" in (first / f"rank-{r:05d}.log").read_text()]
    assert stacks == [r for r in range(4) if r != STUCK or CASES[name][0]]  # a stopped process says nothing
    moved_s = json.loads((first / "heartbeat").read_text())["time_s"]
    named_s = json.loads((first / f"error-rank-{STUCK:05d}.json").read_text())["time_s"]
    assert named_s - moved_s < LIMIT_S + 10
    assert "starts again" in json.loads((first / "verdict.json").read_text())["reason"]
