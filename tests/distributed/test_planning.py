"""Plans against the truth: the bytes that ranks allocate, the buffers that they move, the nodes that they stand on."""

from collections import Counter

import numpy as np
import pytest
import torch
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from rechpc.config import RunConfig
from rechpc.errors import ConfigError
from rechpc.planned import Plan, made_for, render
from rechpc.rank import planning
from rechpc.rank.sharding import _from_json
from rechpc.rundir import RunDir, read_json, write_json
from tests.configs import compose, tiny
from tests.distributed.ranks import Ranks
from tests.distributed.trainer import trainer, whole

GIB = 1 << 30
TABLES = "{name: a, rows: 4096, ids_per_sample: 4}, {name: b, rows: 901}, {name: c, rows: 64, ids_per_sample: 2}"
BATCH = ["trainer.global_batch=1536", "data.synthetic.train_rows=1536", "data.synthetic.id_skew=0"]


# Memory: what the plan says against what FBGEMM allocates and the ranks send.


def allocated(env, config: RunConfig, run: RunDir) -> dict[str, int]:
    """Bytes of tables and of their optimizer state on this rank, and those that one step takes in and gives out."""
    with trainer(env, config, run) as one, torch.no_grad():
        (collection,) = (m for m in one.model.modules() if isinstance(m, ShardedEmbeddingBagCollection))
        moved = 0

        def count(module, arguments, pooled):
            nonlocal moved
            moved += arguments[0].values().numel() * 8 + pooled.numel() * pooled.element_size()

        for lookup in collection._lookups:
            lookup.register_forward_hook(count)
        one.model(one.batches.batch(0))
        found = {"weight_bytes": 0, "optimizer_bytes": 0, "buffer_bytes": moved}
        for module in (module for lookup in collection._lookups for module in lookup.modules()):
            if type(module).__name__ == "SplitTableBatchedEmbeddingBagsCodegen":
                found["weight_bytes"] += module.weights_host.nbytes
                if module.get_optimizer_state() and config.optimizer.sparse != "sgd":
                    found["optimizer_bytes"] += module.momentum1_host.nbytes
            elif type(module).__name__ == "DenseTableBatchedEmbeddingBagsCodegen":
                found["weight_bytes"] += module.weights.nbytes
        if one.optimizers.replicated:
            states = (t for state in one.optimizers.replicated.state.values() for t in state.values())
            found["optimizer_bytes"] += sum(t.nbytes for t in states if isinstance(t, torch.Tensor) and t.dim())
        return found


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (2, ["sharding=auto", "optimizer=adagrad"]),
        (3, ["sharding=table_wise", "optimizer=rowwise_adagrad"]),
        (2, ["sharding=row_wise", "optimizer=sgd"]),
        (3, ["sharding=column_wise", "optimizer=adagrad"]),
        (2, ["sharding=data_parallel", "optimizer=adagrad"]),
        (3, ["sharding=table_row_wise", "optimizer=rowwise_adagrad"]),
        (2, ["sharding=row_wise", "optimizer=adagrad", "model.table_precision=fp16"]),
        (2, ["sharding.tables={t_a: {types: [row_wise]}, t_b: {types: [column_wise], column_width: 4}}"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_predicted_bytes_are_those_that_ranks_allocate(ranks, tmp_path, world_size, overrides):
    config = tiny(f"data.sparse=[{TABLES}]", *BATCH, *overrides, world_size=world_size)
    run = RunDir.create(tmp_path, "run")
    found = ranks(world_size, allocated, config, run)
    for rank, (real, said) in enumerate(zip(found, read_json(run.plan_path)["ranks"], strict=True)):
        assert {k: said[k] for k in ("weight_bytes", "optimizer_bytes")} == {
            k: real[k] for k in ("weight_bytes", "optimizer_bytes")
        }, rank
        buffers = said["hbm_bytes"] + said["host_bytes"] - said["weight_bytes"] - said["optimizer_bytes"]
        assert buffers == pytest.approx(real["buffer_bytes"], rel=0.1), rank


# Placement: no process is needed, for a plan is made anywhere.


def plan_for(nodes: int, ranks_per_node: int, *overrides: str) -> tuple[RunConfig, Plan]:
    config = compose(
        "cluster=mi300x", f"job.nodes={nodes}", f"job.ranks_per_node={ranks_per_node}", "trainer.global_batch=3072",
        "data.sparse=[{name: a, rows: 4000}, {name: b, rows: 900}, {name: c, rows: 64}, {name: d, rows: 3}]",
        *overrides,
    )  # fmt: skip
    return config, planning.plan_of(config)


@pytest.mark.parametrize("sharding", ["auto", "table_wise", "row_wise", "column_wise", "table_row_wise", "grid_shard"])
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (2, 4), (3, 2), (3, 4), (4, 4)])
def test_every_shard_sits_on_a_device_of_its_node(nodes, ranks_per_node, sharding):
    config, plan = plan_for(nodes, ranks_per_node, f"sharding={sharding}")
    (tables,) = _from_json(plan, torch.device("cuda")).plan.values()
    for name, table in tables.items():
        shards = table.sharding_spec.shards if table.sharding_spec else []
        for shard in shards:
            rank, device = shard.placement.rank(), shard.placement.device()
            assert device.index == rank % ranks_per_node
            assert 0 <= rank < nodes * ranks_per_node
        if table.sharding_type == "table_row_wise":
            assert len({s.placement.rank() // ranks_per_node for s in shards}) == 1, name
        if table.sharding_type == "grid_shard":  # the rows of a column block stay on a node
            blocks = Counter((s.shard_offsets[1], s.placement.rank() // ranks_per_node) for s in shards)
            assert set(blocks.values()) == {ranks_per_node}, name
        covered = np.zeros((table_rows(config, name), config.model.embedding_dim), int)
        for shard in shards:
            (row, column), (height, width) = shard.shard_offsets, shard.shard_sizes
            covered[row : row + height, column : column + width] += 1
            assert height, name  # a shard without rows crashes on a CPU
        assert (covered == 1).all() or not shards, name


def table_rows(config: RunConfig, name: str) -> int:
    return config.data.tables()[name].rows


def losses(env, config: RunConfig, run: RunDir):
    with trainer(env, config, run) as one:
        return one.train(0, 6), one.parts()


@pytest.mark.parametrize("sharding", ["table_row_wise", "grid_shard"])
def test_two_nodes_of_two_ranks_learn_what_one_rank_learns(sharding, tmp_path):
    values = ["optimizer=sgd", "optimizer.learning_rate=5", "optimizer.dense_learning_rate=0.1"]
    one = tiny(*values, "sharding=table_wise")
    two_nodes = tiny(*values, f"sharding={sharding}", "cluster=slurm", "job.nodes=2", world_size=2)
    pool = Ranks(4)
    try:
        expected = pool(1, losses, one, RunDir.create(tmp_path, "one"))
        run = RunDir.create(tmp_path, "two")
        found = pool(4, losses, two_nodes, run)
    finally:
        pool.close()
    assert sharding in {t["type"] for t in read_json(run.plan_path)["tables"].values()}
    np.testing.assert_allclose(np.mean([f[0] for f in found], axis=0), expected[0][0], rtol=2e-6)
    trained, reference = whole([f[1] for f in found]), whole([e[1] for e in expected])
    for name, values in reference.items():
        np.testing.assert_allclose(trained[name], values, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "half",
    [
        ["sharding=row_wise", "sharding.forward_precision=fp16", "sharding.backward_precision=fp16"],
        ["sharding=table_wise", "model.table_precision=fp16"],
    ],
    ids=["on the wire", "of the tables"],
)
def test_half_precision_learns_nearly_the_same(ranks, tmp_path, half):
    values = ["optimizer=sgd", "optimizer.learning_rate=5", "optimizer.dense_learning_rate=0.1"]
    curves = [
        np.mean(
            [f[0] for f in ranks(2, losses, tiny(*values, *more, world_size=2), RunDir.create(tmp_path, "run"))], axis=0
        )
        for more in (["sharding=table_wise"], half)
    ]
    assert (curves[0] != curves[1]).any()
    np.testing.assert_allclose(curves[1], curves[0], rtol=2e-3)


# What the planner is told, and what it says.


def test_torchrec_gets_the_bandwidths_of_the_hardware_in_bytes_per_millisecond():
    config = compose("cluster=mi300x", "job.nodes=2")
    place = planning.torchrec_topology(config, 100 * GIB)
    assert (place.world_size, place.local_world_size) == (16, 8)
    assert place.hbm_mem_bw == 5300e9 / 1000
    assert place.ddr_mem_bw == 92e9 / 1000
    assert place.hbm_to_ddr_mem_bw == 64e9 / 1000
    assert (place.comms_bandwidths.intra_host_bw, place.comms_bandwidths.inter_host_bw) == (315e6, 50e6)
    assert {d.storage.hbm for d in place.devices} == {100 * GIB}


MLPERF = ["experiment=mlperf_dlrm_dcnv2"]


@pytest.mark.parametrize(
    ("cluster", "nodes"), [("mi300x", 1), ("mi300x", 2), ("mi300x", 4), ("mi300x", 16), ("mi250x", 16)]
)
def test_the_mlperf_model_fits_and_no_rank_is_over_its_budget(cluster, nodes):
    config = compose(*MLPERF, f"cluster={cluster}", f"job.nodes={nodes}")
    plan = planning.plan_of(config)
    assert all(r["hbm_bytes"] <= plan["table_bytes_per_rank"] for r in plan["ranks"])
    tables = sum(s["shape"][0] * s["shape"][1] for t in plan["tables"].values() for s in t["shards"])
    replicated = sum(t["rows"] * t["dim"] for t in plan["tables"].values() if not t["shards"])
    assert tables + replicated == 204_184_588 * 128
    text = render(plan, config)
    assert "checkpoint 194.8 GiB" in text
    assert "weights" in text
    assert "roofline" in text


def test_what_does_not_fit_says_by_how_much_and_what_was_tried_and_fits():
    config = compose(*MLPERF, "cluster=h100", "job.ranks_per_node=2", "sharding=table_wise")
    with pytest.raises(ConfigError) as error:
        planning.plan_of(config)
    (line,) = str(error.value).splitlines()
    assert line.startswith("sharding.type=table_wise: no plan fits 2 ranks: ")
    for words in ("194.7 GiB in all", "a rank has 57.4 GiB", "t_cat_0 38.1 GiB"):
        assert words in line
    advice = planning.advise(config)
    assert advice[0] == "optimizer.sparse=rowwise_adagrad model.table_precision=fp16"
    assert advice[-1] == "job.nodes=4"  # 8 ranks: two tables of 38 GiB and their state do not fit one of 4
    planning.plan_of(
        compose(*MLPERF, "cluster=h100", "job.ranks_per_node=2", "sharding=table_wise", *advice[0].split())
    )


def plan_again(env, config: RunConfig, run: RunDir) -> Plan:
    with trainer(env, config, run):
        return read_json(run.plan_path)


def test_ranks_use_a_plan_that_was_made_for_them_and_no_other(ranks, tmp_path):
    config, run = tiny("sharding=table_wise", world_size=2), RunDir.create(tmp_path, "run")
    plan = planning.plan_of(config)
    for table in plan["tables"].values():  # not what the planner would do
        table["ranks"] = [1]
        table["shards"][0]["rank"] = 1
    write_json(run.plan_path, plan)
    assert ranks(2, plan_again, config, run)[0] == plan
    assert plan["made_for"] == made_for(config)
    plan["made_for"]["hardware"]["host_memory_gb_per_s"] = 17.0
    write_json(run.plan_path, plan)
    assert ranks(2, plan_again, config, run)[0] == planning.plan_of(config)
