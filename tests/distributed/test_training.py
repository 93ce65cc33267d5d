"""The sharding plan and the number of ranks change where the work is done, and nothing else."""

import dataclasses
import functools
import gzip
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from rechpc.config import DataKind, RunConfig, ShardingType
from rechpc.errors import ConfigError
from rechpc.rank import process
from rechpc.rank.data import GlobalBatches, open_splits
from rechpc.rank.metrics import Scores, gather_predictions, score
from rechpc.rank.model import build
from rechpc.rank.sharding import settle, shard
from rechpc.rank.synthetic import Synthetic
from rechpc.rundir import Outcome, RunDir, read_json
from tests import datasets
from tests.configs import compose, tiny
from tests.distributed.trainer import Parts, attempt_in_process, trainer, whole

NUM_STEPS = 12  # the 11th is the partial batch at the end of the first epoch
WORLD_SIZES = (1, 2, 3)
# The files in conf/optimizer. With their eps of 1e-8 the first step of Adagrad and Adam is the learning rate times the
# sign of the gradient, also where the gradient is nothing but rounding: the last bits of two orders of summation
# would grow to the size of a step.
OPTIMIZERS = {
    # The gradients of tables are small: with this learning rate a wrong one shows in the loss.
    "sgd": ["optimizer=sgd", "optimizer.learning_rate=5", "optimizer.dense_learning_rate=0.1"],
    "adagrad": ["optimizer=adagrad", "optimizer.eps=1e-4", "optimizer.warmup_steps=6"],
    "rowwise_adagrad and a dense adam": ["optimizer=adam", "optimizer.eps=1e-4", "optimizer.warmup_steps=6"],
}
PLANS = [(sharding, world_size) for sharding in ShardingType for world_size in WORLD_SIZES]
IDS = [f"{sharding}-{world_size}" for sharding, world_size in PLANS]


@dataclasses.dataclass
class Curve:
    """What one rank saw of a short training; `order` are its dense values, which no two samples share."""

    initial: Parts
    final: Parts
    losses: list[float]
    order: list[np.ndarray]


def train(env, config: RunConfig, run: RunDir) -> Curve:
    with trainer(env, config, run) as one:
        initial, losses = one.parts(), one.train(0, NUM_STEPS)
        batches = [one.batches.batch(step) for step in range(NUM_STEPS)]
        order = [batch.dense_BF[batch.weights_B > 0].numpy() for batch in batches]
        return Curve(initial, one.parts(), losses, order)


@pytest.fixture(scope="module")
def curve(ranks, tmp_path_factory):
    """The curves of all ranks; each training is done once."""

    @functools.cache
    def of(optimizer: str, sharding: str, world_size: int) -> list[Curve]:
        config = tiny(*OPTIMIZERS[optimizer], f"sharding.type={sharding}", world_size=world_size)
        run = RunDir.create(tmp_path_factory.mktemp("runs"), "curve")
        return ranks(world_size, train, config, run)

    return of


@pytest.mark.parametrize(("sharding", "world_size"), PLANS, ids=IDS)
def test_initial_weights_are_those_of_one_rank(curve, sharding, world_size):
    expected, found = (whole([c.initial for c in curve("sgd", *plan)]) for plan in (PLANS[0], (sharding, world_size)))
    assert expected.keys() == found.keys()
    assert [name for name in expected if not np.array_equal(expected[name], found[name])] == []


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_global_batch_holds_the_samples_of_one_rank(curve, world_size):
    (one,), curves = (curve("sgd", "table_wise", n) for n in (1, world_size))
    together = [np.concatenate([c.order[step] for c in curves]) for step in range(NUM_STEPS)]
    assert [len(samples) for samples in together] == [96] * 10 + [40, 96]
    assert all(np.array_equal(a, b) for a, b in zip(one.order, together, strict=True))


TRAININGS = [
    (optimizer, sharding, world_size)
    for optimizer in OPTIMIZERS
    for sharding, world_size in PLANS
    # Column shards with a state per row are refused by the configuration.
    if sharding not in (ShardingType.column_wise, ShardingType.grid_shard) or optimizer in ("sgd", "adagrad")
]


@pytest.mark.parametrize(("optimizer", "sharding", "world_size"), TRAININGS, ids=lambda value: str(value))
def test_losses_and_final_state_are_those_of_one_rank(curve, optimizer, sharding, world_size):
    expected, found = curve(optimizer, "table_wise", 1), curve(optimizer, sharding, world_size)
    losses = [np.mean([c.losses for c in curves], axis=0) for curves in (expected, found)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-6)
    assert losses[0][0] > losses[0][-1]
    final = [whole([c.final for c in curves]) for curves in (expected, found)]
    assert final[0].keys() == final[1].keys()
    for name, values in final[0].items():
        np.testing.assert_allclose(final[1][name], values, rtol=1e-4, atol=1e-6, err_msg=name)


def settle_only(env, config: RunConfig, run: RunDir) -> list[str]:
    """The tensors that settling changes."""
    with trainer(env, config, run) as one:
        before = one.parts()
        settle(one.model, one.batches.nothing())
        after = one.parts()
        pairs = ((name, a, b) for name in before for a, b in zip(before[name], after[name], strict=True))
        return [name for name, (*_, a), (*_, b) in pairs if not np.array_equal(a, b)]


@pytest.mark.parametrize("sharding", ShardingType)
def test_the_gradient_of_nothing_changes_nothing(ranks, tmp_path, sharding):
    config = tiny(f"sharding.type={sharding}", world_size=3)
    assert ranks(3, settle_only, config, RunDir.create(tmp_path, "run")) == [[], [], []]


def forward(env, config: RunConfig, run: RunDir) -> tuple[list[str], np.ndarray]:
    """The order of the sharded collection's output, and this rank's logits of the first batch."""
    with trainer(env, config, run) as one, torch.no_grad():
        batch = one.batches.batch(0)
        (collection,) = (m for m in one.model.modules() if isinstance(m, ShardedEmbeddingBagCollection))
        pooled = collection(batch.sparse).wait()
        _, (_, logits_B, _, _) = one.model(batch)
        return pooled.keys(), logits_B.numpy()


def test_outputs_do_not_depend_on_the_plan_although_the_order_of_tables_does(ranks, tmp_path):
    keys, logits = {}, {}
    for sharding in ("table_wise", "row_wise"):
        run = RunDir.create(tmp_path, sharding)
        results = ranks(2, forward, tiny(f"sharding.type={sharding}", world_size=2), run)
        keys[sharding], logits[sharding] = results[0][0], np.concatenate([r[1] for r in results])
    assert keys["table_wise"] != keys["row_wise"]
    assert sorted(keys["table_wise"]) == sorted(keys["row_wise"])
    np.testing.assert_allclose(logits["table_wise"], logits["row_wise"], rtol=1e-5, atol=1e-6)


def plan_that_fails(env, config: RunConfig, run: RunDir) -> str:
    with process.start(config, env) as here:
        model = build(config.model, config.data, seed=config.seed, device=here.device)
        with pytest.raises(ConfigError) as error:
            shard(model, config, run, here)
        return str(error.value)


def test_a_planner_that_fails_on_rank_0_is_a_config_error_on_every_rank(ranks, tmp_path):
    table = "data.sparse=[{name: user, rows: 400_000_000}]"  # 18 GiB, and a node has 1
    config = compose(table, "cluster.host_memory_gib=1", "sharding=table_wise", "job.ranks_per_node=3",
                     "trainer.global_batch=96")  # fmt: skip
    # The collectives of this configuration wait 600 s, so who waits for rank 0 does not come back in time.
    messages = ranks(3, plan_that_fails, config, RunDir.create(tmp_path, "run"), timeout_s=30)
    assert len(set(messages)) == 1
    assert messages[0].startswith("sharding.type=table_wise: no plan fits 3 ranks: ")


# Evaluation


def scores_of_known_predictions(env, config: RunConfig) -> Scores | None:
    """Scores of the first dense value of each sample, as if it were a logit."""
    with process.start(config, env) as here:
        source = open_splits(config.data)["test"]
        batches = GlobalBatches(
            source, config.data, global_batch=96, rank=env.rank, world_size=env.world_size, seed=None
        )
        whole_split = [batches.batch(step) for step in range(batches.steps_per_epoch)]
        logits = [b.dense_BF[b.weights_B > 0, 0] for b in whole_split]
        labels = [b.labels_B[b.weights_B > 0] for b in whole_split]
        return gather_predictions(logits, labels, here)


@pytest.mark.parametrize("rows", [1009, 97, 2, 1])
def test_scores_count_every_sample_of_a_split_once(ranks, rows):
    config = tiny(f"data.synthetic.test_rows={rows}")
    test = open_splits(config.data)["test"]
    blocks = [test.read(block) for block in range(-(-rows // test.block_rows))]
    expected = score(np.concatenate([b.dense_NF[:, 0] for b in blocks]), np.concatenate([b.labels_N for b in blocks]))
    for world_size in WORLD_SIZES:
        first, *others = ranks(world_size, scores_of_known_predictions, config)
        assert others == [None] * (world_size - 1)
        assert first.samples == rows
        for name, value in dataclasses.asdict(expected).items():
            same = pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
            assert getattr(first, name) == same, (world_size, name)


def run_of(config: RunConfig, path: Path) -> RunDir:
    run = RunDir.create(path, "run")
    run.start_attempt("test.0")
    return run


@pytest.mark.parametrize("rows", [211, 2])
def test_an_uneven_split_is_evaluated_alike_on_any_number_of_ranks(ranks, tmp_path, rows):
    values = [f"data.synthetic.test_rows={rows}", "data.synthetic.val_rows=7", "optimizer.learning_rate=0"]
    values += ["trainer.max_steps=2", "trainer.eval_every=1"]
    results = {}
    for world_size in WORLD_SIZES:
        config = tiny(*values, world_size=world_size)
        run = run_of(config, tmp_path)
        assert ranks(world_size, attempt_in_process, config, run, "test.0") == [Outcome.finished] * world_size
        results[world_size] = result = read_json(run.result_path)
        assert result["test_samples"] == rows
        assert [r["val_samples"] for r in run.metrics() if "val_samples" in r] == [7, 7]
    for name in ("test_auc", "test_ne", "test_log_loss", "test_calibration", "test_accuracy"):
        assert results[2][name] == pytest.approx(results[1][name], rel=1e-5), name
        assert results[3][name] == pytest.approx(results[1][name], rel=1e-5), name


def test_fewer_samples_than_one_global_batch_is_an_error_on_every_rank(ranks, tmp_path):
    config = tiny(world_size=2)
    config.data.synthetic.train_rows = 95  # as a prepared data set may have, which nobody knew at submission
    expected = "DataError: trainer.global_batch=96: the train split has only 95 samples; lower it"
    assert ranks(2, attempt_in_process, config, run_of(config, tmp_path), "test.0") == [expected] * 2


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "missing": ("is missing, the index says", lambda path: path.unlink()),
    "truncated": ("bytes, the index says", lambda path: path.write_bytes(path.read_bytes()[:-1])),
    "changed": ("has changed since it was prepared", lambda path: flip(path, path.stat().st_size // 2)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_data_set_ends_all_ranks_with_one_line_before_the_first_step(ranks, tmp_path, damage):
    config = tiny(world_size=3)
    blocks = {name: [source.read(0)] * 2 for name, source in open_splits(config.data).items() if name == "train"}
    blocks |= {"test": [open_splits(config.data)["test"].read(0)]}
    datasets.write(tmp_path / "data", config.data, blocks, blocks_per_file=1)
    config.data.kind, config.data.path = DataKind.criteo, str(tmp_path / "data")
    what, spoil = DAMAGES[damage]
    spoil(tmp_path / "data/train-1.arrow")  # which rank 1 looks at
    run = run_of(config, tmp_path)
    (error,) = set(ranks(3, attempt_in_process, config, run, "test.0"))
    assert error.startswith(f"DataError: {tmp_path / 'data/train-1.arrow'}: ")
    assert what in error
    assert len(error.splitlines()) == 1
    assert not run.metrics()


def slow_attempt(env, config: RunConfig, run: RunDir) -> Outcome | str:
    """An attempt whose source answers late, as a slow file system does."""
    with pytest.MonkeyPatch.context() as patch:
        read = Synthetic.read
        patch.setattr(Synthetic, "read", lambda source, block: time.sleep(0.02) or read(source, block))
        return attempt_in_process(env, config, run, "test.0")


def test_slow_data_is_waited_for_and_changes_nothing_but_the_time(ranks, tmp_path):
    config = tiny("trainer.log_every=1", "trainer.timing_warmup_steps=0", "data.block_rows=32", world_size=2)
    runs = {}
    for name, attempt in (("fast", functools.partial(attempt_in_process, name="test.0")), ("slow", slow_attempt)):
        runs[name] = run_of(config, tmp_path / name)
        assert ranks(2, attempt, config, runs[name]) == [Outcome.finished] * 2
    fast, slow = ([r for r in runs[name].metrics() if "loss" in r] for name in ("fast", "slow"))
    assert [r["loss"] for r in slow] == [r["loss"] for r in fast]
    assert all(r["rank0_data_wait_ms"] >= 0 for r in fast)
    assert sum(r["rank0_data_wait_ms"] for r in slow) > 20


def test_the_parts_of_steps_and_traces_of_some_are_there_and_change_nothing(ranks, tmp_path):
    runs = {}
    for name, steps in (("plain", "[]"), ("traced", "[4,5]")):
        more = ("trainer.log_every=1", "trainer.timing_warmup_steps=0", "trainer.eval_every=3", "checkpoint.every=3")
        more += ("data.synthetic.val_rows=50", "sharding=row_wise", f"trainer.profile_steps={steps}")
        config = tiny(*more, world_size=2)
        runs[name] = run_of(config, tmp_path / name)
        assert ranks(2, attempt_in_process, config, runs[name], "test.0") == [Outcome.finished] * 2
    plain, traced = ([r for r in runs[name].metrics() if "loss" in r] for name in runs)
    assert [r["loss"] for r in traced] == [r["loss"] for r in plain]
    for part in ("forward", "backward", "all_to_all", "optimizer", "other"):
        assert all(r[f"rank0_{part}_ms"] > 0 for r in plain), part
    assert [r["step"] for r in plain if r["rank0_checkpoint_stall_ms"]] == [4, 7, 10]
    assert {r["step"] for r in traced if r["step_time_ms"] is None} == {3, 4, 5}  # tracing is slow
    assert not runs["plain"].profile_path(4, 5, 0).parent.exists()
    for rank in (0, 1):
        with gzip.open(runs["traced"].profile_path(4, 5, rank), "rt") as file:
            names = [str(event.get("name")) for event in json.load(file)["traceEvents"]]
        assert sum(name.startswith("## forward ") for name in names) == 2


@pytest.mark.parametrize("label", [0, 1])
def test_a_test_split_of_one_class_has_no_auc_and_says_why(ranks, tmp_path, label):
    config = tiny("trainer.max_steps=1", world_size=2)
    blocks = {name: [source.read(0)] for name, source in open_splits(config.data).items()}
    blocks["test"][0].labels_N[:] = label
    datasets.write(tmp_path / "data", config.data, blocks)
    config.data.kind, config.data.path = DataKind.criteo, str(tmp_path / "data")
    run = run_of(config, tmp_path)
    assert ranks(2, attempt_in_process, config, run, "test.0") == [Outcome.finished] * 2
    result = read_json(run.result_path)
    assert (result["test_auc"], result["test_ne"]) == (None, None)
    assert result["test_auc_undefined"] == f"all 61 labels are {label}: AUC and NE need both classes"
