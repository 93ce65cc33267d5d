"""The test cluster is what the tests of runs take it for: a Slurm like a production cluster's."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import machine
from tests.cluster.cluster import IMAGE, NODES, SCRATCH, Cluster, node_states

pytestmark = pytest.mark.timeout(900)  # whoever comes first may have to build the cluster


def wait_until(condition: Callable[[], bool], what: Callable[[], object], *, timeout_s: float = 90.0) -> None:
    assert machine.wait_for(condition, timeout_s=timeout_s, poll_s=0.2), f"after {timeout_s:g} s: {what()}"


def submit(cluster: Cluster, *options: str, script: str) -> str:
    """Submit a batch script, whose output lies in /scratch; returns the job's id."""
    path = cluster.scratch / f"job-{time.monotonic_ns()}.sh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return cluster.check("sbatch", "--parsable", *options, f"{SCRATCH}/{path.name}", cwd=SCRATCH).strip()


def job(cluster: Cluster, job_id: str) -> dict[str, str]:
    """The fields of a job, as scontrol knows them."""
    text = cluster.check("scontrol", "show", "job", job_id, "--oneliner")
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def test_three_nodes_are_idle(cluster: Cluster) -> None:
    wait_until(lambda: node_states(cluster) == dict.fromkeys(NODES, "idle"), lambda: node_states(cluster))


def test_every_node_has_its_own_name_and_tmp_and_all_share_scratch(cluster: Cluster) -> None:
    script = f"hostname; touch /tmp/of-$(hostname); ls /tmp/of-*; touch {SCRATCH}/from-$(hostname)"
    lines = cluster.check("srun", "--nodes=3", "--label", "sh", "-c", script).splitlines()

    assert {line.split(": ")[1] for line in lines} == {*NODES, *(f"/tmp/of-{node}" for node in NODES)}
    assert len(lines) == 6
    assert {path.name for path in cluster.scratch.glob("from-*")} == {f"from-{node}" for node in NODES}


def test_a_job_sees_the_gpus_it_asked_for(cluster: Cluster) -> None:
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    env = json.loads(cluster.check("srun", "--gpus-per-node=2", "python", "-c", script))

    assert env["ROCR_VISIBLE_DEVICES"] == env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert env["SLURM_GPUS_ON_NODE"] == "2"
    refused = cluster.run("srun", "--gpus-per-node=5", "true")
    assert refused.returncode != 0
    assert "Requested node configuration is not available" in refused.stderr


def test_an_apptainer_job_runs_on_two_nodes(cluster: Cluster) -> None:
    script = "import os, sys, torch; print(os.environ['SLURMD_NODENAME'], torch.__version__, sys.prefix)"
    lines = cluster.check(
        *("srun", "--nodes=2", "--ntasks-per-node=1", "apptainer", "--silent", "exec", "--rocm", IMAGE),
        *("python", "-c", script),
        timeout_s=120,
    ).splitlines()

    assert len(lines) == 2
    assert len({line.split()[0] for line in lines}) == 2
    assert {line.split()[2] for line in lines} == {"/opt/venv"}


def test_a_signal_reaches_the_task_and_not_what_it_started(cluster: Cluster) -> None:
    """What the life of a run stands on, and what proctrack/linuxproc does not do."""
    task = (
        "import signal, subprocess, sys; from pathlib import Path; here = Path(sys.argv[1]); "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; print(flush=True); time.sleep(600)'], "
        "stdout=subprocess.PIPE); child.stdout.readline(); "
        "signal.signal(signal.SIGUSR2, lambda *_: (here / 'got').write_text(str(child.poll()))); "
        "(here / 'ready').touch(); child.wait()"
    )
    here = cluster.scratch / "signal"
    here.mkdir(mode=0o777)
    here.chmod(0o777)
    (cluster.scratch / "task.py").write_text(task)
    job_id = submit(cluster, script=f"srun python {SCRATCH}/task.py {SCRATCH}/signal")
    wait_until(lambda: (here / "ready").exists(), lambda: job(cluster, job_id))

    cluster.check("scancel", "--signal=USR2", job_id)

    wait_until(lambda: (here / "got").exists() and bool((here / "got").read_text()), lambda: job(cluster, job_id))
    assert (here / "got").read_text() == "None"  # the child lives
    cluster.check("scancel", job_id)
    wait_until(lambda: job(cluster, job_id)["JobState"] == "CANCELLED", lambda: job(cluster, job_id))


def test_a_requeued_job_starts_again_within_seconds(cluster: Cluster) -> None:
    script = f'echo $SLURM_RESTART_COUNT. >>{SCRATCH}/starts; [ -n "$SLURM_RESTART_COUNT" ] || sleep 600'
    job_id = submit(cluster, "--requeue", script=script)
    starts = cluster.scratch / "starts"
    wait_until(starts.exists, lambda: job(cluster, job_id))

    cluster.check("scontrol", "requeue", job_id)

    wait_until(lambda: job(cluster, job_id)["JobState"] == "COMPLETED", lambda: job(cluster, job_id))
    assert job(cluster, job_id)["Restarts"] == "1"
    assert starts.read_text().split() == [".", "1."]


def test_a_job_of_the_higher_partition_preempts_one_of_the_lower(cluster: Cluster) -> None:
    low = submit(cluster, "--partition=low", "--requeue", "--nodes=3", "--exclusive", script="sleep 600")
    wait_until(lambda: job(cluster, low)["JobState"] == "RUNNING", lambda: job(cluster, low))

    cluster.check("srun", "--partition=high", "--nodes=3", "true", timeout_s=120)

    wait_until(lambda: job(cluster, low)["Restarts"] == "1", lambda: job(cluster, low))
    cluster.check("scancel", low)


def test_a_killed_node_is_noticed_and_comes_back(cluster: Cluster) -> None:
    def state() -> str:
        return node_states(cluster)["n3"]

    wait_until(lambda: state() == "idle", state)
    job_id = submit(cluster, "--nodelist=n3", "--no-requeue", script=f"echo $$ >{SCRATCH}/lost; exec sleep 600")
    lost = cluster.scratch / "lost"
    wait_until(lambda: lost.exists() and bool(lost.read_text()), lambda: job(cluster, job_id))
    try:
        cluster.kill_node("n3")
        assert cluster.run("test", "-e", f"/proc/{lost.read_text().strip()}").returncode == 1
        wait_until(lambda: state().startswith("down"), state)
        assert job(cluster, job_id)["JobState"] == "NODE_FAIL"
    finally:
        cluster.start_node("n3")

    wait_until(lambda: state() == "idle", state)


def test_without_accounting_sacct_fails(cluster: Cluster) -> None:
    done = cluster.run("sacct")

    assert done.returncode != 0
    assert "accounting storage is disabled" in done.stderr


def test_with_accounting_sacct_knows_ended_jobs(accounting_cluster: Cluster) -> None:
    job_id = submit(accounting_cluster, script="exit 3")

    def states() -> list[str]:
        return accounting_cluster.check(
            "sacct", "--noheader", "-X", "--parsable2", "-j", job_id, "-o", "State,ExitCode"
        ).split()

    wait_until(lambda: states() == ["FAILED|3:0"], states)


def test_with_accounting_an_unknown_account_is_refused(accounting_cluster: Cluster) -> None:
    done = accounting_cluster.run("sbatch", "--account=nobody", "--wrap=true", cwd=SCRATCH)

    assert done.returncode != 0
    assert "Invalid account" in done.stderr


def test_the_scratch_directory_is_seen_from_outside(cluster: Cluster, tmp_path: Path) -> None:
    cluster.check("sh", "-c", f"umask 077; echo hello >{SCRATCH}/private")

    assert (cluster.scratch / "private").read_text() == "hello\n"
