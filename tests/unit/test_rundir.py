"""The run directory: exclusive, private, and readable whatever was cut off in it."""

import json
import stat
from pathlib import Path

import pytest

from rechpc.errors import ConfigError
from rechpc.rundir import RunDir, StopReason, read_json, write_json, write_text


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "test")


def write_records(run: RunDir, *records: dict[str, object], tail: str = "") -> None:
    run.metrics_path.write_text("".join(json.dumps(r) + "\n" for r in records) + tail)


def test_every_run_has_a_directory_of_its_own_and_private(tmp_path: Path) -> None:
    runs = {RunDir.create(tmp_path, "test").path for _ in range(20)}

    assert len(runs) == 20
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in runs)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="runs_root="):
        RunDir.create(tmp_path / "file", "test")


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        RunDir.open(tmp_path)


def test_only_whole_checkpoints_are_committed_newest_first(run: RunDir) -> None:
    for name in ("step-000000010", "step-000000200", "step-000000300.tmp", "notes"):
        (run.checkpoints_path / name).mkdir()

    assert run.committed_steps() == [200, 10]
    assert run.checkpoint_path(200).is_dir()


def test_attempts_are_numbered_in_the_order_of_their_start(run: RunDir) -> None:
    for name in ("900.0", "100.0", "100.1"):
        run.start_attempt(name)

    assert [(a.name, a.ordinal) for a in run.attempts()] == [("900.0", 0), ("100.0", 1), ("100.1", 2)]


def test_the_first_reason_to_stop_counts(run: RunDir) -> None:
    attempt = run.start_attempt("1.0")
    assert attempt.stop_reason() is None

    attempt.request_stop(StopReason.requeue)
    attempt.request_stop(StopReason.drain)

    assert attempt.stop_reason() is StopReason.requeue


def test_the_word_of_a_killed_rank_comes_before_what_its_peers_wrote_earlier(run: RunDir) -> None:
    attempt = run.start_attempt("1.0")
    assert attempt.first_error() is None

    for rank, time_s in ((2, 10.0), (0, 11.0)):
        write_json(attempt.error_path(rank), {"rank": rank, "time_s": time_s, "error": "a peer is gone"})
    attempt.error_path(3).write_text('{"rank": 3, "ti')
    assert (attempt.first_error() or {})["rank"] == 2

    write_json(attempt.error_path(1), {"rank": 1, "time_s": 99.0, "error": "killed", "killed": True})
    assert (attempt.first_error() or {})["rank"] == 1


def test_a_line_that_a_killed_writer_left_unfinished_is_skipped(run: RunDir) -> None:
    write_records(run, {"attempt": 0, "step": 10}, tail='{"attempt": 0, "st')

    assert [record["step"] for record in run.metrics()] == [10]


def test_steps_done_again_by_a_later_attempt_count_once(run: RunDir) -> None:
    write_records(
        run,
        {"attempt": 0, "step": 0, "resumed_at_step": 0},
        {"attempt": 0, "step": 10, "loss": 1.0},
        {"attempt": 0, "step": 20, "loss": 2.0},
        {"attempt": 0, "step": 30, "loss": 3.0},
        {"attempt": 1, "step": 15, "resumed_at_step": 15},
        {"attempt": 1, "step": 20, "loss": 2.5},
        {"attempt": 1, "step": 30, "loss": 3.5},
    )

    losses = [(r["step"], r["loss"]) for r in run.metrics() if "loss" in r]

    assert losses == [(10, 1.0), (20, 2.5), (30, 3.5)]


def test_a_write_replaces_the_whole_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "one")
    write_json(tmp_path / "a", {"two": 2})

    assert read_json(tmp_path / "a") == {"two": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert read_json(tmp_path / "absent") is None
