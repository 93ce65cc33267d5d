"""Ranks that do not move: how long is too long, who is stuck, and what is left of an attempt that hung."""

import ast
import json
import signal
from pathlib import Path

import pytest

from rechpc.host import hang
from rechpc.rundir import RunDir
from tests.unit.test_host import is_running, start, wait_for

__all__ = ["start"]

WAIT = [
    ["/x/site-packages/torch/distributed/distributed_c10d.py:9", "wait"],
    ["/r/code/rechpc/rank/loop.py:5", "train"],
]


@pytest.fixture
def attempt(tmp_path):
    return RunDir.create(tmp_path, "x").start_attempt("1.0")


def beat(attempt, *, at_s, **values):
    attempt.heartbeat_path.write_text(json.dumps({"time_s": at_s, **values}))


@pytest.mark.parametrize(
    ("limit_s", "beats", "patience_s"),
    [
        (None, [], 1800),
        (25.0, [], 1800),
        (4000.0, [], 4000),
        (None, [{"phase": "planning"}], 1800),
        (25.0, [{"phase": "training", "step": 1}], 25),
        (None, [{"phase": "training", "step": 1}], 1800),
        (None, [{"phase": "training", "step": 1}, {"phase": "training", "step": 11, "after_s": 1}], 300),
        (None, [{"phase": "training", "step": 1}, {"phase": "training", "step": 11, "after_s": 80}], 800),
        (None, [{"phase": "training", "step": 1}, {"phase": "saving", "step": 11, "after_s": 80}], 1800),
        (25.0, [{"phase": "saving", "step": 1}], 25),
    ],
)
def test_patience_is_the_key_or_a_hundred_mean_steps_but_long_before_the_first_step_and_outside_training(
    attempt, limit_s, beats, patience_s
):
    watch = hang.Watch(attempt, limit_s)
    at_s = 0.0
    for values in beats:
        at_s += values.pop("after_s", 0)
        beat(attempt, at_s=at_s, **values)
        watch._seen = 0.0  # two beats in one tick of the file system's clock
        assert not watch.exceeded()
    assert watch.patience_s == patience_s


def test_what_another_node_noticed_counts_here_too(attempt):
    watch = hang.Watch(attempt, 25.0)
    assert not watch.exceeded()
    attempt.hang_path.touch()
    assert watch.exceeded()


def seen(rank, frames, *, state="S"):
    return hang.Seen(rank=rank, node=f"n{rank // 2 + 1}", state=state, frames=frames)


ELSEWHERE = [["/usr/lib/python3.11/queue.py:1", "get"], ["/r/code/rechpc/rank/data.py:7", "batches"]]
OTHER_COLLECTIVE = [WAIT[0], ["/r/code/rechpc/rank/optim.py:3", "set_step"]]


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([seen(0, WAIT), seen(1, WAIT), seen(2, ELSEWHERE), seen(3, WAIT)], [2]),
        ([seen(0, WAIT), seen(1, []), seen(2, ELSEWHERE)], [1, 2]),
        ([seen(0, []), seen(1, WAIT), seen(2, [], state="T")], [2, 0]),
        ([seen(0, WAIT, state="D"), seen(1, WAIT)], [0]),
        ([seen(0, WAIT), seen(1, WAIT), seen(2, WAIT), seen(3, OTHER_COLLECTIVE)], [3]),
        ([seen(0, [["/r/code/rechpc/rank/pulse.py:9", "_receive"]]), seen(1, ELSEWHERE)], [1]),
        ([seen(0, WAIT), seen(1, WAIT)], []),
        ([], []),
    ],
)
def test_the_stuck_rank_is_the_one_that_is_not_where_the_others_wait(ranks, named):
    assert [s.rank for s in hang.suspects(ranks)] == named


def test_the_loop_waits_for_the_sums_of_a_step_where_it_is_known_to():
    tree = ast.parse((Path(hang.__file__).parents[1] / "rank/pulse.py").read_text())
    waits = {
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "wait"
    }
    assert waits == {hang.SUMS}


def test_the_main_thread_is_the_last_of_what_faulthandler_writes():
    text = (
        'before\nThread 0x00007f (most recent call first):\n  File "/a.py", line 1 in read\n\n'
        'Current thread 0x00007e (most recent call first):\n  File "/b.py", line 2 in <module>\n'
    )
    assert hang.main_frames(text) == [["/b.py:2", "<module>"]]
    assert hang.main_frames("nothing of the kind") == []


def test_who_times_a_wait_is_not_where_a_rank_is():
    assert (Path(hang.__file__).parents[2] / hang._TIMES_OTHERS.lstrip("/")).is_file()  # or it was renamed
    text = (
        "Current thread 0x00007e (most recent call first):\n"
        f'  File "/run/code{hang._TIMES_OTHERS}", line 97 in counted\n'
        '  File "/site-packages/torchrec/distributed/comm_ops.py", line 9 in forward\n'
    )
    frames = hang.main_frames(text)
    assert frames == [["/site-packages/torchrec/distributed/comm_ops.py:9", "forward"]]
    assert hang.Seen(rank=0, node="n1", state="S", frames=frames).waits


def test_node_0_says_where_all_are_when_none_is_elsewhere_and_which_node_did_not_report(attempt, monkeypatch):
    monkeypatch.setattr(hang, "_OTHER_NODES_S", 0.0)
    facts = {"rank": 0, "node": "n1", "state": "S", "frames": WAIT}
    attempt.hang_report_path(0).write_text(json.dumps({"ranks": [facts, {**facts, "rank": 1}]}))
    line = hang.conclude(attempt, "no progress for 25 s", node_rank=0, num_nodes=2)
    assert line.startswith("no progress for 25 s: all 2 ranks are in the same place (rank 0: it is in wait ")
    assert line.endswith("called from rechpc/rank/loop.py:5); network or GPU?; node 1 did not report")
    assert attempt.first_error() is None


@pytest.mark.parametrize(
    ("mode", "words"), [("stuck", "it is in stuck_in_python (rechpc/train.py:"), ("stopped", "stopped (SIGSTOP)")]
)
def test_a_rank_that_does_not_move_is_named_all_show_their_stacks_and_none_is_left(start, mode, words):
    running = start(mode, "job.hang_timeout_s=1")
    pids = [running.facts(rank)["pid"] for rank in (0, 1)]
    outcome = running.end()[2]
    assert outcome["outcome"] == "failed"
    assert outcome["error"].startswith("rank 1: stuck on localhost: no progress for 1 s (job.hang_timeout_s=1), ")
    assert words in outcome["error"]
    assert "; 1 other ranks wait; " in outcome["error"]
    assert running.attempt.first_error()["rank"] == 1
    answered = [rank for rank in (0, 1) if "most recent call first" in running.attempt.rank_log_path(rank).read_text()]
    assert answered == ([0, 1] if mode == "stuck" else [0])
    assert "wait_for_the_others" in running.attempt.rank_log_path(0).read_text()
    wait_for(lambda: not any(is_running(pid) for pid in pids))


def test_a_rank_too_young_to_answer_is_not_ended_by_the_question():
    import subprocess
    import sys

    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        assert not hang._catches(process.pid, signal.SIGUSR1)
        process.kill()
