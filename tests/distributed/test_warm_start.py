"""A new run takes weights from another one, and leaves nothing unset or ignored that was not named."""

from pathlib import Path

import numpy as np
import pytest

from rechpc import manifest
from rechpc.config import RunConfig
from rechpc.errors import CheckpointError
from rechpc.rundir import Outcome, RunDir
from tests.configs import tiny
from tests.distributed.trainer import Parts, attempt_in_process, trainer, whole

BASE = ("sharding.type=row_wise", "optimizer.dense=adam")
TOP = "model.over_arch.*"


def train_and_save(env, config: RunConfig, run: RunDir) -> Parts:
    with trainer(env, config, run) as one:
        one.train(0, 5)
        one.save(5)
        return one.parts()


@pytest.fixture(scope="module")
def source(ranks, tmp_path_factory) -> tuple[RunDir, dict[str, np.ndarray]]:
    run = RunDir.create(tmp_path_factory.mktemp("source"), "run")
    return run, whole(ranks(2, train_and_save, tiny(*BASE, world_size=2), run))


def start(env, config: RunConfig, run: RunDir) -> tuple[dict | str | None, Parts, Parts, list[dict]]:
    with trainer(env, config, run) as one:
        before = one.parts()
        try:
            state = one.restore()
        except CheckpointError as error:
            state = str(error)
        return state, before, one.parts(), one.records


def started(ranks, path: Path, *values: str):
    run = RunDir.create(path, "run")
    results = ranks(3, start, tiny("sharding.type=table_wise", "seed=9", *values, world_size=3), run)
    return results[0][0], whole([r[1] for r in results]), whole([r[2] for r in results]), results[0][3]


def test_a_warm_start_takes_all_weights_and_no_optimizer_state(ranks, source, tmp_path):
    run, saved = source
    state, before, after, records = started(ranks, tmp_path, "optimizer.dense=adam", f"checkpoint.init_from={run.path}")
    assert state is None  # it begins at step 0
    assert all(np.array_equal(after[n], (before if "/" in n else saved)[n]) for n in after)
    assert records == [
        {"init_from": str(run.checkpoint_path(5)), "init_tensors": len([n for n in saved if "/" not in n])}
    ]


def test_patterns_choose_what_is_taken_from_a_checkpoint_directory(ranks, source, tmp_path):
    run, saved = source
    values = [f"checkpoint.init_from={run.checkpoint_path(5)}", f"checkpoint.init_exclude=['{TOP}']"]
    _, before, after, _ = started(ranks, tmp_path, *values, "model.over_layers=[20,1]")
    taken = {n for n in after if not np.array_equal(after[n], before[n])}
    assert taken == {n for n in saved if "/" not in n and "over_arch" not in n}


def test_what_a_warm_start_would_leave_unset_or_ignore_is_listed(ranks, source, tmp_path):
    run, _ = source
    error, before, after, _ = started(
        ranks, tmp_path, f"checkpoint.init_from={run.path}", "model.over_layers=[16,16,1]"
    )
    assert error.startswith(f"checkpoint.init_from={run.path}: {run.checkpoint_path(5)}: not in the checkpoint: [")
    assert "'model.over_arch.model.0._mlp.1._linear.weight'" in error
    assert error.endswith("name what to leave out in checkpoint.init_exclude, or choose with checkpoint.init_include")
    assert all(np.array_equal(after[n], before[n]) for n in after)


def test_a_tensor_of_another_shape_is_refused(ranks, source, tmp_path):
    run, _ = source
    error, *_ = started(ranks, tmp_path, f"checkpoint.init_from={run.path}", "model.over_layers=[20,1]")
    assert "expected float32 [20" in error


def test_a_directory_without_a_checkpoint_is_refused(ranks, tmp_path):
    error, *_ = started(ranks, tmp_path, f"checkpoint.init_from={tmp_path}")
    assert f"{tmp_path}: expected a checkpoint, or a run directory with one that can be read" in error


def test_a_run_that_started_with_optimizer_state_resumes_with_the_same_bits(ranks, source, tmp_path):
    """Adam's count of steps is then another than that of the run."""
    files = {}
    for name, stops in {"through": [8], "stopped": [3, 8]}.items():
        run = RunDir.create(tmp_path, name)
        for stop in stops:
            values = [f"checkpoint.init_from={source[0].path}", "checkpoint.init_optimizer=true"]
            config = tiny(*BASE, *values, f"trainer.max_steps={stop}", "checkpoint.every=0", world_size=2)
            run.start_attempt(f"{stop}.0")
            assert ranks(2, attempt_in_process, config, run, f"{stop}.0") == [Outcome.finished] * 2
        found = manifest.read(run.checkpoint_path(8))
        assert found.optimizer_step == 13
        files[name] = found.files
    assert files["through"] == files["stopped"]
