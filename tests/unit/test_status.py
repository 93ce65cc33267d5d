"""rechpc.status in every state, from run directories made by hand."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rechpc import state as status
from rechpc.config import Launcher
from rechpc.host import slurm
from rechpc.rundir import RunDir, write_json
from rechpc.state import State

DEAD_PID = 2**22 + 1  # larger than Linux gives out


@pytest.fixture
def run(tmp_path):
    run = RunDir.create(tmp_path, "x")
    run.config_path.write_text("name: x\n")
    return run


@pytest.fixture
def live_pid(run):
    """A process that looks like submitit's controller of this run."""
    code = "import time; time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, str(run.submission_path)])
    yield process.pid
    process.kill()
    process.wait()


def submitted(run, *, pid=DEAD_PID, launcher=Launcher.local, at_s=None):
    job = slurm.Job(
        launcher=launcher,
        job_id=str(pid),
        host=socket.gethostname(),
        pid=pid if launcher is Launcher.local else None,
        path=str(run.path),
        submitted_at_s=time.time() - 5 if at_s is None else at_s,
    )
    slurm.record(run, job, [])


def began(run, name, **heartbeat):
    attempt = run.start_attempt(name)
    if heartbeat:
        write_json(attempt.heartbeat_path, {"time_s": time.time(), **heartbeat})
    return attempt


TRAINING = {"phase": "training", "step": 120, "total_steps": 400, "samples_per_s": 31_200.4, "loss": 0.512, "ne": 0.884}
TRAINING |= {"seconds_left": 12.3}


def test_a_run_that_waits_for_data_says_so(run):
    began(run, "1.0", **TRAINING)
    assert "waiting" not in status.progress(status.read_status(run))
    began(run, "2.0", **TRAINING, data_wait_share=0.347)
    assert "31,200 samples/s  35% of the time waiting for data  loss" in status.progress(status.read_status(run))


def test_a_submitted_run_is_queued_until_its_attempt_begins(run, live_pid):
    submitted(run, pid=live_pid)
    assert status.read_status(run).state == State.queued
    began(run, f"{live_pid}.0")
    assert status.read_status(run).state == State.starting
    for phase in ("checking data", "planning", "restoring"):
        run.attempt(f"{live_pid}.0").heartbeat_path.write_text(f'{{"time_s": 1, "phase": "{phase}"}}')
        assert status.read_status(run).state == State.starting


def test_a_running_run_shows_its_progress(run, live_pid):
    submitted(run, pid=live_pid)
    began(run, f"{live_pid}.0", **TRAINING)
    run.checkpoint_path(100).mkdir()
    (run.checkpoints_path / "step-000000120.tmp").mkdir()
    now = status.read_status(run)
    assert now.state == State.running
    assert status.progress(now) == "step 120/400  31,200 samples/s  loss 0.5120  NE 0.8840  12 s left"
    assert status.render(now).splitlines()[1:] == [
        "state      running",
        "attempt    1",
        f"job        {live_pid} (local, from {socket.gethostname()})",
        "progress   step 120/400  31,200 samples/s  loss 0.5120  NE 0.8840  12 s left",
        "checkpoint step 100, 0 s old",
    ]


def test_a_silent_run_is_still_running_but_said_to_be_silent(run, live_pid):
    submitted(run, pid=live_pid)
    began(run, f"{live_pid}.0", phase="saving", step=7, time_s=time.time() - 200)
    now = status.read_status(run)
    assert now.state == State.running
    assert "warning    last heartbeat 3 min 20 s ago" in status.render(now)


@pytest.mark.parametrize("outcome", ["drained", "requeued"])
def test_a_stopped_run_says_how_to_go_on(run, outcome):
    submitted(run)
    attempt = began(run, f"{DEAD_PID}.0", **TRAINING)
    write_json(attempt.outcome_path, {"outcome": outcome, "step": 121, "checkpoint_step": 121, "error": None})
    now = status.read_status(run)
    assert (now.state, now.step) == (State(outcome), 121)
    assert f"-m rechpc.submit resume={run.path}" in status.render(now)


def test_a_failed_run_shows_the_error_of_the_rank_that_failed_first(run):
    submitted(run)
    attempt = began(run, f"{DEAD_PID}.0", **TRAINING)
    write_json(attempt.error_path(0), {"rank": 0, "time_s": 20.0, "error": "peer closed the connection"})
    write_json(attempt.error_path(1), {"rank": 1, "time_s": 10.0, "error": "DataError: id\n7"})
    attempt.error_path(2).write_text('{"rank": 2, "ti')
    write_json(attempt.outcome_path, {"outcome": "failed", "step": 3, "checkpoint_step": None, "error": "rank 0 died"})
    now = status.read_status(run)
    assert (now.state, now.error, now.log_path) == (State.failed, "rank 1: DataError: id 7", attempt.rank_log_path(1))


def test_a_failed_run_whose_ranks_wrote_nothing_shows_the_error_of_its_outcome(run):
    submitted(run)
    attempt = began(run, f"{DEAD_PID}.0")
    write_json(attempt.outcome_path, {"outcome": "failed", "step": 0, "checkpoint_step": None, "error": "no image"})
    now = status.read_status(run)
    assert (now.state, now.error, now.log_path) == (State.failed, "no image", attempt.node_log_path(0))


def test_a_run_whose_process_is_gone_without_an_outcome_is_lost(run):
    submitted(run)
    assert "before its attempt began" in (status.read_status(run).error or "")
    began(run, f"{DEAD_PID}.0", **TRAINING)
    now = status.read_status(run)
    assert now.state == State.lost
    assert "processes are gone" in (now.error or "")


def test_a_resumed_run_is_judged_by_its_newest_submission(run, live_pid):
    submitted(run)
    attempt = began(run, f"{DEAD_PID}.0", **TRAINING)
    write_json(attempt.outcome_path, {"outcome": "drained", "step": 3, "checkpoint_step": 3, "error": None})
    submitted(run, pid=live_pid, at_s=time.time() + 0.01)
    assert status.read_status(run).state == State.queued
    time.sleep(0.02)
    began(run, f"{live_pid}.0", **TRAINING)
    now = status.read_status(run)
    assert (now.state, now.num_attempts) == (State.running, 2)


def test_on_slurm_the_heartbeat_decides(run):
    submitted(run, pid=42, launcher=Launcher.slurm)
    assert status.read_status(run).state == State.queued
    attempt = began(run, "42.0")
    assert status.read_status(run).state == State.starting
    write_json(attempt.heartbeat_path, {**TRAINING, "time_s": time.time()})
    assert status.read_status(run).state == State.running
    write_json(attempt.heartbeat_path, {**TRAINING, "time_s": time.time() - 3 * 3600})
    now = status.read_status(run)
    assert now.state == State.unknown
    assert "state      unknown: last heartbeat 3 h ago" in status.render(now)


@pytest.fixture
def says(run, monkeypatch):
    """A job of Slurm's, of which it says this."""

    def set_(name, reason=None):
        monkeypatch.setattr(slurm, "state", lambda job: slurm.JobState(name=name, reason=reason))

    submitted(run, pid=42, launcher=Launcher.slurm)
    return set_


def test_a_job_that_waits_for_the_first_time_is_queued_and_says_why(run, says):
    says("PENDING", "Resources")
    now = status.read_status(run)
    assert (now.state, now.reason) == (State.queued, "Resources")
    assert "reason     Resources" in status.render(now)


@pytest.mark.parametrize(
    ("verdict", "state"),
    [({"again": True}, State.requeued), ({"again": False}, State.preempted), ({}, State.preempted)],
)
def test_a_job_that_waits_once_more_was_requeued_by_the_run_or_by_slurm(run, says, verdict, state):
    says("PENDING", "BeginTime")
    attempt = began(run, "42.0", **TRAINING)
    if verdict:
        write_json(attempt.verdict_path, {**verdict, "failed": False, "reason": "x"})
    now = status.read_status(run)
    assert (now.state, now.reason, now.error) == (state, "BeginTime", None)
    assert "continue" not in status.render(now)


def test_a_job_that_runs_is_starting_until_its_attempt_has_begun(run, says):
    says("RUNNING")
    assert status.read_status(run).state == State.starting
    attempt = began(run, "42.0", **TRAINING)
    assert status.read_status(run).state == State.running
    write_json(attempt.outcome_path, {"outcome": "requeued", "step": 3, "checkpoint_step": 3, "error": None})
    assert status.read_status(run).state == State.starting


def test_a_cancelled_job_says_how_to_go_on(run, says):
    says("CANCELLED")
    began(run, "42.0", **TRAINING)
    now = status.read_status(run)
    assert now.state == State.cancelled
    assert f"-m rechpc.submit resume={run.path}" in status.render(now)


def test_a_failed_job_gives_the_reason_of_the_verdict(run, says):
    says("FAILED", "NonZeroExitCode")
    assert status.read_status(run).error == "the job ended before its attempt began"
    attempt = began(run, "42.0", **TRAINING)
    write_json(attempt.verdict_path, {"again": False, "failed": True, "reason": "given up: 3 crashes"})
    now = status.read_status(run)
    assert (now.state, now.error, now.log_path) == (State.failed, "given up: 3 crashes", attempt.node_log_path(0))


def test_a_job_that_ran_out_of_time_says_which_keys_to_change(run, says):
    says("TIMEOUT", "TimeLimit")
    began(run, "42.0", **TRAINING)
    now = status.read_status(run)
    assert now.state == State.failed
    assert "raise job.time_limit_min, or job.signal_lead_s" in (now.error or "")


def test_a_job_that_completed_without_a_result_was_drained_or_failed(run, says):
    says("COMPLETED")
    attempt = began(run, "42.0", **TRAINING)
    assert status.read_status(run).state == State.failed
    write_json(attempt.outcome_path, {"outcome": "drained", "step": 3, "checkpoint_step": 3, "error": None})
    assert status.read_status(run).state == State.drained


def test_an_attempt_in_another_image_than_the_one_before_says_so(run):
    attempt = began(run, "by-hand-1.0", **TRAINING)
    write_json(attempt.image_path, {"path": "/i.sif", "size_bytes": 1, "sha256": "b", "changed_from": "a"})
    assert "image      not the one before, which had sha256 a" in status.render(status.read_status(run))


def test_a_copy_of_a_running_run_is_not_taken_for_a_lost_one(run, tmp_path):
    submitted(run)
    began(run, f"{DEAD_PID}.0", **TRAINING)
    copy = shutil.copytree(run.path, tmp_path / "copy")
    assert status.read_status(RunDir(copy)).state == State.running


def test_an_attempt_that_was_started_by_hand_counts_without_a_job(run):
    began(run, "by-hand-1.0", **TRAINING)
    assert status.read_status(run).state == State.running


def test_a_finished_run_shows_its_result(run):
    submitted(run)
    began(run, f"{DEAD_PID}.0", phase="done", step=400, total_steps=400)
    result = {"state": "finished", "step": 400, "test_auc": 0.79124, "optimal_auc": 0.8103, "test_ne": 0.842}
    write_json(run.result_path, {**result, "optimal_ne": 0.821, "samples_per_s": 31_200.4, "world_size": 2})
    now = status.read_status(run)
    line = "test AUC 0.7912 of 0.8103 possible, NE 0.8420 of 0.8210 possible, 31,200 samples/s on 2 ranks"
    assert now.state == State.finished
    assert f"result     {line}" in status.render(now)


def test_an_undefined_auc_is_said_to_be_undefined():
    result = {"test_auc": None, "test_auc_undefined": "only one class", "test_ne": None, "samples_per_s": None}
    assert status.result_line(result) == "test AUC undefined (only one class)"


def test_half_written_files_do_not_stop_the_status(run):
    for path in (run.job_path, run.result_path):
        path.write_text('{"a": ')
    attempt = run.start_attempt("1.0")
    for path in (attempt.heartbeat_path, attempt.outcome_path, attempt.facts_path):
        path.write_text("{")
    assert "state      unknown: no heartbeat" in status.render(status.read_status(run))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.6, "1 min"), (125, "2 min 5 s"), (3 * 3600, "3 h"), (90_000, "1 d 1 h")]
)
def test_durations(seconds, text):
    assert status.duration(seconds) == text


@pytest.mark.parametrize(("outcome", "code"), [("finished", 0), ("failed", 1), ("drained", 3)])
def test_exit_status_of_the_command(run, outcome, code):
    submitted(run)
    attempt = began(run, f"{DEAD_PID}.0", **TRAINING)
    write_json(attempt.outcome_path, {"outcome": outcome, "step": 1, "checkpoint_step": 1, "error": "x"})
    before = sorted(run.path.rglob("*"))
    for path in (run.path, run.attempts_path, attempt.path):
        path.chmod(0o500)
    done = command(run.path)
    for path in (run.path, run.attempts_path, attempt.path):
        path.chmod(0o700)
    assert (done.returncode, done.stderr) == (code, "")
    assert sorted(run.path.rglob("*")) == before


def test_a_path_that_is_no_run_is_one_line_and_exit_status_2(tmp_path):
    done = command(tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"{tmp_path}: not a run directory; expected one with a config.yaml in it, a sweep, or a directory of runs"
    ]


def command(path):
    argv = [sys.executable, "-m", "rechpc.status", str(path)]
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=30, cwd=Path(status.__file__).parents[1], env=os.environ
    )
