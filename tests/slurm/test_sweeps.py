"""A sweep of two-node runs on a real Slurm: what befalls its elements, and how the same command completes it."""

import json
import signal

import pytest

from rechpc import report, table
from rechpc.rundir import RunDir
from tests.cluster.cluster import SCRATCH, Cluster
from tests.slurm.runs import ON_CLUSTER, SMALL, ClusterRun, logged_steps, said, wait_until

pytestmark = pytest.mark.timeout(1800)
STEPS = 60
SWEEP = (
    *("-m", *ON_CLUSTER, *SMALL, "job.nodes=2", f"trainer.max_steps={STEPS}", "checkpoint.every=40"),
    *("seed=1,2,3", "optimizer.learning_rate=0.03,0.05", "sweep.max_parallel=1"),
)


def facts(cluster: Cluster, sweep: str) -> list[dict]:
    """What rechpc.status tells of every run of the sweep, in the order of the array."""
    text = cluster.run("python", "-m", "rechpc.status", sweep, "--json").stdout
    return sorted(json.loads(text), key=lambda run: int(run["job"]["job_id"].partition("_")[2]))


def states(cluster: Cluster, sweep: str) -> list[str]:
    return [run["state"] for run in facts(cluster, sweep)]


def test_a_sweep_is_continued_to_completion_by_the_same_command(cluster: Cluster) -> None:
    text = cluster.check("python", "-m", "rechpc.submit", *SWEEP, timeout_s=120)
    sweep, array = said(text, "sweep").rstrip(":"), said(text, "job")
    try:
        elements = [
            ClusterRun(cluster=cluster, inside=run["path"], job_id=run["job"]["job_id"])
            for run in facts(cluster, sweep)
        ]
        assert [e.job_id for e in elements] == [f"{array}_{i}" for i in range(6)]
        cluster.check("python", "-m", "rechpc.status", elements[2].inside, "--cancel")

        elements[0].wait_for_step(5)
        elements[0].kill_rank(3, signal.SIGKILL)
        elements[0].wait_for_state("failed")
        elements[1].wait_for_step(5)
        wrap = ["--wrap=true", "--output=/dev/null"]
        cluster.check("sbatch", "--partition=high", "--nodes=3", "--exclusive", *wrap)

        ended = ["failed", "finished", "cancelled", *["finished"] * 3]
        wait_until(
            lambda: states(cluster, sweep) == ended, lambda: str(states(cluster, sweep)), every_s=3.0, patience_s=700
        )
        assert len(elements[1].attempts()) > 1
        assert cluster.run("python", "-m", "rechpc.status", sweep).returncode == 1

        text = cluster.check("python", "-m", "rechpc.submit", *SWEEP, f"sweep.dir={sweep}", timeout_s=120)
        assert "6 runs, 2 to start" in text
        wait_until(
            lambda: all(s == "finished" for s in states(cluster, sweep)),
            lambda: str(states(cluster, sweep)),
            every_s=3.0,
            patience_s=400,
        )
    finally:
        cluster.run("scancel", "--user=hpc", user="root")

    done = cluster.run("python", "-m", "rechpc.status", sweep)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "6 runs: 6 finished")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0][:5] == ["run", "state", "seed", "optimizer.learning_rate", "test_auc"]
    assert sorted((line[2], line[3]) for line in lines[1:7]) == [(s, r) for s in "123" for r in ("0.03", "0.05")]
    aucs = [float(line[4]) for line in lines[1:7]]
    assert aucs == sorted(aucs, reverse=True)
    assert logged_steps(elements[1].path) == list(range(10, STEPS + 1, 10))

    text = cluster.check("python", "-m", "rechpc.submit", *SWEEP, timeout_s=120)
    assert "6 runs, 0 to start" in text  # another sweep, which finds them in the first
    assert "6 finished in other sweeps" in text
    table_of_links = cluster.run("python", "-m", "rechpc.status", said(text, "sweep").rstrip(":"))
    assert (table_of_links.returncode, table_of_links.stdout.splitlines()[-1]) == (0, "6 runs: 6 finished")

    here = table.read(cluster.scratch / sweep.removeprefix(f"{SCRATCH}/"))
    stories = [report.story(entry, here.path) for entry in here.entries]
    preempted = next(s for s in stories if s.run == RunDir(elements[1].path))
    assert [s.attempt for s in preempted.spans if s.phase == "queued"][:2] == [0, 1]
    crashed = next(s for s in stories if s.run == RunDir(elements[0].path))
    assert [s.phase for s in crashed.spans if s.attempt == 0][-1] == "lost"
    assert "6 runs: 6 finished" in report.page([here], stories)


def test_the_arrays_of_one_sweep_together_start_no_more_runs_than_asked_for(cluster: Cluster) -> None:
    sizes = ("-m", *ON_CLUSTER, *SMALL, "job.nodes=1,2", "trainer.max_steps=10", "seed=4", "sweep.max_parallel=1")
    text = cluster.check("python", "-m", "rechpc.submit", *sizes, timeout_s=120)
    sweep = said(text, "sweep").rstrip(":")
    assert text.count("an array in slurm") == 2
    try:
        wait_until(
            lambda: states(cluster, sweep) == ["finished"] * 2,
            lambda: str(states(cluster, sweep)),
            every_s=3.0,
            patience_s=400,
        )
    finally:
        cluster.run("scancel", "--user=hpc", user="root")
    here = table.read(cluster.scratch / sweep.removeprefix(f"{SCRATCH}/"))
    lives = sorted((report.story(entry, here.path).spans for entry in here.entries), key=lambda spans: spans[-1].end_s)
    assert lives[1][0].phase == "queued"
    assert lives[1][0].end_s >= lives[0][-1].end_s
