"""The stage of preflight that needs all ranks, with gloo; RCCL's part and clocks that differ are made up."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rechpc.errors import LaunchError
from rechpc.findings import TOGETHER, Level, problems, read_verdict
from rechpc.rank import tbe, together, transport
from rechpc.rank.together import Measured, judge
from rechpc.rules import dump
from rechpc.rundir import RunDir, write_text
from tests.configs import tiny

TWO_NODES = ("cluster=slurm", "job.nodes=2")
MIB = 1 << 20


def measured(node: str, **values) -> Measured:
    good = {"clock_s": 1000.0, "compute_s": 0.01, "reduce_bytes": MIB, "reduce_s": 0.01, "exchange_bytes": MIB}
    good |= {"exchange_s": 0.01, "large_bytes": 64 * MIB, "large_s": 0.01, "ring_s": 0.01, "transport": None}
    return Measured(node=node, **{**good, **values})


def bad(found) -> dict[str, list[str]]:
    return {report.node: why for report in found if (why := problems(report.findings))}


def meets(env, config, attempt):
    """On a rank: the whole stage; what it raised."""
    try:
        with together.start(config, attempt, env) as here:
            return here.agree("met")
    except LaunchError as error:
        import torch.distributed as dist

        dist.destroy_process_group()
        return str(error)


@pytest.fixture
def attempt(tmp_path):
    return RunDir.create(tmp_path, "x").start_attempt("1.0")


def test_two_nodes_that_can_talk_leave_a_verdict_with_the_sizes_of_the_run(ranks, attempt):
    config = tiny(*TWO_NODES, "preflight.straggler_factor=1000")
    assert ranks(2, meets, config, attempt) == ["met", "met"]
    verdict = read_verdict(attempt)
    assert verdict.bad == {}
    (report,) = verdict.reports
    texts = {f.check: f.text for f in report.findings}
    assert "all-reduce of" in texts["a step's exchange"]
    assert "not judged: cluster.device=cpu" in texts["bandwidth"]


def test_all_ranks_refuse_a_network_far_below_the_profile(ranks, attempt):
    keys = ("preflight.min_bandwidth_share=0.5", "cluster.inter_node_gb_per_s=100000")
    words = ranks(2, meets, tiny(*TWO_NODES, *keys), attempt)
    assert words[0] == words[1]
    assert words[0].startswith("preflight: all nodes: bandwidth: all-to-all of 1.0 MiB a rank: ")
    assert "cluster.inter_node_gb_per_s=100000; expected preflight.min_bandwidth_share=0.5" in words[0]
    assert read_verdict(attempt).to_exclude == {}


def test_a_rank_whose_peers_never_come_gives_up_in_time_and_says_who_is_missing(tmp_path):
    run = RunDir.create(tmp_path, "x")
    attempt = run.start_attempt("1.0")
    attempt.preflight_folder.mkdir()
    write_text(attempt.node_report_path(1), '{"node": "n2", "findings": []}')
    attempt.rank_log_path(0).write_text("")
    write_text(run.config_path, dump(tiny(*TWO_NODES, "preflight.timeout_s=2")))
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    code = (
        "import sys; from pathlib import Path; from rechpc.rank import together; from rechpc.rules import load; "
        "from rechpc.rundir import RunDir; from rechpc.topology import RankEnv; run = RunDir(Path(sys.argv[1])); "
        "together.start(load(run.config_path), run.attempt('1.0'), RankEnv.from_environment()).__enter__()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run.path)], env={**os.environ, **env}, timeout=120, check=False
    )
    assert done.returncode == 1
    error = attempt.first_error()["error"]
    assert error.startswith(
        "preflight: the meeting of all ranks did not end within preflight.timeout_s=2; ranks 1 (node n2)"
    )


def test_where_all_ranks_have_started_the_network_is_to_blame(attempt):
    config = tiny(*TWO_NODES)
    for rank in (0, 1):
        attempt.rank_log_path(rank).write_text("")
    assert "container.env.GLOO_SOCKET_IFNAME" in together.missing(config, attempt)


def test_a_wrong_clock_is_its_node_s_failure():
    found = bad(judge(tiny(*TWO_NODES), [measured("n1"), measured("n2"), measured("n3", clock_s=1042.0)]))
    assert found.keys() == {"n3"}
    assert "clock: +42.0 s from the median of all nodes, expected within preflight.max_clock_skew_s=5" in found["n3"][0]


def test_a_slow_rank_is_named_and_does_not_end_the_run():
    reports = judge(tiny(*TWO_NODES), [measured("n1"), measured("n1"), measured("n2", compute_s=0.05), measured("n2")])
    assert bad(reports) == {}
    (slow,) = [f for r in reports for f in r.findings if f.level is Level.warning]
    assert slow.text.startswith("rank 2 computes 5.0 times slower than the median")


def test_the_node_whose_rccl_took_sockets_is_named():
    ways = {
        "n1": transport.Transport(name="NET/IB", with_rdma_to_gpu=True, reason=None),
        "n2": transport.Transport(name="NET/Socket", with_rdma_to_gpu=False, reason=None),
    }
    ranks = [measured(node, transport=way) for node, way in ways.items()]
    assert bad(judge(tiny(*TWO_NODES), ranks)).keys() == {"n2"}
    assert bad(judge(tiny(*TWO_NODES, "preflight.allow_sockets=true"), ranks)) == {}


@pytest.mark.parametrize(("direct", "level"), [(True, Level.ok), (False, Level.warning)])
def test_a_way_through_host_memory_is_noted(direct, level):
    way = transport.Transport(name="NET/IB", with_rdma_to_gpu=direct, reason=None)
    found = judge(tiny(*TWO_NODES), [measured("n1", transport=way), measured("n2", transport=way)])
    (together_,) = [r for r in found if r.node == TOGETHER]
    assert {f.check: f.level for f in together_.findings}["transport"] is level


def test_bandwidth_is_judged_by_the_slower_of_both_ways():
    config = tiny(*TWO_NODES, "preflight.min_bandwidth_share=0.3", "cluster.inter_node_gb_per_s=10")
    seconds = 32 * MIB / 10e9
    ranks = [measured("n1", large_s=seconds), measured("n2", large_s=2 * seconds)]
    assert bad(judge(config, ranks)) == {}
    slow = bad(judge(config, [dataclasses.replace(m, large_s=10 * seconds) for m in ranks]))
    assert "1 GB/s, 10% of what the profile promises" in slow[TOGETHER][0]


def test_the_node_with_the_slow_link_is_named_where_bandwidth_is_missing():
    keys = ("preflight.min_bandwidth_share=0.9", "cluster.inter_node_gb_per_s=100000")
    ring_s = {"n1": 0.01, "n2": 0.5, "n3": 0.5, "n4": 0.01}  # n2 receives late, and n3 from it
    ranks = [measured(node, ring_s=seconds) for node, seconds in ring_s.items()]
    config = tiny("cluster=slurm", "job.nodes=4", *keys)
    found = bad(judge(config, ranks))
    assert found.keys() == {"n2", TOGETHER}
    assert found["n2"][0].startswith("link: 0.134 GB/s in and 0.134 GB/s out, where the best of")
    assert bad(judge(config, [dataclasses.replace(m, ring_s=0.01) for m in ranks])).keys() == {TOGETHER}


def test_the_embeddings_of_fbgemm_equal_those_of_torch_and_wrong_ones_are_told(monkeypatch):
    assert tbe.difference("cpu", batch=64, features=3, dim=16) is None
    monkeypatch.setattr(tbe, "_TOLERANCE", -1.0)  # stands in for a kernel that computes wrong numbers
    text = tbe.difference("cpu", batch=64, features=3, dim=16)
    assert text.startswith("the output of feature 0: off by ")
    assert " on cpu at 64 samples x 3 features of 16 columns: FBGEMM computes wrong numbers" in text


def test_the_probe_of_a_cpu_node_runs_to_its_end(tmp_path):
    run = RunDir.create(tmp_path, "x")
    write_text(run.config_path, dump(tiny()))
    out = tmp_path / "out.json"
    subprocess.run([sys.executable, "-m", "rechpc.rank.probe", str(run.path), str(out)], timeout=120, check=True)
    import json

    levels = {f["check"]: f["level"] for f in json.loads(Path(out).read_text())["findings"]}
    assert (levels["TBE"], levels["GPUs of torch"], levels["kernel caches"]) == ("ok", "skipped", "ok")
