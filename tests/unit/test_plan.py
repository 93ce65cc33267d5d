"""Planning from the login node: rechpc.plan as a user meets it, and what rechpc.submit refuses before the queue."""

import dataclasses
import sys
from pathlib import Path

import pytest

from rechpc import compose, plan, submit
from rechpc.config import ClusterConfig, ShardingConfig, ShardingType, TableSharding
from rechpc.errors import LaunchError
from rechpc.host import planner
from rechpc.rundir import read_json
from rechpc.topology import GIB, check_gpu

# 238 GiB with Adagrad's state: too much for one GPU, little for eight.
BIG = ["data.sparse=[{name: big, rows: 2_000_000_000}, {name: small, rows: 100}]", "job.ranks_per_node=8"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One for all tests: a plan that one of them has asked for is quick for the others."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def command(monkeypatch, tmp_path, capsys, home):
    """Run an entry in this process, in an empty directory: exit status, stdout, stderr."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("HOME", str(home))

    def run(entry, *overrides):
        monkeypatch.setattr(sys, "argv", [entry.__name__, *overrides])
        with pytest.raises(SystemExit) as exit_:
            compose.run(entry.main, entry.HELP, each=getattr(entry, "compare", None))
        return exit_.value.code, *capsys.readouterr()

    return run


def no_child(*_):
    raise AssertionError("a child process was started")


def test_a_plan_is_a_page_and_a_file_and_the_second_one_comes_from_the_cache(command, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    asked = ["cluster=mi300x", *BIG, "out=plan.json"]
    code, page, progress = command(plan, *asked)
    assert (code, progress) == (0, "planning 1 run(s) with the torch of this Python ...\n")
    assert "1 x 8 gfx942 with 192 GiB" in page
    assert "column_wise" in page or "row_wise" in page
    first = Path("plan.json").read_text()
    assert read_json(Path("plan.json"))["format"] == 2
    monkeypatch.setattr(planner, "_ask", no_child)
    assert command(plan, *asked) == (0, page, "")
    assert Path("plan.json").read_text() == first
    with pytest.raises(AssertionError, match="child"):
        command(plan, *asked, "sharding.reserve=0.2")


def test_sizes_are_compared_one_a_line_with_the_reason_where_one_does_not_fit(command):
    asked = ["cluster=mi250x", "job.ranks_per_node=1", "sharding=row_wise", BIG[0]]
    code, out, _ = command(plan, *asked, "-m", "job.nodes=2,3,8")
    two, three, eight = out.splitlines()
    assert code == 0
    assert two.startswith(
        "job.nodes=2  does not fit; fits with optimizer.sparse=rowwise_adagrad model.table_precision=fp16"
    )
    assert three.startswith("job.nodes=3  refused: trainer.global_batch=2048: 3 ranks (3 x 1) do not divide it")
    assert eight.startswith("job.nodes=8     8 nodes     8 ranks  fits, fullest at ")


def test_a_plan_that_does_not_fit_lists_what_would(command):
    code, out, _ = command(plan, "cluster=mi300x", "sharding=table_wise", *BIG)
    first, *changes = out.splitlines()
    assert code == 2
    assert first.startswith("sharding.type=table_wise: no plan fits 8 ranks: ")
    assert changes[0] == "fits with   sharding=auto"


def test_without_torch_and_an_image_it_says_where_to_plan(command, monkeypatch):
    monkeypatch.setattr(planner, "has_torch", lambda config: False)
    code, out, err = command(plan, "cluster=mi300x")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("rechpc.plan needs torch")


def test_submit_refuses_by_arithmetic_at_once(command, monkeypatch):
    monkeypatch.setattr(planner, "_ask", no_child)
    code, out, err = command(submit, "cluster=mi250x", "stage=true", "job.ranks_per_node=2", BIG[0])
    assert (code, out) == (2, "")
    assert "at least 119.2 GiB on each of 2 ranks, which have 54.4 GiB" in err
    assert err.endswith("force=true submits all the same\n")
    assert list(Path.cwd().iterdir()) == []


def test_submit_refuses_what_no_plan_fits_says_what_would_and_can_be_forced(command):
    asked = ["cluster=mi300x", "stage=true", "sharding=table_wise", "runs_root=runs", *BIG]
    code, out, err = command(submit, *asked)
    assert (code, out) == (2, "")
    assert "no plan fits 8 ranks: " in err
    assert "; sharding=auto fits; " in err
    assert list(Path.cwd().iterdir()) == []
    code, out, _ = command(submit, *asked, "force=true")
    assert code == 0
    assert out.startswith("force=true  sharding.type=table_wise: no plan fits")


def test_submit_gives_the_ranks_the_plan_that_it_made(command):
    code, out, _ = command(submit, "cluster=mi300x", "stage=true", "runs_root=runs", *BIG)
    assert code == 0
    assert out.startswith("plan           1 nodes     8 ranks  fits")
    (run,) = Path("runs/dlrm").iterdir()
    command(plan, "cluster=mi300x", "out=plan.json", *BIG)
    assert read_json(run / "plan.json") == read_json(Path("plan.json"))
    assert (run / "plan.txt").exists()


def test_submit_without_torch_says_that_it_checked_by_arithmetic_alone(command, monkeypatch):
    monkeypatch.setattr(planner, "has_torch", lambda config: False)
    code, out, _ = command(submit, "cluster=mi300x", "stage=true", "runs_root=runs", *BIG)
    assert code == 0
    assert out.startswith("plan        not made here, without torch or an image; memory was checked by arithmetic")


def test_submit_needs_to_know_the_gpu(command):
    code, _, err = command(submit, "cluster=slurm", "cluster.device=cuda", "stage=true")
    assert code == 2
    assert "cluster.hbm_gib=0: cluster.device=cuda needs the hardware of a GPU; choose cluster=mi300x" in err


MI300X = ClusterConfig(gpu_arch="gfx942", hbm_gib=192)


def test_a_run_accepts_the_gpu_that_was_planned_for_with_what_its_driver_keeps():
    check_gpu(MI300X, arch="gfx942", memory_bytes=int(191.7 * GIB))
    check_gpu(dataclasses.replace(MI300X, gpu_arch=None), arch="gfx950", memory_bytes=192 * GIB)


@pytest.mark.parametrize(("arch", "gib"), [("gfx942", 256), ("gfx90a", 192), ("gfx942", 64)])
def test_a_run_stops_on_another_gpu_also_of_the_same_architecture(arch, gib):
    with pytest.raises(LaunchError, match=f"this GPU is {arch} with {gib}.0 GiB, and the plan was made for another"):
        check_gpu(MI300X, arch=arch, memory_bytes=gib * GIB)


def test_a_run_on_a_gpu_that_nobody_described_names_the_keys():
    with pytest.raises(LaunchError, match=r"set cluster\.gpu_arch=gfx950 cluster\.hbm_gib=288\.0"):
        check_gpu(ClusterConfig(), arch="gfx950", memory_bytes=288 * GIB)


def test_the_last_pattern_that_sets_a_key_decides_and_the_rest_stays():
    config = ShardingConfig(
        type=ShardingType.table_wise,
        column_width=8,
        tables={
            "t_*": TableSharding(types=[ShardingType.row_wise], column_width=16),
            "t_a*": TableSharding(types=[ShardingType.column_wise]),
        },
    )
    assert (config.of("t_ab").types, config.of("t_ab").column_width) == ([ShardingType.column_wise], 16)
    assert (config.of("t_b").types, config.of("t_b").column_width) == ([ShardingType.row_wise], 16)
    assert (config.of("u").types, config.of("u").column_width) == ([ShardingType.table_wise], 8)
