"""The host task and what it is made of: commands, environments, meeting points, signals, and who outlives whom."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rechpc import lifeline
from rechpc.errors import LaunchError
from rechpc.host import provenance, slurm, task
from rechpc.host.finish import finish
from rechpc.rundir import Outcome, RunDir, StopReason, read_json, write_json

RUN = RunDir(Path("/runs/dlrm/RUN_ID"))


def wait_for(condition, *, limit_s=30.0):
    give_up_at = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < give_up_at, "waited too long"
        time.sleep(0.02)
    return value


def is_running(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


# Commands and environments


def test_one_node_meets_on_a_free_loopback_port(make_config):
    config = make_config("job.ranks_per_node=4")
    assert task.torchrun_argv(config, RUN, attempt_name="7.0") == [
        *(sys.executable, "-u", "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "4"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *("-m", "rechpc.train", "/runs/dlrm/RUN_ID", "--attempt", "7.0"),
    ]


def test_several_nodes_meet_at_node_0_under_fixed_ranks_with_the_python_of_the_image(make_config):
    config = make_config("cluster=slurm", "job.nodes=2", "container=apptainer", "container.image=/i.sif")
    meet = task.Rendezvous(host="n0", port=4711)
    assert task.torchrun_argv(config, RUN, attempt_name="7.1", node_rank=1, rendezvous=meet) == [
        *("python", "-u", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"),
        *("--node-rank", "1", "--master-addr", "n0", "--master-port", "4711"),
        *("-m", "rechpc.train", "/runs/dlrm/RUN_ID", "--attempt", "7.1"),
    ]


def test_ranks_share_the_cpus_of_their_node_and_import_the_code_of_the_run(make_config):
    env = task.rank_environment(make_config(), {"SECRET": "x"}, code_path=Path("/r/code"), cpus=9)
    assert env == {
        "GLOO_SOCKET_IFNAME": "lo",
        "GOMP_SPINCOUNT": "1000",
        "MALLOC_MMAP_THRESHOLD_": "4294967296",
        "MALLOC_TOP_PAD_": "134217728",
        "MALLOC_TRIM_THRESHOLD_": "8589934592",
        "OMP_NUM_THREADS": "4",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PET_SIGNALS_TO_HANDLE": "SIGHUP",
        "PYTHONNOUSERSITE": "1",
        "PYTHONPATH": "/r/code",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }


def test_a_variable_of_the_configuration_wins_and_more_ranks_than_cpus_still_get_a_thread(make_config):
    config = make_config("job.ranks_per_node=8", "+container.env.OMP_WAIT_POLICY=ACTIVE")
    env = task.rank_environment(config, {}, code_path=Path("/r/code"), cpus=2)
    assert (env["OMP_NUM_THREADS"], env["OMP_WAIT_POLICY"]) == ("1", "ACTIVE")
    assert "GOMP_SPINCOUNT" not in env  # libgomp would follow it instead


# Provenance


def test_provenance_records_the_code_and_no_variable_that_is_not_listed(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hush")
    run = RunDir.create(tmp_path, "x")
    provenance.write(run)
    text = run.provenance_path.read_text()
    assert "hush" not in text
    assert json.loads(text)["distributions"].keys() == {"hydra-core", "omegaconf", "submitit"}
    assert (run.code_path / "rechpc" / "config.py").exists()
    assert not list(run.code_path.rglob("__pycache__"))


# The life of an attempt, with stand-ins for the ranks


class Running:
    """A host task in a process of its own, whose parent is this one as it would be submitit's controller."""

    def __init__(self, run, mode):
        self.run = run
        self.attempt = run.attempt(f"{os.getpid()}.0")
        code = "import sys; from rechpc.host.task import HostTask; print(HostTask(sys.argv[1])())"
        env = {**os.environ, "SUBMITIT_LOCAL_JOB_ID": str(os.getpid()), "SLURM_JOB_ID": "1", "STAND_IN": mode}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(run.path)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def facts(self, rank):
        return wait_for(lambda: read_json(self.attempt.path / f"facts-{rank}.json"))

    def end(self):
        out, err = self.process.communicate(timeout=60)
        return out.strip(), err, read_json(self.attempt.outcome_path)


@pytest.fixture
def start(make_run):
    started = []

    def begin(mode, *overrides, real_torchrun=False):
        run = make_run(*overrides)
        if real_torchrun:
            pytest.importorskip("torch")
            shutil.rmtree(run.code_path / "torch")
        started.append(Running(run, mode))
        return started[-1]

    yield begin
    for running in started:
        running.process.kill()
        running.process.communicate()


def test_ranks_run_the_code_of_the_run_deaf_to_the_signals_of_a_job_and_ignorant_of_slurm(start):
    running = start("finish", real_torchrun=True)
    facts = running.facts(1)
    out, _, outcome = running.end()
    assert (running.process.returncode, out, outcome["outcome"]) == (0, "finished", "finished")
    assert facts["file"] == str(running.run.code_path / "rechpc" / "train.py")
    assert facts["ignored"] == ["SIGTERM", "SIGUSR2"]
    assert not [name for name in facts["env"] if name.startswith(slurm.JOB_VARIABLES)]
    assert facts["env"]["LOCAL_WORLD_SIZE"] == "2"
    first_line = running.attempt.node_log_path(0).read_text().splitlines()[0]
    assert first_line.startswith("sh -c ")
    assert "torch.distributed.run" in first_line


@pytest.mark.parametrize(("number", "outcome"), [(signal.SIGTERM, Outcome.drained), (signal.SIGUSR2, Outcome.requeued)])
def test_a_signal_becomes_a_request_to_save_and_stop(start, number, outcome):
    running = start("endless")
    running.facts(0)
    running.process.send_signal(number)
    out, _, written = running.end()
    assert (running.process.returncode, out, written["outcome"]) == (0, outcome, outcome)
    assert running.run.committed_steps() == [written["step"]]


def test_the_error_of_the_rank_that_failed_first_becomes_the_outcome(start):
    running = start("crash")
    _, err, outcome = running.end()
    assert running.process.returncode == 1
    assert (outcome["outcome"], outcome["error"]) == ("failed", "rank 1: DataError: id 7 is too large")
    assert "LaunchError" in err


def test_a_rank_that_was_killed_without_a_word_is_named(start):
    running = start("vanish", real_torchrun=True)
    error = f"killed by SIGKILL on {socket.gethostname()}; out of memory?"
    assert running.end()[2]["error"] == f"rank 1: {error}"
    word = read_json(running.attempt.error_path(1))
    assert (word["rank"], word["error"], word["killed"]) == (1, error, True)


def test_ranks_that_do_not_stop_in_time_are_killed(start):
    running = start("deaf", "job.stop_timeout_s=1")
    pids = [running.facts(rank)["pid"] for rank in (0, 1)]
    running.attempt.request_stop(StopReason.drain)
    _, _, outcome = running.end()
    assert outcome["outcome"] == "failed"
    assert "job.stop_timeout_s=1" in outcome["error"]
    wait_for(lambda: not any(is_running(pid) for pid in pids))


def test_an_attempt_that_cannot_start_says_so(start, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    outcome = start("finish").end()[2]
    assert outcome["outcome"] == "failed"
    assert outcome["error"].startswith(f"sh: cannot be started on {socket.gethostname()}: No such file")


def test_a_node_without_the_runtime_of_the_container_begins_no_attempt(start, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    running = start("finish", "container=apptainer", "container.image=/i.sif")
    _, err, outcome = running.end()
    assert (running.process.returncode, outcome, running.run.attempts()) == (1, None, [])
    assert "container.runtime=apptainer: apptainer is not on the PATH of this node; job.setup can load it" in err


def test_a_run_that_has_finished_has_no_further_attempt(make_run, monkeypatch):
    run = make_run()
    run.result_path.write_text("{}")
    monkeypatch.setenv("SUBMITIT_LOCAL_JOB_ID", str(os.getppid()))
    monkeypatch.setattr(lifeline, "die_with", lambda pid: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert task.HostTask(str(run.path))() == "finished"
    assert run.attempts() == []
    verdict = finish(run, task.load(run.config_path), attempt=None, launch_status=0)
    assert (verdict.again, verdict.failed) == (False, False)


def test_the_same_process_id_twice_gives_two_attempts(make_run, monkeypatch):
    run = make_run()
    monkeypatch.setenv("SUBMITIT_LOCAL_JOB_ID", "77")
    first = slurm.placement(slurm.Launcher.local, run).attempt_name
    run.start_attempt(first)
    assert (first, slurm.placement(slurm.Launcher.local, run).attempt_name) == ("77.0", "77.1")


def test_a_process_id_that_came_again_is_not_the_job(make_run):
    run = make_run()
    job = slurm.Job(
        launcher=slurm.Launcher.local,
        job_id=str(os.getpid()),
        host=slurm.socket.gethostname(),
        pid=os.getpid(),
        path=str(run.path),
        submitted_at_s=0.0,
    )
    assert slurm.is_alive(job, run) is False
    assert slurm.is_alive(job, RunDir(run.path / "copy")) is None
    write_json(run.job_path, {"submissions": [{"launcher": "local"}]})
    assert slurm.newest_job(run) is None


# Where nodes meet


def place(rank, *, nodes=2):
    return slurm.Placement(attempt_name="1.0", node_rank=rank, num_nodes=nodes, node_name=f"n{rank}", parent_pid=None)


def resolve(monkeypatch, addresses):
    """Let these names, and no others, have an address."""

    def lookup(name):
        if name not in addresses:
            raise socket.gaierror(f"{name} is unknown")
        return addresses[name]

    monkeypatch.setattr(socket, "gethostbyname", lookup)


def test_other_nodes_wait_for_node_0_and_meet_where_it_says(make_run, monkeypatch):
    resolve(monkeypatch, {"n0": "10.0.0.7"})
    run = make_run("cluster=slurm", "job.nodes=2")
    config = task.load(run.config_path)
    attempt, meet = task._begin(run, config, place(0))
    assert task._begin(run, config, place(1)) == (attempt, meet)
    assert (meet.host, meet.port > 0) == ("10.0.0.7", True)


def test_node_0_missing_is_an_error_that_says_where_to_look(make_run, monkeypatch):
    monkeypatch.setattr(task, "_JOIN_TIMEOUT_S", 0.2)
    run = make_run("cluster=slurm", "job.nodes=2")
    with pytest.raises(LaunchError, match="file system that all nodes share"):
        task._begin(run, task.load(run.config_path), place(1))


@pytest.mark.parametrize(("asked", "given"), [(2, 3), (2, 1), (1, 2)])
def test_a_job_of_another_size_than_the_run_is_refused_on_every_node(make_config, tmp_path, asked, given):
    config = make_config("cluster=slurm", f"job.nodes={asked}")
    run = RunDir.create(tmp_path, "x")
    for rank in range(given):
        with pytest.raises(LaunchError, match=f"job.nodes={asked}, but the job has {given} nodes"):
            task._begin(run, config, place(rank, nodes=given))
    assert run.attempts() == []


@pytest.mark.parametrize(
    ("addresses", "found"),
    [
        ({"n0": "10.0.0.7", "host": "10.0.0.8"}, "10.0.0.7"),
        ({"n0": "127.0.0.1", "host": "10.0.0.8"}, "10.0.0.8"),
        ({"host.cluster": "10.0.0.9"}, "10.0.0.9"),
    ],
)
def test_a_node_is_met_under_the_first_of_its_names_that_leads_to_it_from_elsewhere(monkeypatch, addresses, found):
    monkeypatch.setattr(socket, "gethostname", lambda: "host")
    monkeypatch.setattr(socket, "getfqdn", lambda: "host.cluster")
    resolve(monkeypatch, addresses)
    assert task._address("n0") == found


@pytest.mark.parametrize("addresses", [{}, dict.fromkeys(["n0", "host", "host.cluster"], "127.0.0.1")])
def test_a_node_that_only_finds_itself_is_an_error_that_names_it(monkeypatch, addresses):
    monkeypatch.setattr(socket, "gethostname", lambda: "host")
    monkeypatch.setattr(socket, "getfqdn", lambda: "host.cluster")
    resolve(monkeypatch, addresses)
    with pytest.raises(LaunchError, match=r"node n0: neither this name nor host resolves.*/etc/hosts"):
        task._address("n0")


def test_the_port_is_free_and_never_one_that_an_outgoing_connection_may_have():
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    first = task._free_port("42.0")
    assert 1024 <= first < low <= high
    assert task._free_port("42.1") != first
    with socket.create_server(("", first)):
        second = task._free_port("42.0")
        assert second != first
        assert 1024 <= second < low


# The image of an attempt


def test_an_attempt_notes_its_image_and_that_it_is_not_the_one_before(make_config, tmp_path):
    image = tmp_path / "i.sif"
    config = make_config("container=apptainer", f"container.image={image}")
    run = RunDir.create(tmp_path, "x")
    noted = []
    for name, content in [("1.0", "old"), ("1.1", "old"), ("1.2", "new"), ("1.3", "new")]:
        image.write_text(content)
        attempt = run.start_attempt(name)
        task._record_image(run, attempt, config)
        noted.append(read_json(attempt.image_path))
    assert [note["path"] for note in noted] == [str(image)] * 4
    assert ["changed_from" in note for note in noted] == [False, False, True, False]
    assert noted[2]["changed_from"] == noted[0]["sha256"] != noted[2]["sha256"]
