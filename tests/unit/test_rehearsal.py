"""cluster=rehearsal: what becomes of a job, and how a user asks for it."""

import sys
from pathlib import Path

import pytest

from rechpc import compose as product
from rechpc import submit
from rechpc.config import Device, Kernel, Launcher, Precision, ShardingType
from rechpc.host import task
from rechpc.rehearsal import describe, scaled
from rechpc.rules import dump, load, validate
from rechpc.rundir import RunDir
from tests.configs import compose

TABLES = "data.sparse=[{name: a, rows: 400_000}, {name: b, rows: 3}, {name: c, rows: 5000}, {name: 'd[1]', rows: 11}]"
TYPES = {"t_a": "row_wise", "t_b": "data_parallel", "t_c": "column_wise", "t_d[1]": "table_row_wise"}
JOB = ["cluster=rehearsal", "cluster.rehearsal.of=mi250x", "job.nodes=16", "trainer.global_batch=12800", TABLES]


def plan(width: int = 8) -> dict:
    """What scaled() reads of a plan; those of the planner are in tests/local."""
    return {"tables": {n: {"type": t, "dim": 16, "shards": [{"shape": [9, width]}]} for n, t in TYPES.items()}}


def test_the_job_is_that_of_the_other_cluster_with_what_is_overridden_there():
    job = compose(*JOB, "cluster.hbm_gib=60", "cluster.rehearsal.steps=8")
    assert (job.cluster.gpu_arch, job.cluster.hbm_gib, job.world_size) == ("gfx90a", 60, 128)
    assert (job.cluster.rehearsal.of, job.cluster.rehearsal.steps) == ("mi250x", 8)


def test_every_table_keeps_the_type_of_the_plan():
    run = scaled(compose(*JOB), plan())
    assert {name: str(run.sharding.of(name).types[0]) for name in run.data.tables()} == TYPES
    assert run.sharding.of("t_c").column_width == 8


def test_a_width_of_the_plan_that_does_not_divide_is_left_to_the_planner_here():
    assert scaled(compose(*JOB), plan(width=12)).sharding.of("t_c").column_width is None


@pytest.mark.parametrize(("nodes", "ranks", "share"), [(2, 2, 0.001), (3, 4, 0.1), (5, 1, 1.0), (1, 1, 1e-9)])
def test_no_part_of_a_table_that_is_cut_by_rows_is_empty(nodes, ranks, share):
    sizes = {"nodes": nodes, "ranks_per_node": ranks, "row_share": share}
    run = scaled(compose(*JOB, *(f"cluster.rehearsal.{key}={value}" for key, value in sizes.items())), plan())
    assert (run.job.nodes, run.ranks_per_node, run.machines) == (nodes, ranks, 1)
    for table in run.data.tables().values():
        for parts in (run.world_size, run.ranks_per_node):
            block = -(-table.rows // parts)
            assert block * (parts - 1) < table.rows


def test_a_small_job_is_played_with_all_its_ranks_and_no_more():
    run = scaled(compose(*JOB, "job.nodes=1", "job.ranks_per_node=1", "cluster.rehearsal.nodes=4"), plan())
    assert run.world_size == 1


def test_it_is_short_saves_half_way_and_reads_no_more_than_it_trains_on():
    job = compose(*JOB, "trainer.epochs=9", "trainer.eval_every=5000", "checkpoint.every=3200")
    run = scaled(job, plan())
    assert (run.trainer.max_steps, run.trainer.eval_every, run.checkpoint.every) == (20, 10, 10)
    assert run.trainer.global_batch == 4 * 16
    synthetic = run.data.synthetic
    assert {run.data.rehearsal_rows, synthetic.train_rows, synthetic.val_rows, synthetic.test_rows} == {20 * 64}
    assert not run.data.verify_checksums
    assert run.name == f"rehearsal-{job.name}"


def test_what_a_cpu_cannot_is_replaced_and_said():
    job = compose(*JOB, "sharding.forward_precision=bf16", "sharding.kernel=fused_uvm_caching")
    run = scaled(job, plan())
    assert (run.cluster.device, run.cluster.launcher) == (Device.cpu, Launcher.local)
    assert (run.sharding.forward_precision, run.sharding.backward_precision) == (Precision.fp16, Precision.fp32)
    assert run.sharding.kernel is Kernel.fused
    text = describe(job, run)
    assert text.startswith("of 16 x 8 ranks of mi250x as 2 x 2 CPU ranks: 0.001 of the rows, 20 steps of 64 samples")
    assert "forward_precision=fp16 for bf16" in text
    assert "kernel fused" in text
    assert "backward_precision" not in text


def test_the_run_is_valid_and_reads_back(tmp_path):
    run = scaled(compose(*JOB, "checkpoint.init_from=somewhere", "checkpoint.init_exclude=[over*]"), plan())
    assert run.checkpoint.init_from is None
    validate(run)
    (tmp_path / "config.yaml").write_text(dump(run))
    assert load(tmp_path / "config.yaml").sharding.tables["t_d[[]1]"].types == [ShardingType.table_row_wise]


def test_one_torchrun_plays_all_nodes():
    run = scaled(compose(*JOB, "cluster.rehearsal.nodes=3"), plan())
    argv = task.torchrun_argv(run, RunDir(Path("/runs/a/b")), attempt_name="7.0")
    assert " ".join(argv[4:8]) == "--nnodes 1 --nproc-per-node 6"
    env = task.rank_environment(run, {}, code_path=Path("/code"), cpus=12)
    assert (env["GLOO_SOCKET_IFNAME"], env["OMP_NUM_THREADS"]) == ("lo", "2")


# As a user meets it.


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Run submit in this process, in an empty directory: exit status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def run(*overrides):
        monkeypatch.setattr(sys, "argv", ["submit", *overrides])
        with pytest.raises(SystemExit) as exit_:
            product.run(submit.main, submit.HELP)
        return exit_.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["cluster.rehearsal.of=mi300y"], ["cluster=mi300y: no such option", "mi300x"]),
        (["cluster.rehearsal.of=rehearsal"], ["cluster.launcher"]),
        (["cluster.rehearsal.row_share=2"], ["cluster.rehearsal.row_share=2", "at most 1"]),
        (["cluster.rehearsal.node=2"], ["cluster.rehearsal.node: no such key", "cluster.rehearsal.nodes"]),
        # Of the job itself, whose ranks are those of the real cluster.
        (["job.nodes=3", "trainer.global_batch=2048"], ["24 ranks (3 x 8)", "trainer.global_batch=2040 or 2064"]),
        (["cluster.hbm_gib=0"], ["cluster.hbm_gib=0"]),
        (["data.sparse=[{name: a, rows: 2_000_000_000}]", "job.ranks_per_node=1"], ["no plan fits 1 ranks"]),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(command, tmp_path, overrides, words):
    code, out, err = command("cluster=rehearsal", *overrides)
    assert (code, out) == (2, "")
    line = err.splitlines()[-1]
    assert all(word in line for word in words), err
    assert not (tmp_path / "runs").exists()
