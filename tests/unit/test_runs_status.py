"""rechpc.status for many runs, its logs, and how it stops runs; run directories are made by hand."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rechpc import status
from rechpc.config import Launcher
from rechpc.host import slurm
from rechpc.rundir import RunDir, write_json


@pytest.fixture
def command(monkeypatch, capfdbinary):
    """Run rechpc.status in this process: exit status, stdout, stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["status", *map(str, arguments)])
        code = status.main()
        out, err = capfdbinary.readouterr()
        return code, out.decode(), err.decode()

    return run


@pytest.fixture
def sweep(tmp_path):
    """A sweep whose runs are made one by one."""
    write_json(tmp_path / "sweep.json", {"objective": "test_ne"})

    def add(name, *, launcher=Launcher.slurm, job_id="101_0", pid=None, **result):
        run = RunDir.create(tmp_path.parent, tmp_path.name, name)
        run.config_path.write_text("name: x\n")
        job = slurm.Job(
            launcher=launcher, job_id=job_id, host=socket.gethostname(), pid=pid, path=str(run.path), submitted_at_s=1.0
        )
        slurm.record(run, job, [f"seed={name[-1]}", "trainer.epochs=1", f"sweep.max_parallel={name[-1]}"])
        if result:
            write_json(run.result_path, {"state": "finished", "step": 9, **result})
        return run

    return add


@pytest.fixture
def live(sweep):
    """A local run with a process that looks like submitit's controller."""
    run = sweep("r1", launcher=Launcher.local, job_id="0")
    code = "import time; time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, str(run.submission_path)])
    job = slurm.newest_job(run)
    write_json(run.job_path, {"submissions": [{**_facts(job), "pid": process.pid, "job_id": str(process.pid)}]})
    yield run, process
    process.kill()
    process.wait()


def _facts(job):
    return {name: getattr(job, name) for name in job.__slots__} | {"overrides": []}


def test_a_sweep_is_one_table_with_the_best_first_and_the_swept_keys(command, sweep, commands, tmp_path):
    sweep("r1", test_ne=0.9, test_auc=0.8)
    sweep("r2", test_ne=0.8, test_auc=0.7)
    waiting = sweep("r3", job_id="101_2")
    commands(squeue='echo "101_2|PENDING|Resources"', sacct="exit 1")
    code, out, _ = command(tmp_path)
    assert code == 3
    lines = [line.split() for line in out.splitlines()]
    assert lines[0][:4] == ["run", "state", "seed", "test_ne"]
    assert [line[:3] for line in lines[1:4]] == [
        ["r2", "finished", "2"],
        ["r1", "finished", "1"],
        ["r3", "queued", "3"],
    ]
    assert lines[3][-1] == "Resources"
    assert out.splitlines()[-1] == "3 runs: 2 finished, 1 queued"
    assert waiting.attempts() == []


@pytest.mark.parametrize(("said", "code"), [("FAILED", 1), ("RUNNING", 3), ("CANCELLED", 3)])
def test_the_exit_status_of_several_runs_is_the_worst(command, sweep, commands, tmp_path, said, code):
    sweep("r1", test_ne=0.9)
    sweep("r2", job_id="101_1")
    commands(squeue=f'echo "101_1|{said}|None"', sacct="exit 1")
    assert command(tmp_path)[0] == code


def test_all_finished_is_exit_status_0(command, sweep, tmp_path):
    sweep("r1", test_ne=0.9)
    sweep("r2", test_ne=0.9)
    assert command(tmp_path)[0] == 0


def test_a_directory_of_runs_shows_those_of_sweeps_and_single_ones(command, sweep, tmp_path):
    sweep("r1", test_ne=0.9)
    single = RunDir.create(tmp_path.parent, "other", "single")
    single.config_path.write_text("name: y\n")
    _, out, _ = command(tmp_path.parent)
    assert f"{tmp_path.name}/r1 " in out
    assert "other/single " in out


def test_json_tells_everything(command, sweep, tmp_path):
    sweep("r1", test_ne=0.9)
    sweep("r2", test_ne=0.7)
    facts = json.loads(command(tmp_path, "--json")[1])
    assert [(f["state"], f["objective"], f["swept"]["seed"]) for f in facts] == [
        ("finished", 0.7, "2"),
        ("finished", 0.9, "1"),
    ]


def test_watching_ends_when_all_have_ended(command, sweep, commands, tmp_path, monkeypatch):
    monkeypatch.setattr(status, "_WATCH_S", 0.0)
    sweep("r1", job_id="101_1")
    commands(squeue=f'[ -e {tmp_path}/seen ] && s=FAILED || s=RUNNING; touch {tmp_path}/seen; echo "101_1|$s|None"')
    code, out, _ = command(tmp_path, "--watch")
    assert code == 1
    assert [line for line in out.splitlines() if line.startswith("1 runs")] == [
        "1 runs: 1 starting",
        "1 runs: 1 failed",
    ]


@pytest.mark.parametrize(("log", "state", "code"), [(False, "cancelled", 3), (True, "lost", 1)])
def test_an_element_that_slurm_has_forgotten_was_cancelled_unless_it_had_begun(
    command, sweep, commands, tmp_path, log, state, code
):
    run = sweep("r1", job_id="101_1")
    if log:
        run.submission_path.mkdir()
        (run.submission_path / "101_1_0_log.err").touch()
    commands(squeue="echo 'JOBID|STATE|REASON'", sacct="exit 1")
    for path in (tmp_path, run.path):
        status_, out, _ = command(path)
        assert status_ == code
        assert state in out


# Logs


def test_logs_are_shown_across_attempts_byte_by_byte(command, sweep):
    run = sweep("r1", test_ne=0.9)
    for name, text in (("101_0.0", b"first \xff\n"), ("101_0.1", "second \u00e9\n".encode())):
        attempt = run.start_attempt(name)
        attempt.rank_log_path(1).write_bytes(text)
    done = subprocess.run(
        [sys.executable, "-m", "rechpc.status", str(run.path), "--logs", "--rank", "1"],
        capture_output=True, timeout=60, cwd=Path(status.__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"==> attempt 101_0.0 <==\nfirst \xff\n==> attempt 101_0.1 <==\nsecond \xc3\xa9\n"


def test_a_rank_that_has_no_log_is_a_line(command, sweep):
    run = sweep("r1", test_ne=0.9)
    code, _, err = command(run.path, "--logs", "--rank", "9")
    assert (code, err.count("\n")) == (2, 1)
    assert "no log of rank 9" in err


# Stopping


@pytest.mark.parametrize(("verb", "reason"), [("--drain", "drain"), ("--requeue", "requeue")])
def test_a_running_element_is_told_through_its_stop_file(command, sweep, commands, tmp_path, verb, reason):
    run = sweep("r1", job_id="101_1")
    attempt = run.start_attempt("101_1.0")
    commands(squeue='echo "101_1|RUNNING|None"; echo "101_2|RUNNING|None"', scancel="exit 9", scontrol="")
    code, out, _ = command(tmp_path, verb)
    assert (code, attempt.stop_path.read_text()) == (0, reason)
    assert "saves, then " in out


@pytest.mark.parametrize(("verb", "state"), [("--cancel", "RUNNING"), ("--cancel", "PENDING"), ("--drain", "PENDING")])
def test_what_has_nothing_to_save_or_shall_not_is_taken_from_slurm(command, sweep, commands, tmp_path, verb, state):
    sweep("r1", job_id="101_1").start_attempt("101_1.0")
    sweep("r2", test_ne=0.9)
    commands(squeue=f'echo "101_1|{state}|None"', scancel=f'echo "$1" >> {tmp_path}/cancelled', scontrol="")
    assert command(tmp_path, verb)[0] == 0
    assert (tmp_path / "cancelled").read_text() == "101_1\n"


def test_a_local_run_is_cancelled_by_the_death_of_its_controller(command, live):
    run, process = live
    assert command(run.path, "--cancel")[0] == 0
    assert process.wait(timeout=30) == -signal.SIGKILL


def test_a_local_run_is_not_requeued(command, live):
    run, _ = live
    code, _, err = command(run.path, "--requeue")
    assert code == 1
    assert "a local run is not requeued; stop it with --drain" in err


def test_what_has_ended_is_left_alone(command, sweep, tmp_path):
    sweep("r1", test_ne=0.9)
    code, out, _ = command(tmp_path, "--drain")
    assert code == 0
    assert "finished, left alone" in out


def test_a_refusal_of_slurm_is_told_and_the_others_are_still_stopped(command, sweep, commands, tmp_path):
    sweep("r1", job_id="101_1")
    sweep("r2", job_id="101_2")
    body = f'[ "$1" = 101_1 ] && {{ echo "no way" >&2; exit 1; }}; echo "$1" >> {tmp_path}/cancelled'
    commands(squeue='echo "101_1|RUNNING|None"; echo "101_2|RUNNING|None"', scancel=body, scontrol="")
    code, _, err = command(tmp_path, "--cancel")
    assert code == 1
    assert "no way" in err
    assert (tmp_path / "cancelled").read_text() == "101_2\n"


def test_times_are_shown_only_while_they_pass(command, sweep, commands, tmp_path):
    run = sweep("r1", job_id="101_1")
    attempt = run.start_attempt("101_1.0")
    beat = {"phase": "training", "step": 5, "total_steps": 50, "seconds_left": 90.0, "time_s": time.time()}
    write_json(attempt.heartbeat_path, {**beat, "val_auc": 0.71234})
    commands(squeue='echo "101_1|RUNNING|None"', sacct="exit 1")
    text = command(tmp_path)[1]
    assert "1 min 30 s" in text
    assert re.search(r"val AUC +.*\n.* 0.7123 ", text)


EXPECTED = ["expected.auc=0.75", "expected.source=a paper"]


@pytest.mark.parametrize(
    ("overrides", "aucs", "said"),
    [
        (EXPECTED, [0.7, 0.76, 0.755], "AUC 0.75 (a paper): reached by step 200, the best is 0.76000"),
        (EXPECTED, [0.7, 0.74], "AUC 0.75 (a paper): not reached, the best is 0.74000"),
        (EXPECTED, [], "AUC 0.75 (a paper): not reached, there is no AUC"),
        ([], [0.7], None),
    ],
)
def test_a_finished_run_says_when_it_reached_what_its_configuration_expects(make_run, command, overrides, aucs, said):
    run = make_run(*overrides)
    records = [{"attempt": 0, "step": 100 * i, "val_auc": auc} for i, auc in enumerate(aucs, 1)]
    run.metrics_path.write_text("".join(json.dumps(r) + "\n" for r in [{"attempt": 0, "step": 0}, *records]))
    write_json(run.result_path, {"state": "finished", "step": 300, "test_auc": 0.7})

    code, out, _ = command(run.path)

    assert code == 0
    assert [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("expected")] == [said] * bool(
        said
    )


def test_a_finished_run_of_another_version_shows_without_what_was_expected(make_run, command):
    run = make_run()
    run.config_path.write_text("no_such_key: 1\n")
    write_json(run.result_path, {"state": "finished", "step": 300, "test_auc": 0.7})

    code, out, _ = command(run.path)

    assert code == 0
    assert "expected" not in out
