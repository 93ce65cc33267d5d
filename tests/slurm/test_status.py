"""Status and waiting: what Slurm says of a job, and what is left to say when Slurm has forgotten it."""

import pytest

from tests.cluster.cluster import Cluster
from tests.slurm.runs import ON_CLUSTER, SMALL, ClusterRun, cancelled_at_end, submit

pytestmark = pytest.mark.timeout(900)  # Slurm takes its time to forget a job
CRASH = ("optimizer=sgd", "optimizer.learning_rate=1e30", "checkpoint.every=0")


def test_a_pending_run_shows_its_own_reason_among_foreign_jobs_and_arrays(cluster: Cluster) -> None:
    blocker = ["sbatch", "--parsable", "--nodes=1", "--exclusive", "--wrap=sleep 600", "--output=/dev/null"]
    jobs = [cluster.check(*blocker, "--array=1-3").strip(), cluster.check(*blocker, user="root").strip()]
    run = submit(cluster)
    try:
        assert run.status() == ("queued", 3)
        run.wait_until(lambda: "Resources" in run.status_text() or "Priority" in run.status_text(), "the reason")
    finally:
        cluster.check("scancel", *jobs, run.job_id, user="root")
    run.wait_for_state("cancelled")
    assert run.attempts() == []


def test_a_held_run_shows_who_holds_it(cluster: Cluster) -> None:
    run = submit(cluster, "+job.sbatch.hold=true")
    with cancelled_at_end(run):
        run.wait_until(lambda: "JobHeldUser" in run.status_text(), "the reason")


def test_waiting_returns_the_exit_status_of_the_run(cluster: Cluster) -> None:
    argv = ["python", "-m", "rechpc.submit", *ON_CLUSTER, *SMALL, "wait=true"]
    done = cluster.run(*argv, "trainer.max_steps=20", timeout_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test AUC" in done.stdout

    done = cluster.run(*argv, *CRASH, timeout_s=240)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "loss is nan at step" in done.stdout + done.stderr


def test_with_accounting_a_run_has_its_state_when_the_queue_has_forgotten_it(accounting_cluster: Cluster) -> None:
    def forgotten(run: ClusterRun) -> bool:
        return accounting_cluster.run("scontrol", "show", "job", run.job_id).returncode != 0

    held = submit(accounting_cluster, "job.account=research", "+job.sbatch.hold=true")
    crashing, finishing = submit(accounting_cluster, *CRASH), submit(accounting_cluster, "trainer.max_steps=20")
    with cancelled_at_end(held, crashing, finishing):
        assert held.status() == ("queued", 3)
        accounting_cluster.check("scancel", held.job_id)
        for run, state in ((held, ("cancelled", 3)), (crashing, ("failed", 1)), (finishing, ("finished", 0))):
            run.wait_for_state(state[0])
            run.wait_until(lambda: forgotten(run), "Slurm to forget it")  # noqa: B023
            assert run.status() == state


def test_where_the_site_requeues_no_job_by_itself_a_drained_run_goes_on_all_the_same(
    accounting_cluster: Cluster,
) -> None:
    assert "JobRequeue              = 0" in accounting_cluster.check("scontrol", "show", "config")
    run = submit(accounting_cluster)
    with cancelled_at_end(run):
        run.wait_for_step(25)
        run.send("USR2")
        run.wait_for_state("finished")
    assert [outcome for outcome, *_ in run.outcomes()] == ["requeued", "finished"]
