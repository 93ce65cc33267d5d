"""The host task and what it is made of: commands, environments, batch scripts, signals, and who outlives whom."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rechpc.config import ContainerConfig, ContainerRuntime
from rechpc.errors import ConfigError
from rechpc.host import container, provenance, slurm, task
from rechpc.rundir import Outcome, RunDir, StopReason, read_json, write_json

RUN = RunDir(Path("/runs/dlrm/RUN_ID"))
WRAPPER = ["sh", "-c", 'trap "" USR2 TERM; exec "$@"', "sh", "env"]


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


def test_without_a_container_the_command_runs_behind_a_shell_that_ignores_the_signals_of_a_job():
    argv = container.argv(ContainerConfig(), ["python", "x"], env={"B": "2", "A": "1,1"}, binds=["/r"], gpu=True)
    assert argv == [*WRAPPER, "A=1,1", "B=2", "python", "x"]


def test_apptainer_gets_a_clean_environment_the_gpus_and_every_bind():
    image = ContainerConfig(runtime=ContainerRuntime.apptainer, image="/i.sif", binds=["/opt/x:/y:ro"])
    argv = container.argv(image, ["python"], env={"A": "1"}, binds=["/r"], gpu=True)
    outer = ["apptainer", "exec", "--cleanenv", "--rocm", "--bind=/r", "--bind=/opt/x:/y:ro", "/i.sif"]
    assert argv == [*outer, *WRAPPER, "A=1", "python"]
    assert "--rocm" not in container.argv(image, ["python"], env={}, binds=[], gpu=False)


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


# Batch scripts

SCRIPT = """\
#!/bin/bash

# Parameters
#SBATCH --account=me
#SBATCH --cpus-per-task=2
#SBATCH --error=/runs/dlrm/RUN_ID/submission/%j_0_log.err
#SBATCH --job-name=dlrm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/runs/dlrm/RUN_ID/submission/%j_0_log.out
#SBATCH --partition=low
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=60
#SBATCH --wckey=submitit

# setup
export PYTHONPATH=/runs/dlrm/RUN_ID/code
export PYTHONSAFEPATH=1

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /runs/dlrm/RUN_ID/submission/%j_%t_log.out \
--error /runs/dlrm/RUN_ID/submission/%j_%t_log.err --kill-on-bad-exit=1 --cpu-bind=none --cpus-per-task=2 \
@PYTHON -u -m submitit.core._submit /runs/dlrm/RUN_ID/submission
"""
SLURM_2_NODES = ["cluster=slurm", "job.nodes=2", "job.time_limit_min=60", "job.signal_lead_s=90"]


def test_the_batch_script_starts_one_task_per_node_that_can_be_requeued(make_config):
    config = make_config(*SLURM_2_NODES, "job.partition=low", "job.account=me")
    assert slurm.batch_script(RUN, config) == SCRIPT.replace("@PYTHON", sys.executable)


def test_a_job_that_takes_every_gpu_of_its_nodes_takes_the_whole_nodes(make_config):
    config = make_config("cluster=slurm", "cluster.device=cuda", "cluster.ranks_per_node=8")
    lines = slurm.batch_script(RUN, config).splitlines()
    assert "#SBATCH --gpus-per-node=8" in lines
    assert "#SBATCH --exclusive" in lines
    assert not any("cpus-per-task" in line for line in lines)


@pytest.mark.parametrize("key", ["partition", "account"])
def test_a_control_character_never_reaches_the_batch_script(make_config, key):
    config = make_config("cluster=slurm")
    setattr(config.job, key, "low\n#SBATCH --qos=high")
    with pytest.raises(ConfigError, match=f"job.{key}='low.*control character"):
        slurm.batch_script(RUN, config)


def test_sbatch_gets_the_script_of_the_dry_run_and_none_of_the_variables_of_an_outer_job(
    make_run, tmp_path, monkeypatch
):
    run = make_run(*SLURM_2_NODES)
    bin_path = tmp_path / "bin"
    bin_path.mkdir()
    for name, body in {"srun": "", "sbatch": f'cp "$1" {tmp_path}/got; env > {tmp_path}/env; echo "job 42"'}.items():
        (bin_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (bin_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_CPU_BIND", "cores")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    config = task.load(run.config_path)
    job = slurm.submit(task.HostTask(str(run.path)), run=run, config=config)
    assert (job.job_id, job.pid) == ("42", None)
    assert (tmp_path / "got").read_text() == slurm.batch_script(run, config)
    env = (tmp_path / "env").read_text().splitlines()
    assert f"PYTHONPATH={run.code_path}" in env
    assert [line for line in env if line.startswith("SLURM_")] == ["SLURM_CONF=/etc/slurm.conf"]
    assert os.environ["SLURM_CPU_BIND"] == "cores"


def test_slurm_says_job_restart_and_node(monkeypatch):
    for name, value in {"SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": "2", "SLURM_NODEID": "1"}.items():
        monkeypatch.setenv(name, value)
    assert slurm.placement(slurm.Launcher.slurm, RUN) == slurm.Placement(
        attempt_name="42.2", node_rank=1, parent_pid=None
    )


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
    assert running.end()[2]["error"] == "local rank 1 was killed by SIGKILL; out of host memory?"


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
    running = start("finish", "container=apptainer", "container.image=/i.sif")
    outcome = running.end()[2]
    assert outcome["outcome"] == "failed"
    assert outcome["error"].startswith("apptainer: cannot be started")


def test_the_same_process_id_twice_gives_two_attempts(make_run, monkeypatch):
    run = make_run()
    monkeypatch.setenv("SUBMITIT_LOCAL_JOB_ID", "77")
    first = slurm.placement(slurm.Launcher.local, run).attempt_name
    run.start_attempt(first)
    assert (first, slurm.placement(slurm.Launcher.local, run).attempt_name) == ("77.0", "77.1")


def test_other_nodes_wait_for_node_0_and_meet_where_it_says(make_run):
    run = make_run("cluster=slurm", "job.nodes=2")
    config = task.load(run.config_path)
    place = [slurm.Placement(attempt_name="1.0", node_rank=rank, parent_pid=None) for rank in (0, 1)]
    attempt, meet = task._begin(run, config, place[0])
    assert task._begin(run, config, place[1]) == (attempt, meet)
    assert meet.port > 0


def test_node_0_missing_is_an_error_that_says_where_to_look(make_run, monkeypatch):
    monkeypatch.setattr(task, "_JOIN_TIMEOUT_S", 0.2)
    run = make_run("cluster=slurm", "job.nodes=2")
    place = slurm.Placement(attempt_name="1.0", node_rank=1, parent_pid=None)
    with pytest.raises(task.LaunchError, match="file system that all nodes share"):
        task._begin(run, task.load(run.config_path), place)


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
