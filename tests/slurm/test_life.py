"""The life of a run on a real Slurm with a real Apptainer: whatever stops it, it ends with the same model."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.slurm.runs import (
    ON_CLUSTER,
    SMALL,
    STEPS,
    ClusterRun,
    cancelled_at_end,
    logged_steps,
    resume,
    submit,
    tensors,
    wait_until,
)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> ClusterRun:
    """2 nodes x 2 ranks in Apptainer, left alone."""
    run = submit(cluster)
    with cancelled_at_end(run):
        run.wait_for_state("finished")
    return run


def assert_same_end(run: ClusterRun, undisturbed: ClusterRun) -> None:
    """Finished, with the bits of the undisturbed run, and every logged step once."""
    run.wait_for_state("finished")
    assert run.result()["step"] == STEPS
    assert run.result()["test_auc"] == undisturbed.result()["test_auc"]
    assert tensors(run.path) == tensors(undisturbed.path)
    assert logged_steps(run.path) == list(range(10, STEPS + 1, 10))


def test_two_nodes_finish_with_the_bits_of_a_bare_run_of_the_same_ranks(
    undisturbed: ClusterRun, tmp_path: Path
) -> None:
    argv = [sys.executable, "-m", "rechpc.submit", *SMALL, "job.ranks_per_node=4", f"runs_root={tmp_path}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (bare,) = tmp_path.glob("*/*")

    here, there = json.loads((bare / "result.json").read_text()), undisturbed.result()
    assert there["world_size"] == here["world_size"] == 4
    assert there["test_auc"] == here["test_auc"]
    assert tensors(undisturbed.path) == tensors(bare)
    assert undisturbed.status() == ("finished", 0)


@pytest.mark.parametrize("moment", ["importing", "training", "twice in a row", "saving"])
def test_a_drained_run_is_saved_once_requeued_and_continued(
    cluster: Cluster, undisturbed: ClusterRun, moment: str
) -> None:
    run = submit(cluster)
    with cancelled_at_end(run):
        if moment == "importing":
            run.wait_until(lambda: bool(run.ranks()), "a rank")
        elif moment == "saving":
            run.wait_until(lambda: run.heartbeat().get("phase") == "saving", "a save")
        else:
            run.wait_for_step(37)
        run.send("USR2")
        if moment == "twice in a row":
            run.send("USR2")
        assert_same_end(run, undisturbed)

    first, *later = run.attempts()
    outcome = json.loads((first / "outcome.json").read_text())
    assert outcome["outcome"] == "requeued"
    assert outcome["checkpoint_step"] == outcome["step"]
    assert [attempt.name for attempt in (first, *later)] == [f"{run.job_id}.0", f"{run.job_id}.1"]


def test_a_run_longer_than_its_time_limit_goes_on_by_itself(cluster: Cluster) -> None:
    # More than a minute of training, however fast this machine is: evaluation and saves are part of it.
    run = submit(cluster, "job.time_limit_min=1", "job.signal_lead_s=30", "trainer.epochs=12", "checkpoint.every=0")
    with cancelled_at_end(run):
        run.wait_until(lambda: len(run.attempts()) > 1 or (run.path / "result.json").exists(), "a second attempt")
        assert json.loads((run.attempts()[0] / "outcome.json").read_text())["outcome"] == "requeued"
        run.wait_for_step(1, attempt=1)


@pytest.mark.parametrize("grace_s", [20, 0])
def test_a_preempted_run_goes_on(cluster: Cluster, undisturbed: ClusterRun, grace_s: int) -> None:
    cluster.check("scontrol", "update", "partition=low", f"GraceTime={grace_s}", user="root")
    run = submit(cluster)
    with cancelled_at_end(run):
        run.wait_for_step(30)
        wrap = ["--wrap=true", "--output=/dev/null"]
        cluster.check("sbatch", "--partition=high", "--nodes=3", "--exclusive", *wrap)
        run.wait_until(lambda: len(run.attempts()) > 1, "a second attempt")
        assert_same_end(run, undisturbed)
    if grace_s:
        assert json.loads((run.attempts()[0] / "outcome.json").read_text())["step"] >= 30


def test_a_killed_rank_ends_the_attempt_and_the_run_goes_on_from_its_checkpoint(
    cluster: Cluster, undisturbed: ClusterRun
) -> None:
    run = submit(cluster)
    with cancelled_at_end(run):
        run.wait_for_step(25)
        run.kill_rank(3, signal.SIGKILL)
        wait_until(lambda: not run.ranks(), lambda: f"the end of ranks {run.ranks()}", patience_s=20)
        assert_same_end(run, undisturbed)
    assert len(run.attempts()) == 2


def test_a_crash_before_the_first_checkpoint_fails_at_once_with_the_first_error(cluster: Cluster) -> None:
    run = submit(cluster, "optimizer=sgd", "optimizer.learning_rate=1e30", "checkpoint.every=0")
    with cancelled_at_end(run):
        run.wait_for_state("failed")

    assert run.status()[1] == 1
    assert "loss is nan at step" in run.status_text()
    assert len(run.attempts()) == 1
    state = cluster.check("scontrol", "show", "job", "--oneliner", run.job_id)
    assert "JobState=FAILED" in state


def test_a_rank_that_hangs_ends_the_attempt(cluster: Cluster, undisturbed: ClusterRun) -> None:
    run = submit(cluster, "job.hang_timeout_s=25")
    with cancelled_at_end(run):
        run.wait_for_step(25)
        run.kill_rank(2, signal.SIGSTOP)
        run.wait_until(lambda: len(run.attempts()) > 1, "a second attempt")
        assert_same_end(run, undisturbed)
    assert "job.hang_timeout_s=25" in json.loads((run.attempts()[0] / "outcome.json").read_text())["error"]


def test_a_lost_node_is_replaced(cluster: Cluster, undisturbed: ClusterRun) -> None:
    run = submit(cluster)
    try:
        with cancelled_at_end(run):
            run.wait_for_step(25)
            nodes = cluster.check("squeue", "--noheader", f"--jobs={run.job_id}", "--format=%N").strip()
            lost = cluster.check("scontrol", "show", "hostnames", nodes).split()[-1]
            cluster.kill_node(lost)
            run.wait_until(lambda: len(run.attempts()) > 1, "a second attempt")
            assert_same_end(run, undisturbed)
    finally:
        cluster.start_node(lost)
        wait_until(
            lambda: "idle" in cluster.check("sinfo", "--noheader", f"--nodes={lost}", "--format=%T"),
            lambda: f"{lost} to be idle again",
        )


def test_a_cancelled_run_is_not_requeued(cluster: Cluster) -> None:
    run = submit(cluster)
    run.wait_for_step(25)
    cluster.check("scancel", run.job_id)

    wait_until(lambda: not run.ranks(), lambda: f"the end of ranks {run.ranks()}", patience_s=40)
    run.wait_for_state("cancelled")
    assert len(run.attempts()) == 1


def test_where_requeueing_is_forbidden_the_message_says_how_to_go_on(cluster: Cluster, undisturbed: ClusterRun) -> None:
    run = submit(cluster)
    with cancelled_at_end(run):
        cluster.check("scontrol", "update", f"jobid={run.job_id}", "requeue=0")
        run.wait_for_step(25)
        run.send("USR2")
        run.wait_for_state("failed")
        assert "resume=" in run.status_text()
        again = resume(run)
        with cancelled_at_end(again):
            assert_same_end(again, undisturbed)


def test_a_pending_run_shows_the_reason_of_slurm(cluster: Cluster) -> None:
    blocker = cluster.check("sbatch", "--parsable", "--nodes=3", "--exclusive", "--wrap=sleep 600",
                            "--output=/dev/null").strip()  # fmt: skip
    run = submit(cluster)
    try:
        assert run.status() == ("queued", 3)
        run.wait_until(lambda: "Resources" in run.status_text() or "Priority" in run.status_text(), "the reason")
    finally:
        cluster.check("scancel", blocker, run.job_id)
    run.wait_for_state("cancelled")


def test_waiting_returns_the_exit_status_of_the_run(cluster: Cluster) -> None:
    argv = ["python", "-m", "rechpc.submit", *ON_CLUSTER, *SMALL, "wait=true", "trainer.max_steps=20"]
    done = cluster.run(*argv, timeout_s=240)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "test AUC" in done.stdout
