"""SIGKILL at seeded points in and around saves: what is committed can be read, and the run ends with the same bits.

A point is a call that changes a checkpoint directory, in the order in which a rank makes them, and whether the rank
dies before or after it.
"""

import json
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rechpc import manifest
from rechpc.config import RunConfig
from rechpc.rules import dump
from rechpc.rundir import Outcome, RunDir, read_json, write_text
from rechpc.topology import RankEnv
from tests.configs import tiny
from tests.distributed.ranks import environment
from tests.distributed.trainer import attempt_in_process

WORLD_SIZE = 2
NUM_POINTS = 20
CONFIG = tiny(
    "sharding.type=row_wise", "optimizer.dense=adam", "trainer.max_steps=17", "trainer.epochs=2",
    "checkpoint.every=4", "checkpoint.keep=2", world_size=WORLD_SIZE,
)  # fmt: skip
CALLS = ("mkdir", "fsync", "rename", "unlink", "rmdir")


@dataclass(frozen=True)
class Point:
    """The n-th call of a rank, and who dies there."""

    rank: int
    number: int
    after: bool
    everybody: bool
    call: str  # for the name of the test


def watch(on_call: Callable[[str, str, bool], None]) -> None:
    """Be told before and after each call of this process that changes a directory of checkpoints."""

    def watched(call: str, real: Callable[..., Any], target: Any, *args: Any, **more: Any) -> Any:
        folder = target if isinstance(target, int) else more.get("dir_fd")
        where = os.readlink(f"/proc/self/fd/{folder}") if folder is not None else ""
        if not isinstance(target, int):
            where = os.path.join(where, target)
        if "/checkpoints" not in where:
            return real(target, *args, **more)
        on_call(call, where.partition("/checkpoints")[2], False)
        result = real(target, *args, **more)
        on_call(call, where.partition("/checkpoints")[2], True)
        return result

    for call in CALLS:
        real = getattr(os, call)
        setattr(os, call, lambda *args, _call=call, _real=real, **more: watched(_call, _real, *args, **more))


def live(rank: int, port: int, config: RunConfig, run: RunDir, name: str, point: Point | None, pids: Any) -> None:
    """The life of a rank in a process of its own, which may end at a point. Writes its calls to a file."""
    torch.set_num_threads(1)
    os.environ.update(environment(rank, WORLD_SIZE, port))
    pids[rank] = os.getpid()
    calls: list[tuple[str, str]] = []

    def on_call(call: str, where: str, after: bool) -> None:
        if not after:
            calls.append((call, where))
        if point and (point.rank, point.number, point.after) == (rank, len(calls) - 1, after):
            for pid in [*pids] if point.everybody else []:
                if pid != os.getpid():
                    os.kill(pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    watch(on_call)
    outcome = attempt_in_process(RankEnv.from_environment(), config, run, name)
    (run.path / f"calls-{rank}.json").write_text(json.dumps(calls))
    os._exit(0 if outcome is Outcome.finished else 1)


@pytest.fixture(scope="module")
def forks():
    """Processes that have imported torch already, because that takes longer than an attempt."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch.utils.tensorboard"])
    return context


def attempt(forks: Any, run: RunDir, name: str, point: Point | None = None) -> list[int]:
    """Exit statuses of the ranks of a new attempt."""
    run.start_attempt(name)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pids = forks.Array("i", WORLD_SIZE)
    ranks = [
        forks.Process(target=live, args=(r, store.port, CONFIG, run, name, point, pids)) for r in range(WORLD_SIZE)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        rank.kill()
    return [rank.exitcode for rank in ranks]


def new_run(path: Path) -> RunDir:
    run = RunDir.create(path, "run")
    write_text(run.config_path, dump(CONFIG))
    return run


def final_bits(run: RunDir) -> dict[str, Any]:
    found = read_json(run.checkpoint_path(run.committed_steps()[0]) / manifest.NAME)
    assert found is not None
    return {key: found[key] for key in ("step", "files", "tensors")}


@pytest.fixture(scope="module")
def uninterrupted(forks, tmp_path_factory) -> RunDir:
    run = new_run(tmp_path_factory.mktemp("uninterrupted"))
    assert attempt(forks, run, "only.0") == [0] * WORLD_SIZE
    return run


def points(run: RunDir) -> list[Point]:
    """Points drawn from the calls of a whole run, with every kind of call among them."""
    draw = random.Random(5)
    possible: dict[str, list[tuple[int, int, str]]] = {}
    for rank in range(WORLD_SIZE):
        for number, (call, where) in enumerate(json.loads((run.path / f"calls-{rank}.json").read_text())):
            kind = f"{call} {''.join(c for c in where.split('/')[-1] if not c.isdigit())}"
            possible.setdefault(f"rank {rank} {kind}", []).append((rank, number, f"{call} {where}"))
    chosen = [draw.choice(numbers) for numbers in possible.values()]
    rest = [p for numbers in possible.values() for p in numbers if p not in chosen]
    chosen += draw.sample(rest, NUM_POINTS - len(chosen))
    return [Point(r, n, draw.random() < 0.5, bool(i % 2), call) for i, (r, n, call) in enumerate(chosen)]


@pytest.mark.timeout(600)
def test_a_run_that_was_killed_anywhere_in_a_save_ends_with_the_same_bits(forks, uninterrupted, tmp_path):
    killed = points(uninterrupted)
    assert len(killed) == NUM_POINTS
    for i, point in enumerate(killed):
        run = new_run(tmp_path / str(i))
        statuses = attempt(forks, run, "killed.0", point)
        assert statuses[point.rank] == -signal.SIGKILL, point
        assert not point.everybody or statuses == [-signal.SIGKILL] * WORLD_SIZE, point
        assert 0 not in statuses, point
        steps = run.committed_steps()
        assert [manifest.damage(run.checkpoint_path(step)) for step in steps] == [None] * len(steps), point
        assert attempt(forks, run, "resumed.0") == [0] * WORLD_SIZE, point
        (resumed_at,) = (r["resumed_at_step"] for r in run.metrics() if r["attempt"] == 1 and "resumed_at_step" in r)
        assert resumed_at == max(steps, default=0), point
        assert final_bits(run) == final_bits(uninterrupted), point
        assert not list(run.checkpoints_path.glob("*.tmp")), point
