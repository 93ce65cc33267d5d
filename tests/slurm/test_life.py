"""The life of a run on a real Slurm with a real Apptainer: whatever stops it, it ends with the same model."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.cluster import IMAGE, SCRATCH, Cluster
from tests.slurm.runs import (
    SMALL,
    STEPS,
    TRAIN_ROWS,
    ClusterRun,
    assert_same_end,
    cancelled_at_end,
    logged_steps,
    resume,
    submit,
    tensors,
    wait_until,
)

pytestmark = pytest.mark.timeout(900)  # a run that waits for its time limits takes minutes


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


@pytest.mark.parametrize("moment", ["training", "twice in a row", "saving"])
def test_a_drained_run_is_saved_once_requeued_and_continued(
    cluster: Cluster, undisturbed: ClusterRun, moment: str
) -> None:
    run = submit(cluster)
    with cancelled_at_end(run):
        if moment == "saving":
            run.wait_until(lambda: any((run.path / "checkpoints").glob("*.tmp")), "a save that is under way")
        else:
            run.wait_for_step(37)
        run.send("USR2")
        if moment == "twice in a row":
            run.send("USR2")
        run.wait_for_state("requeued")
        assert_same_end(run, undisturbed)

    first, *later = run.attempts()
    outcome, step, saved = run.outcomes()[0]
    assert outcome == "requeued"
    assert saved == step > 0
    assert [attempt.name for attempt in (first, *later)] == [f"{run.job_id}.0", f"{run.job_id}.1"]


def test_a_run_drained_before_its_first_step_has_nothing_to_save_and_starts_again(
    cluster: Cluster, undisturbed: ClusterRun
) -> None:
    run = submit(cluster)
    with cancelled_at_end(run):
        run.wait_until(lambda: bool(run.ranks()), "a rank, which imports torch for seconds")
        run.send("USR2")
        assert_same_end(run, undisturbed)
    assert run.outcomes()[0] == ("requeued", 0, None)


def test_a_run_drained_while_it_restores_goes_on_from_the_same_checkpoint(cluster: Cluster) -> None:
    # A checkpoint of half a GB takes a moment to read.
    large = ["data.sparse=[{name: user, rows: 4_000_000}]", "checkpoint.every=0", "trainer.max_steps=40"]
    run = submit(cluster, *large)
    with cancelled_at_end(run):
        run.wait_for_step(5)
        run.send("USR2")
        run.wait_until(lambda: len(run.attempts()) > 1 and run.heartbeat().get("phase") == "restoring", "restoring")
        run.send("USR2")
        run.wait_for_state("finished")
    (_, step, saved), second, *rest = run.outcomes()
    assert step == saved > 0
    assert second == ("requeued", step, step)
    assert len(rest) == 1
    reference = submit(cluster, *large)
    with cancelled_at_end(reference):
        reference.wait_for_state("finished")
    assert tensors(run.path) == tensors(reference.path)


def test_a_run_longer_than_its_time_limit_goes_through_several_attempts_by_itself(
    cluster: Cluster, undisturbed: ClusterRun
) -> None:
    # Slurm looks at time limits every 30 s, so it asks 30 to 60 s after the start. With training for 200 s on this
    # machine, two requeues are sure; then the rest may run in one piece.
    epochs = math.ceil(200 * undisturbed.result()["samples_per_s"] / TRAIN_ROWS)
    run = submit(cluster, "job.time_limit_min=2", "job.signal_lead_s=60", f"trainer.epochs={epochs}")
    with cancelled_at_end(run):
        run.wait_for_step(1, attempt=2)
        cluster.check("scontrol", "update", f"jobid={run.job_id}", "timelimit=60", user="root")
        run.wait_until(lambda: (run.path / "result.json").exists(), "the end", patience_s=600)
        run.wait_for_state("finished")
    *stopped, (last, step, _) = run.outcomes()
    assert len(stopped) >= 2
    assert {outcome for outcome, *_ in stopped} == {"requeued"}
    assert (last, step) == ("finished", epochs * STEPS)
    assert logged_steps(run.path) == list(range(10, epochs * STEPS + 1, 10))


def test_a_run_that_is_stopped_twice_before_it_saved_anything_fails_and_says_so(cluster: Cluster) -> None:
    run = submit(cluster)
    with cancelled_at_end(run):
        for attempt in range(2):
            run.wait_until(lambda: len(run.attempts()) > attempt and bool(run.ranks()), f"attempt {attempt}")  # noqa: B023
            run.send("USR2")
        run.wait_for_state("failed")
    assert "2 attempts in a row committed no checkpoint before they had to stop" in run.status_text()
    assert "raise job.time_limit_min" in run.status_text()
    assert len(run.attempts()) == 2
    assert "JobState=FAILED" in cluster.check("scontrol", "show", "job", "--oneliner", run.job_id)


def test_a_run_that_cannot_save_before_its_time_limit_says_so(cluster: Cluster) -> None:
    run = submit(cluster, "trainer.epochs=100", "checkpoint.every=0")
    with cancelled_at_end(run):
        run.wait_for_step(1)
        run.kill_rank(1, signal.SIGSTOP)
        # Lowered only now, so that a slow machine reaches its first step too.
        cluster.check("scontrol", "update", f"JobId={run.job_id}", "TimeLimit=1", user="root")
        run.wait_for_state("failed")
    assert "JobState=TIMEOUT" in cluster.check("scontrol", "show", "job", "--oneliner", run.job_id)
    assert "its time limit came before it had saved; raise job.time_limit_min" in run.status_text()


@pytest.mark.parametrize("grace_s", [20, 0])
def test_a_preempted_run_goes_on(cluster: Cluster, undisturbed: ClusterRun, grace_s: int) -> None:
    cluster.check("scontrol", "update", "partition=low", f"GraceTime={grace_s}", user="root")
    run = submit(cluster)
    with cancelled_at_end(run):
        run.wait_for_step(30)
        wrap = ["--wrap=sleep 5", "--output=/dev/null"]
        cluster.check("sbatch", "--partition=high", "--nodes=3", "--exclusive", *wrap)
        run.wait_for_state("requeued" if grace_s else "preempted")  # with time to save, the run asks itself
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


def test_a_crash_that_comes_again_at_the_same_step_is_given_up(cluster: Cluster) -> None:
    run = submit(cluster, "optimizer=sgd", "optimizer.learning_rate=1e12", "checkpoint.every=1")
    with cancelled_at_end(run):
        run.wait_for_state("failed")

    assert [outcome for outcome, *_ in run.outcomes()] == ["failed", "failed"]
    assert "loss is nan at step 2; the last checkpoint is of step 1" in run.status_text()
    assert "given up" in run.verdicts()


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


def test_a_run_resumed_in_another_image_says_so(cluster: Cluster) -> None:
    image = f"{SCRATCH}/copy.sif"
    cluster.check("cp", IMAGE, image, timeout_s=120)
    run = submit(cluster, f"container.image={image}", "trainer.max_steps=60")
    with cancelled_at_end(run):
        run.wait_for_step(25)
        cluster.check("scancel", run.job_id)
        run.wait_for_state("cancelled")
        assert "image" not in run.status_text()
        cluster.check("sh", "-c", f"printf x >>{image}")
        again = resume(run)
        with cancelled_at_end(again):
            again.wait_for_state("finished")
            again.wait_until(lambda: "not the one before" in run.status_text(), "the word on the image")


def test_a_run_submitted_from_inside_a_job_is_not_bound_to_it(cluster: Cluster) -> None:
    run = submit(cluster, "trainer.max_steps=20", prefix=("srun", "--partition=high", "--time=5", "--ntasks=1"))
    with cancelled_at_end(run):
        # Now, for at its end Slurm counts only those of its nodes that still clean up.
        script = cluster.check("scontrol", "show", "job", "--oneliner", run.job_id)
        run.wait_for_state("finished")
    assert "TimeLimit=1-00:00:00" in script
    assert "NumNodes=2" in script
