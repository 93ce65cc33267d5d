"""The memory arithmetic of a dry run, against numbers worked out by hand."""

import pytest

from rechpc import memory
from rechpc.config import ShardingType
from rechpc.errors import ConfigError
from rechpc.topology import GIB

TABLES = ["{name: a, rows: 1_000}", "{name: b, rows: 300}", "{name: c, rows: 300, table: t_b}", "{name: d, rows: 7}"]


@pytest.fixture
def config(make_config):
    def make(*overrides):
        return make_config(f"data.sparse=[{', '.join(TABLES)}]", *overrides)

    return make


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"),
    [("sgd", [0, 0, 0]), ("adagrad", [64_000, 19_200, 448]), ("rowwise_adagrad", [4_000, 1_200, 28])],
)
def test_weights_are_four_bytes_an_element_and_state_depends_on_the_optimizer(config, optimizer, state_bytes):
    tables = memory.tables(config(f"optimizer={optimizer}"))
    assert [t.name for t in tables] == ["t_a", "t_b", "t_d"]
    assert [t.weight_bytes for t in tables] == [64_000, 19_200, 448]
    assert [t.optimizer_bytes for t in tables] == state_bytes


@pytest.mark.parametrize(
    ("sharding", "largest"),
    [
        ("data_parallel", 83_648),
        ("row_wise", (500 + 150 + 4) * 64),
        ("table_wise", 64_000),
        ("column_wise", 41_824),
        ("auto", 41_824),
    ],
)
def test_the_fullest_of_two_ranks(config, sharding, largest):
    tables = memory.tables(config("optimizer=sgd"))
    assert memory.largest_rank_bytes(tables, ShardingType(sharding), world_size=2) == largest


def test_gpu_memory_is_what_the_reserve_leaves_and_unknown_memory_is_not_guessed(config):
    gpu = ["cluster=slurm", "cluster.device=cuda", "sharding.reserve=0.25"]
    assert memory.capacity_bytes(config(*gpu, "cluster.hbm_gib=64")) == 48 * GIB
    assert memory.capacity_bytes(config(*gpu)) is None
    assert memory.capacity_bytes(config("cluster=slurm")) is None
    assert memory.capacity_bytes(config("cluster=slurm", "cluster.host_memory_gib=8")) == 4 * GIB


def test_a_rank_that_cannot_hold_its_tables_is_said_in_the_report(make_config):
    big = ["data.sparse=[{name: a, rows: 1_000_000_000}]", "cluster=slurm", "cluster.device=cuda", "cluster.hbm_gib=64"]
    text = memory.report(make_config(*big, "sharding.reserve=0"))
    assert ["t_a", "1,000,000,000", "16", "59.6", "GiB", "59.6", "GiB"] in [line.split() for line in text.splitlines()]
    assert "largest of 2 ranks, sharding auto: 59.6 GiB if shared evenly" in text
    assert "a rank has 64.0 GiB for tables, 93.1% of it used" in text
    text = memory.report(make_config(*big, "sharding.reserve=0.5"))
    assert "a rank has 32.0 GiB for tables: TOO LITTLE; all tables together need at least 4 ranks" in text


def test_the_copy_of_a_save_beside_training_counts_to_the_memory_of_a_node(make_config):
    rows = 1 << 26  # of 16 columns: 4 GiB
    big = [f"data.sparse=[{{name: a, rows: {rows}}}]", "optimizer=sgd", "job.nodes=2", "cluster.launcher=slurm"]
    memory.check(make_config(*big, "job.memory_gib=4"))
    assert "a node takes 4.0 GiB of host memory for tables and the copy that is" in memory.report(make_config(*big))
    with pytest.raises(
        ConfigError, match=r"job.memory_gib=3: a node needs at least 4\.0 GiB of host memory for tables"
    ):
        memory.check(make_config(*big, "job.memory_gib=3"))
    assert "saved beside training: TOO MUCH for job.memory_gib=3" in memory.report(
        make_config(*big, "job.memory_gib=3")
    )
    memory.check(make_config(*big, "job.memory_gib=3", "checkpoint.asynchronous=false"))
