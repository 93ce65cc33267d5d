"""Each check of preflight failing on purpose, with the words that a user gets.

Nodes, tools and logs here are fakes: trees that look like /sys of AMD's driver, lines as RCCL writes them. Nothing of
it has run on an AMD GPU. The stages themselves run on the real cluster in tests/slurm.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rechpc import preflight, state
from rechpc.config import RunConfig
from rechpc.errors import ConfigError, LaunchError
from rechpc.findings import TOGETHER, Finding, Level, Report, Verdict, has_preflight, problems, read_verdict
from rechpc.host import finish, node, nodes, provenance, slurm, task
from rechpc.host import preflight as stage
from rechpc.rank import probe, transport
from rechpc.rundir import AttemptDir, Outcome, RunDir, read_json, write_text
from rechpc.sight import Gpu, Sight, look
from tests.configs import changed

GIB = 1 << 30
MI300X = ("cluster=mi300x", "trainer.global_batch=2048")


def fake_node(root: Path, *, gpus: int = 2, version: int = 90402, used: int = 0, holder: int | None = None) -> Path:
    """A tree like that of a node with AMD GPUs, as the kernel's documentation describes it."""
    kfd = root / "sys/class/kfd/kfd"
    files = {
        kfd / "topology/nodes/0/properties": "cpu_cores_count 64\nsimd_count 0\ngfx_target_version 0\n",
        root / "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 2097152 kB\n",
        root / "dev/kfd": "",
    }
    for i in range(gpus):
        minor = 128 + i
        files |= {
            kfd / f"topology/nodes/{i + 1}/properties": f"simd_count 1216\ngfx_target_version {version}\n"
            f"drm_render_minor {minor}\n",
            kfd / f"topology/nodes/{i + 1}/gpu_id": f"{7000 + i}\n",
            root / f"sys/class/drm/renderD{minor}/device/mem_info_vram_total": f"{192 * GIB}\n",
            root / f"sys/class/drm/renderD{minor}/device/mem_info_vram_used": f"{used}\n",
            root / f"dev/dri/renderD{minor}": "",
        }
    if holder:
        files |= {kfd / f"proc/{holder}/vram_7000": f"{used}\n", root / f"proc/{holder}/comm": "python3\n"}
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "dev/shm").mkdir()
    return root


def sight(**values) -> Sight:
    """A node of 8 free MI300X."""
    gpus = [Gpu(arch="gfx942", memory_bytes=192 * GIB, used_bytes=0, holders=[]) for _ in range(8)]
    devices = {"/dev/kfd": "", "/dev/dri/renderD128": ""}
    good = {"gpus": gpus, "devices": devices, "shm_free_bytes": 64 * GIB, "memory_free_bytes": 99 * GIB}
    return Sight(**{**good, **values})


def failures(found: list[Finding]) -> str:
    return "\n".join(problems(found))


def on(seen: Sight, *overrides: str, env: dict[str, str] | None = None) -> str:
    """What fails on a node that looks like this."""
    return failures(node.check(changed(*MI300X, *overrides), seen, env=env or {}))


# What a node shows


@pytest.mark.parametrize(("version", "arch"), [(90402, "gfx942"), (90010, "gfx90a"), (90500, "gfx950")])
def test_the_driver_s_number_of_an_architecture_is_read_as_its_name(tmp_path, version, arch):
    seen = look([], root=fake_node(tmp_path, version=version))
    assert [gpu.arch for gpu in seen.gpus] == [arch, arch]
    assert seen.memory_free_bytes == 2 * GIB
    assert seen.devices == dict.fromkeys(["/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD129"], "")


def test_who_holds_a_gpu_s_memory_is_named(tmp_path):
    seen = look([], root=fake_node(tmp_path, used=100 * GIB, holder=4711))
    assert (seen.gpus[0].used_bytes, seen.gpus[0].holders, seen.gpus[1].holders) == (100 * GIB, ["4711 (python3)"], [])


def test_a_gpu_of_another_job_whose_properties_are_hidden_is_not_counted(tmp_path):
    (fake_node(tmp_path) / "sys/class/kfd/kfd/topology/nodes/2/properties").unlink()
    assert len(look([], root=tmp_path).gpus) == 1


def test_a_look_survives_json(tmp_path):
    seen = look(["/dev/nothing"], root=fake_node(tmp_path))
    assert Sight.of(seen.as_dict()) == seen
    assert seen.devices["/dev/nothing"] == "no such file or directory"


# One node


def test_a_good_node_passes():
    assert on(sight()) == ""


@pytest.mark.parametrize(
    ("seen", "overrides", "words"),
    [
        (
            {"devices": {"/dev/kfd": "no such file or directory"}},
            (),
            "GPU devices: /dev/kfd: no such file or directory;",
        ),
        ({"devices": {"/dev/kfd": ""}}, (), "/dev/dri/renderD*: no such file; the kernel driver (amdgpu)"),
        (
            {"devices": {"/dev/kfd": "not readable and writable: it is of group render, you are in users"}},
            (),
            "it is of group render, you are in users; the kernel driver (amdgpu) is not loaded, or you lack the groups",
        ),
        ({"gpus": []}, (), "GPUs: 0 of the 8 GPUs that job.ranks_per_node=8 needs"),
        ({}, ("cluster.gpu_arch=gfx950",), "architecture: gfx942, expected cluster.gpu_arch=gfx950"),
        (
            {"gpus": [Gpu(arch="gfx942", memory_bytes=192 * GIB, used_bytes=150 * GIB, holders=["77 (vllm)"])] * 8},
            (),
            "GPU memory: GPU 0: 42.0 of 192.0 GiB free, held by 77 (vllm)",
        ),
        ({"rdma": ["mlx5_0"], "memlock_bytes": 65536}, (), "memlock: ulimit -l is 64 KiB, expected unlimited"),
        ({"shm_free_bytes": 0}, (), "/dev/shm: 0.0 GiB free, expected preflight.min_free_gib=1"),
        ({"memory_free_bytes": GIB // 2}, (), "host memory: 0.5 GiB free, expected preflight.min_memory_gib=1"),
        ({}, ("preflight.min_free_gib=1e9",), "GiB free, expected preflight.min_free_gib=1e+09"),
        ({}, ("data.path=/no/such",), "data: data.path=/no/such: not readable here"),
        (
            {"devices": {"/dev/kfd": "", "/dev/dri/renderD128": "", "/dev/cxi0": "no such file or directory"}},
            ("preflight.devices=[/dev/cxi0]",),
            "devices: /dev/cxi0: no such file or directory; preflight.devices says that every node has it",
        ),
    ],
)
def test_a_bad_node_says_what_is_wrong(seen, overrides, words):
    assert words in on(sight(**seen), *overrides)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1"}, "filters twice"),
        ({"ROCR_VISIBLE_DEVICES": "0"}, "ROCR_VISIBLE_DEVICES=0: fewer GPUs than job.ranks_per_node=8"),
    ],
)
def test_masks_that_leave_too_few_gpus_are_refused(env, words):
    assert words in on(sight(), env=env)


def test_a_temporary_directory_that_cannot_be_written_is_refused(monkeypatch, tmp_path):
    place = tmp_path / "file"
    place.write_text("")
    monkeypatch.setattr(node.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(node.secrets, "token_hex", lambda _: "x/x")
    assert "set TMPDIR in job.setup" in on(sight())


def test_on_cpus_the_checks_of_gpus_say_that_they_do_not_apply():
    found = node.check(changed(), Sight(shm_free_bytes=9 * GIB, memory_free_bytes=9 * GIB), env={})
    skipped = {f.check: f.text for f in found if f.level is Level.skipped}
    assert failures(found) == ""
    assert {"GPU devices", "GPUs", "memlock"} <= skipped.keys()
    assert skipped["GPUs"] == "does not apply: cluster.device=cpu"


def test_a_node_without_the_runtime_of_the_container_is_a_bad_node(monkeypatch, tmp_path):
    (tmp_path / "i.sif").write_text("")
    monkeypatch.setenv("PATH", "/nowhere")
    words = on(sight(), "container=apptainer", f"container.image={tmp_path}/i.sif")
    assert "container: container.runtime=apptainer: apptainer is not on the PATH of this node" in words


# Into the container


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        ({"gpus": []}, "0 of 8 GPUs in /sys/class/kfd"),
        ({"devices": {"/dev/kfd": ""}}, "/dev/dri/renderD128 cannot be used inside (not there)"),
        ({"memlock_bytes": 65536}, "ulimit -l is 65536 bytes inside, None outside"),
    ],
)
def test_a_container_that_sees_less_than_its_host_is_refused(inside, words):
    text = failures([stage.compare(sight(), sight(**inside))])
    assert words in text
    assert "container.binds" in text


def test_adapters_that_are_missing_in_the_container_are_named():
    text = failures([stage.compare(sight(rdma=["mlx5_0", "mlx5_1"]), sight(rdma=["mlx5_1"]))])
    assert "network adapters mlx5_0 are missing inside" in text


def test_a_library_that_does_not_load_is_named():
    (found,) = probe._libraries(["librccl-net-of-nobody.so"])
    assert "bind it with container.binds, or correct preflight.libraries" in found.text


def test_adapters_that_libibverbs_cannot_drive_are_refused(monkeypatch):
    """A stand-in for libibverbs without the provider of the second adapter."""

    class Verbs:
        class ibv_get_device_list:
            def __new__(cls, count):
                count._obj.value = 1

    monkeypatch.setattr(probe.ctypes, "CDLL", lambda _: Verbs)
    assert probe._verbs(["bnxt_re0"]).level is Level.ok
    text = probe._verbs(["bnxt_re0", "bnxt_re1"]).text
    assert "libibverbs drives 1 of 2 adapters (bnxt_re0, bnxt_re1)" in text
    assert "lib*-rdmav*.so" in text


def test_a_cache_of_kernels_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", f"{tmp_path}/file/x")
    assert f"TRITON_CACHE_DIR={tmp_path}/file/x: Not a directory" in probe._caches().text


def test_fbgemm_without_code_for_the_gpu_is_refused_and_compressed_code_only_noted(tmp_path):
    """Fake libraries: the names that hipcc writes into bundles, between other bytes."""
    (tmp_path / "a.so").write_bytes(b"\x7fELF..hipv4-amdgcn-amd-amdhsa--gfx942:sramecc+..")
    (tmp_path / "empty.so").write_bytes(b"")
    assert probe.code_for("gfx942", tmp_path).level is Level.ok
    refused = probe.code_for("gfx950", tmp_path)
    assert (refused.level, "code for gfx942 and this is gfx950" in refused.text) == (Level.failed, True)
    (tmp_path / "a.so").write_bytes(b"\x7fELF..CCOB\x02..")
    assert probe.code_for("gfx942", tmp_path).level is Level.warning


@pytest.mark.parametrize(
    ("how", "log", "words"),
    [
        (
            stage._exit(-11),
            "phase=small TBE on GPU 0 (gfx950)\n",
            "killed by SIGSEGV at: small TBE on GPU 0 (gfx950); FBGEMM",
        ),
        (stage._exit(139), "phase=import torch\n", "killed by SIGSEGV at: import torch"),
        (
            stage._exit(255),
            "FATAL: no image\n",
            "ended with status 255; the container or torch in it does not start here",
        ),
        ("did not end", "phase=a\nphase=loading librccl-net.so\n", "did not end at: loading librccl-net.so"),
    ],
)
def test_a_probe_that_crashes_says_at_what(how, log, words):
    assert stage.crash(how, log).startswith(words)


# The stage of the nodes, with a stand-in for the probe


def run_stage(config: RunConfig, attempt: AttemptDir, rank: int, script: str, **options) -> None:
    here = slurm.Placement(
        attempt_name="1.0", node_rank=rank, num_nodes=config.job.nodes, node_name=f"n{rank}", parent_pid=None
    )

    def argv(out: Path) -> list[str]:
        return [sys.executable, "-c", script, str(out)]

    given = {"env": {}, "meet": None, "stopped": lambda: False} | options
    stage.NodeStage(config, attempt, here).run(argv, **given)


GOOD_PROBE = """
import json, sys
from rechpc.sight import look
json.dump({"sight": look([]).as_dict(), "findings": []}, open(sys.argv[1], "w"))
"""


@pytest.fixture
def attempt(tmp_path) -> AttemptDir:
    return RunDir.create(tmp_path, "x").start_attempt("1.0")


def small(*overrides: str) -> RunConfig:
    free = ("preflight.min_free_gib=0", "preflight.min_memory_gib=0")
    return changed("cluster=slurm", "job.nodes=2", "trainer.global_batch=2048", *free, *overrides)


def test_node_0_waits_for_all_and_writes_the_verdict(attempt):
    run_stage(small(), attempt, 1, GOOD_PROBE)
    run_stage(small(), attempt, 0, GOOD_PROBE)
    verdict = read_verdict(attempt)
    assert (verdict.bad, [r.node for r in verdict.reports]) == ({}, ["n0", "n1"])
    assert verdict.line.startswith("2 node(s) ok in ")


def test_a_node_that_says_nothing_is_named_as_slurm_names_it(attempt, commands, monkeypatch):
    commands(scontrol='[ "$2" = hostnames ] && printf "n0\\nlost\\n"')
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n0,lost")
    with pytest.raises(LaunchError, match=r"node lost: report: no word within preflight.timeout_s=1"):
        run_stage(small("preflight.timeout_s=1"), attempt, 0, GOOD_PROBE)
    assert read_verdict(attempt).to_exclude.keys() == {"lost"}


def test_a_probe_that_hangs_is_ended_and_a_crash_is_a_failure_of_its_node(attempt):
    script = "print('phase=import torch', flush=True); import time; time.sleep(600)"
    with pytest.raises(LaunchError, match=r"node n0: probe: did not end within preflight.timeout_s=1 at: import torch"):
        run_stage(small("preflight.timeout_s=1"), attempt, 0, script)


def test_a_stop_ends_the_stage_without_a_verdict(attempt):
    run_stage(small(), attempt, 0, "import time; time.sleep(600)", stopped=lambda: True)
    assert read_verdict(attempt) is None


def test_a_node_that_cannot_reach_node_0_says_so(attempt):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(LaunchError, match=rf"{port} of node 0 cannot be reached: Connection refused"):
        run_stage(small("preflight.timeout_s=1"), attempt, 1, GOOD_PROBE, meet=("127.0.0.1", port))


# The verdict, and what follows


def verdict(*bad: str, num_nodes: int = 2) -> Verdict:
    failed = [Finding(check="TBE", level=Level.failed, text="wrong")]
    return Verdict.of([Report(node=name, findings=failed) for name in bad], num_nodes=num_nodes, seconds=1)


def test_a_bad_node_is_left_out_and_all_of_them_are_not():
    assert verdict("n2").to_exclude == {"n2": "TBE: wrong"}
    assert verdict("n1", "n2").to_exclude == {}
    assert "every node fails, so it is the run or the site" in verdict("n1", "n2").line
    assert verdict(TOGETHER).to_exclude == {}
    assert verdict(TOGETHER).line == "preflight: all nodes: TBE: wrong"


def test_after_a_bad_node_the_job_starts_again_so_often_and_no_more():
    crash = finish.Ended(outcome=Outcome.failed, step=0, progressed=False, bad_nodes={"n2": "TBE: wrong"})
    first = finish.decide([crash], max_attempts=3)
    assert (first.again, first.reason) == (True, "preflight: n2 left out, starts again on other nodes")
    assert finish.decide([crash, crash, crash], max_attempts=3).failed


def test_a_requeued_job_is_kept_from_all_bad_nodes_and_those_of_the_configuration(commands, monkeypatch, tmp_path):
    commands(scontrol=f'echo "$@" >>{tmp_path}/calls', sinfo="printf 'n1\\nn2\\nn3\\nn4\\n'")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(finish.signal, "signal", lambda *_: None)
    finish._again(small("job.exclude='n[8-9]'"), ["n2", "n3"])
    assert (tmp_path / "calls").read_text().splitlines() == ["requeue 7", "update JobId=7 ExcNodeList=n[8-9],n2,n3"]


def test_a_partition_that_is_too_small_without_the_bad_nodes_ends_the_run(commands):
    commands(sinfo="printf 'n1\\nn2\\n'")
    with pytest.raises(LaunchError, match=r"has 1 nodes without n2, and job.nodes=2"):
        nodes.check_enough_without(["n2"], num_nodes=2)


def test_the_line_for_administrators_is_one_line():
    line = stage.line_for_administrators("7", {"n2": "TBE: wrong\nnumbers"})
    assert "job=7" in line
    assert "node=n2 reason='TBE: wrong\\nnumbers'" in line
    assert "\n" not in line


# RCCL's words; lines as published for NCCL, which RCCL shares

IB = "n1:1:9 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA\n"
OFI = "n1:1:9 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [send] via NET/AWS Libfabric/0/GDRDMA\n"
SOCKET = "n1:1:9 [0] NCCL INFO Channel 03/0 : 15[7] -> 6[6] [send] via NET/Socket/3\n"
NEAR = "n1:1:9 [0] NCCL INFO Channel 00/0 : 8[0] -> 15[7] via P2P/IPC/read\n"
NO_IB = "n1:1:9 [0] NCCL INFO NET/IB : No device found.\nn1:1:9 [0] NCCL INFO Using network Socket\n"


@pytest.mark.parametrize(
    ("log", "name", "direct"),
    [
        (NEAR + IB, "NET/IB", True),
        (NEAR + OFI, "NET/AWS Libfabric", True),
        (IB + SOCKET, "NET/Socket", True),
        (NEAR + NO_IB, "NET/Socket", False),
        (IB.replace("/GDRDMA", ""), "NET/IB", False),
        (NEAR, None, False),
        ("", None, False),
    ],
)
def test_the_transport_is_what_rccl_says(log, name, direct):
    found = transport.read(log)
    assert (found.name, found.with_rdma_to_gpu) == (name, direct)


def test_a_silent_fall_back_to_sockets_is_refused_unless_allowed():
    found = transport.read(NO_IB + SOCKET)
    text = transport.problem(found, allow_sockets=False)
    assert "RCCL talks through sockets (NET/IB : No device found.), at about a twelfth of the speed" in text
    assert transport.problem(found, allow_sockets=True) is None
    assert transport.problem(transport.read(IB), allow_sockets=False) is None


# The login node


def test_a_secret_that_would_be_written_down_is_refused():
    with pytest.raises(ConfigError, match=r"container.env: HF_TOKEN looks like a secret"):
        provenance.check_secrets(changed("container.env.HF_TOKEN=x"))
    with pytest.raises(ConfigError, match=r"job.setup: WANDB_API_KEY looks like a secret"):
        provenance.check_secrets(changed("job.setup=['export WANDB_API_KEY=x']"))
    provenance.check_secrets(
        changed(
            "container.env.NCCL_DEBUG=INFO", "job.setup=['module load tokenizer', 'export TOKENIZERS_PARALLELISM=0']"
        )
    )


def test_the_login_node_lists_everything_that_is_wrong_with_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nowhere")
    config = changed("cluster=slurm", "runs_root=/tmp/x", "container=apptainer", f"container.image={tmp_path}/no.sif")
    text = failures(preflight.login(config))
    assert "image and binds: container.image=" in text
    assert "run directory: runs_root=/tmp/x" in text
    assert "Slurm: cluster.launcher=slurm: sbatch is not on the PATH" in text


def test_a_site_that_signals_every_process_is_a_warning(commands, monkeypatch):
    commands(sbatch="exit 0", sinfo="exit 0", scontrol="echo ProctrackType = proctrack/linuxproc", squeue="exit 0")
    found = preflight.login(changed("cluster=slurm", "runs_root=/srv/runs"))
    assert [f.check for f in found if f.level is Level.warning] == ["signals"]


def test_preflight_belongs_to_runs_of_several_nodes_and_one_key_turns_it_off():
    assert not has_preflight(changed())
    assert has_preflight(small())
    assert not has_preflight(small("preflight.enabled=false"))
    assert has_preflight(changed("preflight.only=true"))


def test_rccl_is_made_to_say_which_way_it_takes_and_the_configuration_wins(tmp_path):
    run = RunDir(tmp_path)
    config = changed(*MI300X, "job.nodes=2", "container.env.NCCL_DEBUG=WARN")
    argv = task.contained(run, config, ["true"], attempt_name="1.0")
    assert f"NCCL_DEBUG_FILE={run.attempt('1.0').preflight_folder}/rccl-%h-%p.log" in argv
    assert "NCCL_DEBUG=WARN" in argv
    assert "NCCL_DEBUG=INFO" not in argv


def test_preflight_alone_is_never_requeued_and_says_what_to_leave_out(attempt, commands, monkeypatch, tmp_path, capsys):
    commands(scontrol=f'echo "$@" >>{tmp_path}/calls')
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    run = RunDir(attempt.path.parents[1])
    verdict("n2").write(attempt)
    task.ensure_outcome(attempt, run, verdict("n2").line)
    decided = finish.finish(run, small("preflight.only=true"), attempt=attempt, launch_status=1)
    assert (decided.again, decided.failed) == (False, True)
    assert decided.reason == "preflight: node n2: TBE: wrong; leave out with job.exclude=n2"
    assert not (tmp_path / "calls").exists()
    assert "rechpc: for the administrators: job=1 " in capsys.readouterr().out


def test_status_names_the_nodes_that_were_left_out(attempt):
    run = RunDir(attempt.path.parents[1])
    write_text(run.config_path, "{}")
    verdict("n2").write(attempt)
    shown = state.render(state.read_status(run))
    assert "preflight  node n2: TBE: wrong" in shown
    assert "left out   n2: TBE: wrong" in shown


def test_after_a_bad_node_a_job_bound_to_it_is_given_up():
    with pytest.raises(LaunchError, match=r"job.nodelist=n2: asks for nodes of which n2 is bad"):
        finish._again(small("job.nodelist=n2"), ["n2"])


# The whole way, with stand-ins for the probe, torchrun, the ranks and Slurm's commands

STAND_IN_PROBE = """
import json, os, sys
from rechpc.sight import look
bad = {"check": "TBE", "level": "failed", "text": "wrong"}
found = [bad] if os.environ["STAND_IN"] == "broken" else []
json.dump({"sight": look([]).as_dict(), "findings": found}, open(sys.argv[2], "w"))
"""


def test_a_job_with_a_broken_node_ends_on_all_of_them_and_starts_again_without_it(make_run, commands, tmp_path):
    calls = tmp_path / "calls"
    said = 'hostnames) printf "n0\\nn1\\n";; node) echo NodeAddr=127.0.0.1;;'
    scontrol = f'case "$2" in {said} *) echo "$@" >>{calls};; esac'
    commands(scontrol=scontrol, sinfo="printf 'n0\\nn1\\nn2\\n'")
    free = ("preflight.min_free_gib=0", "preflight.min_memory_gib=0")
    run = make_run("cluster=slurm", "job.nodes=2", *free)
    (run.code_path / "rechpc/rank/probe.py").write_text(STAND_IN_PROBE)
    env = {**os.environ, "PYTHONPATH": str(run.code_path), "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    env |= {"SLURM_JOB_PARTITION": "low", "SLURM_JOB_NODELIST": "n[0-1]"}
    tasks = [
        subprocess.Popen(
            [sys.executable, "-m", "rechpc.host.task", str(run.path)],
            env={**env, "SLURM_NODEID": str(rank), "SLURMD_NODENAME": f"n{rank}", "STAND_IN": mode},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, mode in enumerate(["endless", "broken"])
    ]
    words = [task.communicate(timeout=60)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [1, 1]
    assert "preflight: node n1: TBE: wrong" in words[0]
    assert "preflight: node n1: TBE: wrong" in words[1]
    assert read_json(run.attempt("7.0").outcome_path)["error"] == "preflight: node n1: TBE: wrong"

    finish_argv = [sys.executable, "-m", "rechpc.host.finish", str(run.path), "--status", "1"]
    done = subprocess.run(finish_argv, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert calls.read_text().splitlines() == ["requeue 7", "update JobId=7 ExcNodeList=n1"]
    first, second = done.stdout.splitlines()
    assert first.startswith("rechpc: for the administrators: job=7 at=")
    assert second == "rechpc: preflight: n1 left out, starts again on other nodes"


def test_a_job_on_good_nodes_goes_on_to_its_ranks(make_run, commands, tmp_path):
    commands(scontrol='case "$2" in hostnames) echo n0;; node) echo NodeAddr=127.0.0.1;; esac')
    run = make_run("cluster=slurm", "preflight.only=true", "preflight.min_free_gib=0", "preflight.min_memory_gib=0")
    (run.code_path / "rechpc/rank/probe.py").write_text(STAND_IN_PROBE)
    env = {**os.environ, "PYTHONPATH": str(run.code_path), "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    env |= {"SLURM_NODEID": "0", "SLURMD_NODENAME": "n0", "STAND_IN": "finish"}
    argv = [sys.executable, "-m", "rechpc.host.task", str(run.path)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "finished"
    assert read_verdict(run.attempt("7.0")).line.startswith("1 node(s) ok in ")
