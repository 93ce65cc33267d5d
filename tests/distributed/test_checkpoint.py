"""A checkpoint is complete or not there, and any plan and number of ranks can go on from it."""

import functools
import hashlib
import json
import logging
import os
import pickle
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from rechpc.config import DataKind, RunConfig, ShardingType
from rechpc.errors import CheckpointError
from rechpc.rank import checkpoint
from rechpc.rank.sharding import local_shards
from rechpc.rules import COLUMN_CUT
from rechpc.rundir import Outcome, RunDir, read_json
from tests.configs import tiny
from tests.distributed.trainer import Parts, attempt_in_process, trainer, whole

SAVED_STEP = 6
LAST_STEP = 12
# Row-wise Adagrad goes with a dense Adam, SGD with a dense Adam too.
OPTIMIZERS = {"adagrad": "adagrad", "rowwise_adagrad": "adam", "sgd": "adam"}


def settings(optimizer: str, sharding: str, world_size: int, *values: str) -> RunConfig:
    eps = "optimizer.eps=1e-4"  # see test_training.py
    overrides = [f"optimizer={optimizer}", f"optimizer.dense={OPTIMIZERS[optimizer]}", eps, f"sharding.type={sharding}"]
    return tiny(*overrides, *values, world_size=world_size)


def shardings(optimizer: str) -> list[ShardingType]:
    refused = COLUMN_CUT if optimizer == "rowwise_adagrad" else set()
    return sorted(set(ShardingType) - refused)


def train_and_save(env, config: RunConfig, run: RunDir) -> tuple[Parts, list[float]]:
    """What was saved, and this rank's losses of the steps after that."""
    with trainer(env, config, run) as one:
        one.train(0, SAVED_STEP)
        saved = one.parts()
        one.save(SAVED_STEP, note="as it was")
        return saved, one.train(SAVED_STEP, LAST_STEP)


def restore_each(env, config: RunConfig, run: RunDir, saved_runs: list[RunDir]) -> list[tuple[dict | None, Parts]]:
    """The state and the tensors that one plan gets from the checkpoints of several runs."""
    results = []
    with trainer(env, config, run) as one:
        for saved_run in saved_runs:
            for part in checkpoint.parts(one.model, one.optimizers, env.rank):
                part.tensor.fill_(7)
            found = checkpoint.restore(saved_run, one.model, one.optimizers, config, one.here)
            results.append((found and found.state, one.parts()))
    return results


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A run with a checkpoint of 2 ranks, its tensors and the losses that follow; each is made once."""

    @functools.cache
    def of(optimizer: str, sharding: str) -> tuple[RunDir, dict[str, np.ndarray], np.ndarray]:
        run = RunDir.create(tmp_path_factory.mktemp("runs"), "saved")
        results = ranks(2, train_and_save, settings(optimizer, sharding, 2), run)
        return run, whole([r[0] for r in results]), np.mean([r[1] for r in results], axis=0)

    return of


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("optimizer", "sharding"), [(o, sharding) for o in OPTIMIZERS for sharding in shardings(o)])
def test_a_plan_restores_every_bit_that_any_plan_saved(ranks, saved, tmp_path, optimizer, sharding, world_size):
    before = {other: saved(optimizer, other) for other in shardings(optimizer)}
    config = settings(optimizer, sharding, world_size)
    run = RunDir.create(tmp_path, "run")
    results = ranks(world_size, restore_each, config, run, [saved_run for saved_run, _, _ in before.values()])
    for i, (other, (_, expected, _)) in enumerate(before.items()):
        found = whole([of_rank[i][1] for of_rank in results])
        assert expected.keys() == found.keys(), other
        assert [n for n in expected if not np.array_equal(expected[n], found[n])] == [], other
        assert [of_rank[i][0] for of_rank in results] == [{"step": SAVED_STEP, "note": "as it was"}] * world_size


def restore_and_train(env, config: RunConfig, run: RunDir) -> list[float]:
    with trainer(env, config, run) as one:
        state = one.restore()
        assert state is not None
        return one.train(state["step"], LAST_STEP)


@pytest.mark.parametrize(("before", "after"), [("table_wise", "data_parallel"), ("data_parallel", "row_wise")])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_as_if_it_had_not_stopped(ranks, saved, optimizer, before, after):
    run, _, expected = saved(optimizer, before)
    losses = ranks(3, restore_and_train, settings(optimizer, after, 3), run)
    np.testing.assert_allclose(np.mean(losses, axis=0), expected, rtol=2e-6)


@pytest.mark.parametrize("sharding", ["row_wise", "data_parallel"])
def test_a_resume_on_three_ranks_changes_no_bit(ranks, tmp_path, sharding):
    files = {}
    for max_steps in ([11], [4, 11]):
        run = RunDir.create(tmp_path, "run")
        for stop in max_steps:
            config = settings("adagrad", sharding, 3, f"trainer.max_steps={stop}", "checkpoint.every=0")
            run.start_attempt(f"{stop}.0")
            assert ranks(3, attempt_in_process, config, run, f"{stop}.0") == [Outcome.finished] * 3
        manifest = read_json(run.checkpoint_path(11) / "manifest.json")
        assert manifest is not None
        files[len(max_steps)] = manifest["files"]
    assert files[1] == files[2]


def restore_fresh(env, config: RunConfig, run: RunDir) -> Parts:
    with trainer(env, config, run) as one:
        one.restore()
        return one.parts()


def test_a_fresh_dense_adam_gets_its_moments_back(ranks, saved):
    run, expected, _ = saved("sgd", "table_wise")
    found = whole(ranks(1, restore_fresh, settings("sgd", "table_wise", 1), run))
    dense = [name for name in found if "/" not in name and "embedding_bags" not in name]
    moments = [f"{name}/{moment}" for name in dense for moment in ("exp_avg", "exp_avg_sq")]
    assert len(dense) == 8
    assert all(np.array_equal(found[n], expected[n]) and found[n].any() for n in moments)


def random_states(env, config: RunConfig, run: RunDir) -> tuple[np.ndarray, np.ndarray]:
    with trainer(env, config, run) as one:
        torch.manual_seed(env.rank)
        torch.rand(5)
        one.save(1)
        expected = torch.rand(3).numpy()
        one.restore()
        return expected, torch.rand(3).numpy()


def test_every_rank_gets_its_random_state_back(ranks, tmp_path):
    results = ranks(2, random_states, settings("sgd", "row_wise", 2), RunDir.create(tmp_path, "run"))
    assert all(np.array_equal(expected, found) for expected, found in results)
    assert not np.array_equal(results[0][0], results[1][0])


# Damage


class Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def save_steps(env, config: RunConfig, run: RunDir, steps: list[int]) -> None:
    with trainer(env, config, run) as one:
        for step in steps:
            one.save(step)


def try_restore(env, config: RunConfig, run: RunDir) -> tuple[dict | str | None, list[str]]:
    """The state, or the error; and what was logged."""
    messages = Messages()
    logging.getLogger("rechpc").addHandler(messages)
    try:
        with trainer(env, config, run) as one:
            try:
                return one.restore(), messages.lines
            except CheckpointError as error:
                return str(error), messages.lines
    finally:
        logging.getLogger("rechpc").removeHandler(messages)


BASE = settings("adagrad", "row_wise", 2)


@pytest.fixture(scope="module")
def two_checkpoints(ranks, tmp_path_factory):
    run = RunDir.create(tmp_path_factory.mktemp("runs"), "two")
    ranks(2, save_steps, BASE, run, [1, 2])
    return run


@pytest.fixture
def run(two_checkpoints, tmp_path):
    """A copy of a run with the checkpoints of steps 1 and 2."""
    return RunDir(Path(shutil.copytree(two_checkpoints.path, tmp_path / "run")))


def flip_a_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def zero_a_block(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:4096] + bytes(4096) + content[8192:])


def edit_manifest(checkpoint: Path, change) -> None:
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    change(manifest)
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**manifest, "sha256": digest}))


DAMAGE = {
    "a flipped bit": (lambda c: flip_a_bit(c / "rank-00001.bin", at=1000), "rank-00001.bin does not have its checksum"),
    "a zeroed block": (
        lambda c: zero_a_block(c / "rank-00000.bin"),
        "rank-00000.bin does not have its checksum",
    ),
    "a truncated file": (lambda c: (c / "rank-00000.bin").write_bytes(b"abc"), "rank-00000.bin has 3 bytes, expected"),
    "a missing file": (lambda c: (c / "rank-00001.bin").unlink(), "rank-00001.bin: No such file"),
    "a missing manifest": (lambda c: (c / "manifest.json").unlink(), "manifest.json is missing"),
    "an empty manifest": (lambda c: (c / "manifest.json").write_text(""), "manifest.json cannot be read"),
    "another format": (lambda c: edit_manifest(c, lambda m: m.update(format=99)), "manifest.json has format 99"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(ranks, run, damage):
    harm, expected = DAMAGE[damage]
    harm(run.checkpoint_path(2))
    for state, lines in ranks(2, try_restore, BASE, run):
        assert state == {"step": 1}
        assert [line for line in lines if line.startswith(f"checkpoint=step-000000002 skipped: {expected}")]


def test_a_flipped_bit_in_the_manifest_is_found_too(ranks, run):
    path = run.checkpoint_path(2) / "manifest.json"
    text = path.read_text()
    at = text.index('"step": 2', text.index('"state"')) + len('"step": ')
    flip_a_bit(path, at)  # "2" becomes "3", which is as good JSON as before
    assert [state for state, _ in ranks(2, try_restore, BASE, run)] == [{"step": 1}] * 2


def test_a_torn_checkpoint_is_removed_and_ignored(ranks, run):
    torn = run.checkpoint_path(3).with_name("step-000000003.tmp")
    torn.mkdir()
    (torn / "rank-00000.bin").write_bytes(b"half")
    assert [state for state, _ in ranks(2, try_restore, BASE, run)] == [{"step": 2}] * 2
    assert not torn.exists()


def test_a_run_that_only_has_damaged_checkpoints_does_not_start_anew(ranks, run):
    for step in (1, 2):
        flip_a_bit(run.checkpoint_path(step) / "rank-00000.bin", at=0)
    messages = {state for state, _ in ranks(2, try_restore, BASE, run)}
    assert messages == {f"{run.checkpoints_path}: none of 2 checkpoints can be read; see the log above"}


def test_a_run_without_checkpoints_starts_anew(ranks, tmp_path):
    assert [state for state, _ in ranks(2, try_restore, BASE, RunDir.create(tmp_path, "run"))] == [None, None]


OTHER_RUNS = {
    "model.dense_layers, model.embedding_dim": ["model.embedding_dim=16", "model.dense_layers=[16,16]"],
    "optimizer.sparse": ["optimizer.sparse=sgd"],
    "data.seed, seed": ["seed=2", "data.seed=1"],
    "trainer.global_batch": ["trainer.global_batch=48"],
}


@pytest.mark.parametrize("keys", OTHER_RUNS)
def test_a_checkpoint_of_another_run_is_refused_with_the_keys_that_differ(ranks, run, keys):
    other = settings("adagrad", "row_wise", 2, *OTHER_RUNS[keys])
    expected = f"{run.checkpoint_path(2)}: made for another run: {keys} differ; start a new run"
    assert [state for state, _ in ranks(2, try_restore, other, run)] == [expected] * 2


def test_data_prepared_anew_is_other_data_wherever_it_is(tmp_path):
    config = tiny()
    config.data.kind = DataKind.criteo
    found = []
    for place, index in (("a", "{}"), ("b", "{}"), ("c", '{"rows": 1}')):
        (tmp_path / place).mkdir()
        (tmp_path / place / "index.json").write_text(index)
        config.data.path = str(tmp_path / place)
        found.append(checkpoint.made_for(config))
    assert checkpoint.differences(found[0], found[1]) == []
    assert checkpoint.differences(found[0], found[2]) == ["data.index_sha256"]


def test_what_does_not_change_the_model_may_change_on_resume(ranks, run):
    values = ["trainer.max_steps=99", "checkpoint.every=7", "checkpoint.keep=9", "trainer.log_every=1"]
    assert [state for state, _ in ranks(2, try_restore, settings("adagrad", "row_wise", 2, *values), run)] == [
        {"step": 2}
    ] * 2


def test_tensors_that_would_be_left_unset_or_ignored_are_listed(ranks, run):
    name = "model.over_arch.model.1.bias"

    def rename(manifest):
        manifest["tensors"]["model.of.another.version"] = manifest["tensors"].pop(name)

    edit_manifest(run.checkpoint_path(2), rename)
    expected = f"not in the checkpoint: ['{name}']; not in this program: ['model.of.another.version']"
    assert [state for state, _ in ranks(2, try_restore, BASE, run)] == [f"{run.checkpoint_path(2)}: {expected}"] * 2


def test_a_tensor_with_a_hole_is_refused(ranks, run):
    name = "model.sparse_arch.embedding_bag_collection.embedding_bags.t_user.weight"
    edit_manifest(run.checkpoint_path(2), lambda m: m["tensors"][name]["parts"].pop(0))
    (message,) = {state for state, _ in ranks(2, try_restore, BASE, run)}
    # Rank 0 misses its half, 2,502 of 5,003 rows of 12 columns.
    assert message == f"{run.checkpoint_path(2)}: {name}: 30024 of 30024 values are not in the checkpoint"


class Evil:
    """A pickle of this makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self._marker),)


def test_a_checkpoint_cannot_run_code(ranks, run, tmp_path):
    path, payload = run.checkpoint_path(2), pickle.dumps(Evil(tmp_path / "ran"))
    (path / ".metadata").write_bytes(payload)  # where torch.distributed.checkpoint unpickles what it finds
    content = payload + (path / "rank-00000.bin").read_bytes()[len(payload) :]
    (path / "rank-00000.bin").write_bytes(content)
    edit_manifest(
        path,
        lambda m: m["files"][0].update(
            sha256=hashlib.sha256(content).hexdigest(), xxh3_128=xxhash.xxh3_128_hexdigest(content)
        ),
    )
    assert [state for state, _ in ranks(2, try_restore, BASE, run)] == [{"step": 2}] * 2  # numbers, whatever they mean
    assert not (tmp_path / "ran").exists()
    pickle.loads(payload)
    assert (tmp_path / "ran").exists()


# Saving


def save_and_fail(env, config: RunConfig, run: RunDir, how: str) -> str:
    """Save step 3 where something is wrong, and return the error."""
    with trainer(env, config, run) as one:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if how == "disk" and env.rank == 1:  # as a full disk or an exhausted quota
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        if how == "directory" and env.rank == 0:
            shutil.rmtree(run.checkpoints_path)
            run.checkpoints_path.write_text("not a directory")
        if how == "nan" and env.rank == 1:
            weights = {n: w for n, w in one.model.state_dict().items() if n.endswith("t_item.weight")}
            for weight in weights.values():
                local_shards(weight)[0][1].detach()[3, 4] = float("nan")
        try:
            one.save(3)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return "saved"


def test_a_rank_that_cannot_write_fails_the_save_on_every_rank(ranks, run):
    (message,) = set(ranks(2, save_and_fail, BASE, run, "disk"))
    assert message.startswith(f"CheckpointError: step 3: checkpoint not written: {run.checkpoints_path}")
    assert message.endswith("rank-00001.bin: File too large (failures in a row: 1; there is none)")


def test_a_directory_that_cannot_be_made_fails_the_save_on_every_rank(ranks, run):
    messages = ranks(2, save_and_fail, BASE, run, "directory")
    assert [m.partition(":")[0] for m in messages] == ["CheckpointError"] * 2, messages
    assert str(run.checkpoints_path) in messages[0]


def test_a_failed_save_leaves_the_earlier_checkpoints_as_they_were(ranks, run):
    before = {path: path.read_bytes() for path in run.checkpoints_path.rglob("*") if path.is_file()}
    ranks(2, save_and_fail, BASE, run, "disk")
    assert before == {path: path.read_bytes() for path in run.checkpoints_path.rglob("*") if path.is_file()}
    assert sorted(p.name for p in run.checkpoints_path.iterdir()) == ["step-000000001", "step-000000002"]


def test_a_weight_that_is_not_a_number_is_never_committed(ranks, run):
    (message,) = set(ranks(2, save_and_fail, BASE, run, "nan"))
    assert message.startswith("TrainingError: step 3: ")
    assert "t_item.weight holds a value that is not finite" in message
    assert run.committed_steps() == [2, 1]


def test_the_newest_checkpoints_are_kept(ranks, tmp_path):
    run = RunDir.create(tmp_path, "run")
    ranks(1, save_steps, settings("sgd", "table_wise", 1, "checkpoint.keep=2"), run, [10, 20, 30, 40])
    assert run.committed_steps() == [40, 30]
    assert len(list(run.checkpoints_path.iterdir())) == 2


def test_the_same_step_can_be_saved_again(ranks, run):
    (run.checkpoint_path(2) / "rank-00001.bin").write_bytes(b"damaged")
    ranks(2, save_steps, BASE, run, [2])
    assert [state for state, _ in ranks(2, try_restore, BASE, run)] == [{"step": 2}] * 2


def test_a_checkpoint_is_private_and_holds_no_code(ranks, run):
    path = run.checkpoint_path(2)
    assert path.stat().st_mode & 0o077 == 0
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "rank-00000.bin", "rank-00001.bin"]
    manifest = read_json(path / "manifest.json")
    assert manifest is not None
    sizes = [(path / file["name"]).stat().st_size for file in manifest["files"]]
    # Raw numbers and nothing else: 4 bytes a value, and the random state of each rank.
    random = manifest["tensors"]["rng/0"]["shape"][0]
    values = [np.prod(t["shape"]) for name, t in manifest["tensors"].items() if not name.startswith("rng/")]
    assert sum(sizes) == 4 * sum(values) + 2 * random
