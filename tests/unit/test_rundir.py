"""The run directory: what is written is whole, and what is read is what counts."""

import json
import re
import stat
import time
from pathlib import Path

import pytest

from rechpc.errors import ConfigError
from rechpc.rundir import AttemptDir, RunDir, StopReason, read_json, write_json, write_text


@pytest.fixture
def run(tmp_path) -> RunDir:
    return RunDir.create(tmp_path, "dlrm")


def test_a_new_run_is_private_and_never_an_existing_one(tmp_path):
    runs = [RunDir.create(tmp_path / "runs", "dlrm") for _ in range(20)]
    assert len({run.path for run in runs}) == 20
    for run in runs:
        assert run.path.parent == tmp_path / "runs" / "dlrm"
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert runs[0].attempts() == runs[0].committed_steps() == runs[0].metrics() == []


def test_a_root_that_is_no_directory_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"runs_root=.*file: cannot make .*; set runs_root="):
        RunDir.create(tmp_path / "file", "dlrm")


def test_a_root_may_be_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunDir.create(Path("~/runs"), "dlrm").path.is_relative_to(tmp_path / "runs")


def test_a_directory_without_a_config_is_no_run(run):
    with pytest.raises(ConfigError, match=re.escape("not a run directory; expected one with a config.yaml in it")):
        RunDir.open(run.path)
    write_text(run.config_path, "")
    assert RunDir.open(str(run.path)) == run


# Files


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "file.json"
    for value in ({"a": 1}, {"b": [1, 2]}):
        write_json(path, value)
        assert read_json(path) == value
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}


def test_a_file_that_is_not_there_reads_as_none(tmp_path):
    assert read_json(tmp_path / "none.json") is None


# Checkpoints


def test_committed_steps_are_the_final_names_newest_first(run):
    for name in ("step-000000010", "step-000000200", "step-000000030.tmp", "step-x", "other"):
        (run.checkpoints_path / name).mkdir()
    assert run.committed_steps() == [200, 10]
    assert run.checkpoint_path(10).is_dir()


# Attempts


def test_attempts_are_numbered_in_the_order_of_their_start(run):
    for name in ("9.0", "10.0", "10.1"):
        run.start_attempt(name)
    run.attempt("11.0").path.mkdir()  # made, but not started
    assert [(a.name, a.ordinal) for a in run.attempts()] == [("9.0", 0), ("10.0", 1), ("10.1", 2)]


def test_the_first_request_to_stop_counts(run):
    attempt = run.start_attempt("1.0")
    assert attempt.stop_reason() is None
    attempt.request_stop(StopReason.drain)
    attempt.request_stop(StopReason.requeue)
    assert attempt.stop_reason() is StopReason.drain


def write_error(attempt: AttemptDir, rank: int, time_s: float) -> None:
    record = {"rank": rank, "time_s": time_s, "error": f"error of rank {rank}", "traceback": ""}
    write_json(attempt.error_path(rank), record)


def test_the_first_error_is_the_earliest_not_that_of_the_lowest_rank(run):
    attempt = run.start_attempt("1.0")
    assert attempt.first_error() is None
    now_s = time.time()
    for rank, age_s in ((0, 1.0), (1, 3.0), (2, 2.0)):
        write_error(attempt, rank, now_s - age_s)
    assert attempt.first_error()["rank"] == 1


@pytest.mark.parametrize("torn", ["", '{"rank": 1, "time', "{}"])
def test_an_error_that_a_killed_rank_left_unfinished_is_skipped(run, torn):
    attempt = run.start_attempt("1.0")
    write_error(attempt, 0, 5.0)
    attempt.error_path(1).write_text(torn)
    assert attempt.first_error()["rank"] == 0


# Metrics


def append(run: RunDir, *records: dict, torn: str = "") -> None:
    with open(run.metrics_path, "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
        file.write(torn)


def start(attempt: int, step: int) -> dict:
    return {"attempt": attempt, "step": step, "resumed_at_step": step}


def loss(attempt: int, *steps: int) -> list[dict]:
    return [{"attempt": attempt, "step": step, "loss": attempt + step / 1000} for step in steps]


def counted(run: RunDir) -> list[tuple[int, int]]:
    return [(r["attempt"], r["step"]) for r in run.metrics() if "loss" in r]


def test_all_records_of_one_attempt_count(run):
    append(run, start(0, 0), *loss(0, 10, 20, 30))
    assert counted(run) == [(0, 10), (0, 20), (0, 30)]


def test_a_torn_last_line_is_skipped(run):
    append(run, start(0, 0), *loss(0, 10, 20), torn='{"attempt": 0, "step": 30, "lo')
    assert counted(run) == [(0, 10), (0, 20)]


def test_a_torn_line_in_the_middle_is_skipped(run):
    append(run, start(0, 0), *loss(0, 10), torn='{"attempt": 0, "st\n')
    append(run, start(1, 10), *loss(1, 20))
    assert counted(run) == [(0, 10), (1, 20)]


def test_steps_that_were_done_again_count_once_and_as_the_last_time(run):
    append(run, start(0, 0), *loss(0, 10, 20, 30, 40), start(1, 25), *loss(1, 30, 40, 50))
    assert counted(run) == [(0, 10), (0, 20), (1, 30), (1, 40), (1, 50)]


def test_a_record_of_the_step_of_the_checkpoint_is_kept(run):
    append(run, start(0, 0), *loss(0, 10, 20, 30), start(1, 20), *loss(1, 30))
    assert counted(run) == [(0, 10), (0, 20), (1, 30)]


def test_an_attempt_that_starts_anew_takes_back_everything(run):
    append(run, start(0, 0), *loss(0, 10, 20), start(1, 0), *loss(1, 10))
    assert counted(run) == [(1, 10)]


def test_an_attempt_that_died_before_its_first_step_takes_back_what_it_would_have_done_again(run):
    append(run, start(0, 0), *loss(0, 10, 20, 30), start(1, 20), start(2, 20), *loss(2, 30, 40))
    assert counted(run) == [(0, 10), (0, 20), (2, 30), (2, 40)]


def test_many_attempts_leave_each_step_once(run):
    append(run, start(0, 0), *loss(0, 10, 20, 30), start(1, 20), *loss(1, 30, 40, 50), start(2, 10), *loss(2, 20, 30))
    assert counted(run) == [(0, 10), (2, 20), (2, 30)]


def test_evaluations_count_like_losses(run):
    values = {"attempt": 0, "step": 20, "val_auc": 0.7}
    append(run, start(0, 0), *loss(0, 10, 20), values, start(1, 10), *loss(1, 20), {**values, "attempt": 1})
    assert [r["attempt"] for r in run.metrics() if "val_auc" in r] == [1]


def test_the_word_of_a_killed_rank_comes_before_what_its_peers_wrote_earlier(run):
    attempt = run.start_attempt("1.0")
    assert attempt.first_error() is None
    for rank, time_s in ((2, 10.0), (0, 11.0)):
        write_json(attempt.error_path(rank), {"rank": rank, "time_s": time_s, "error": "a peer is gone"})
    attempt.error_path(3).write_text('{"rank": 3, "ti')
    assert (attempt.first_error() or {})["rank"] == 2
    write_json(attempt.error_path(1), {"rank": 1, "time_s": 99.0, "error": "killed", "killed": True})
    assert (attempt.first_error() or {})["rank"] == 1
