"""Slurm's words: the batch script, and what its commands say of a job.

Where a test runs a command of Slurm, a few lines of shell stand in for it; tests/slurm has the real one.
"""

import dataclasses
import os
import random
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rechpc.config import JobConfig, Launcher
from rechpc.errors import ConfigError
from rechpc.host import slurm, task
from rechpc.rules import validate
from rechpc.rundir import RunDir
from tests.configs import tiny

RUN = RunDir(Path("/runs/dlrm/RUN_ID"))


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

# setup
export PYTHONPATH=/runs/dlrm/RUN_ID/code
export PYTHONSAFEPATH=1
[ -r /runs/dlrm/RUN_ID/config.yaml ] || { echo "$(hostname) does not see "/runs/dlrm/RUN_ID/config.yaml": \
set runs_root= to a file system that all nodes share"; exit 1; }

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /runs/dlrm/RUN_ID/submission/%j_%t_log.out \
--error /runs/dlrm/RUN_ID/submission/%j_%t_log.err --kill-on-bad-exit=1 --cpu-bind=none --cpus-per-task=2 \
@PYTHON -u -m submitit.core._submit /runs/dlrm/RUN_ID/submission


# teardown
exec @PYTHON -m rechpc.host.finish /runs/dlrm/RUN_ID --status $?"""
SLURM_2_NODES = ["cluster=slurm", "job.nodes=2", "job.time_limit_min=60", "job.signal_lead_s=90"]


def test_the_batch_script_starts_one_task_per_node_that_can_be_requeued(make_config):
    config = make_config(*SLURM_2_NODES, "job.partition=low", "job.account=me")
    assert slurm.batch_script(RUN, config) == SCRIPT.replace("@PYTHON", sys.executable)


def test_a_job_that_takes_every_gpu_of_its_nodes_takes_the_whole_nodes(make_config):
    config = make_config(
        "cluster=slurm", "cluster.device=cuda", "cluster.ranks_per_node=8", "cluster.gpu_request=gpus_per_node"
    )
    lines = slurm.batch_script(RUN, config).splitlines()
    assert "#SBATCH --gpus-per-node=8" in lines
    assert "#SBATCH --exclusive" in lines
    assert not any("cpus-per-task" in line for line in lines)


def test_a_job_that_takes_some_of_the_gpus_leaves_the_rest_to_others(make_config):
    gpus = ["cluster.device=cuda", "cluster.ranks_per_node=8", "cluster.gpu_request=gres", "job.ranks_per_node=4"]
    lines = slurm.batch_script(RUN, make_config("cluster=slurm", *gpus)).splitlines()
    assert "#SBATCH --gres=gpu:4" in lines
    assert "#SBATCH --cpus-per-task=4" in lines
    assert "#SBATCH --exclusive" not in lines


# What every key of job.* does to the script. The rest says what the host task does, and Slurm need not know.
LINES = {
    "nodes=2": "#SBATCH --nodes=2",
    "ranks_per_node=3": "#SBATCH --cpus-per-task=3",
    "time_limit_min=90": "#SBATCH --time=90",
    "signal_lead_s=45": "#SBATCH --signal=USR2@45",
    "partition=low": "#SBATCH --partition=low",
    "account=me": "#SBATCH --account=me",
    "qos=high": "#SBATCH --qos=high",
    "constraint=a&b": "#SBATCH --constraint='a&b'",
    "reservation=maintenance": "#SBATCH --reservation=maintenance",
    "nodelist=n[1-2]": "#SBATCH --nodelist='n[1-2]'",
    "exclude=n7": "#SBATCH --exclude=n7",
    "dependency=afterany:123": "#SBATCH --dependency=afterany:123",
    "mail_user=me@site": "#SBATCH --mail-user=me@site",
    "mail_type=END,FAIL": "#SBATCH --mail-type=END,FAIL",
    "exclusive=true": "#SBATCH --exclusive",
    "cpus_per_rank=7": "#SBATCH --cpus-per-task=7",
    "memory_gib=64": "#SBATCH --mem=64G",
    "sbatch.comment=a word": "#SBATCH --comment='a word'",
    "sbatch.hold=true": "#SBATCH --hold",
    "srun=[--mpi=none]": " --cpus-per-task=1 --mpi=none ",
    "setup=[module load x]": "\nmodule load x\n",
}
HOST_TASK = {"stop_timeout_s", "hang_timeout_s", "max_attempts"}


def test_every_key_of_a_job_is_known_to_this_file():
    assert {line.split("=")[0].split(".")[0] for line in LINES} | HOST_TASK == {
        f.name for f in dataclasses.fields(JobConfig)
    }


@pytest.mark.parametrize("setting", LINES)
def test_a_key_of_the_job_reaches_the_batch_script(setting):
    script = slurm.batch_script(RUN, tiny("cluster.launcher=slurm", f"job.{setting}"))
    assert LINES[setting] in (script.split("\n") if LINES[setting].startswith("#") else script)
    assert LINES[setting] not in slurm.batch_script(RUN, tiny("cluster.launcher=slurm"))


@pytest.mark.parametrize(
    ("settings", "there", "absent"),
    [
        (["cluster.gpu_request=gpus_per_node"], ["--gpus-per-node=2"], "gres"),
        (["cluster.gpu_request=gres"], ["--gres=gpu:2"], "gpus-per-node"),
        (["cluster.gpu_request=none"], [], "gpu"),
        (["cluster.ranks_per_node=2"], ["--exclusive"], "cpus-per-task"),
        (["cluster.ranks_per_node=2", "job.cpus_per_rank=4"], ["--exclusive", "--cpus-per-task=8"], "gpu"),
        (["cluster.ranks_per_node=2", "job.exclusive=false"], ["--cpus-per-task=2"], "exclusive"),
        (["job.exclusive=true", "job.memory_gib=0"], ["--exclusive", "--mem=0G"], "cpus-per-task"),
    ],
)
def test_what_a_node_gives_depends_on_more_than_one_key(settings, there, absent):
    script = slurm.batch_script(RUN, tiny("cluster.launcher=slurm", *settings, world_size=2))
    assert {f"#SBATCH {option}" for option in there} <= set(script.split("\n"))
    assert absent not in script


def test_an_option_that_is_false_is_left_out():
    assert "hold" not in slurm.batch_script(RUN, tiny("cluster.launcher=slurm", "job.sbatch.hold=false"))


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("partition", "job.partition"),
        ("mail-type", "job.mail_type"),
        ("job-name", "name"),
        ("time", "job.time_limit_min"),
    ],
)
def test_an_option_that_a_key_stands_for_is_refused_with_the_key(name, instead):
    with pytest.raises(ConfigError, match=f"^job.sbatch.{name}: --{name} comes from {instead}; set that instead$"):
        slurm.batch_script(RUN, tiny("cluster.launcher=slurm", f"job.sbatch.{name}=x"))


def test_no_option_is_given_twice():
    # Every option of the script, with every key that has an option set.
    config = tiny("cluster.launcher=slurm", "job.memory_gib=1", *(f"job.{name}=x" for name in NAMES))
    options = {line.split("=")[0].removeprefix("#SBATCH --") for line in slurm.batch_script(RUN, config).split("\n")
               if line.startswith("#SBATCH --")}  # fmt: skip
    for name in options:
        with pytest.raises(ConfigError, match=f"^job.sbatch.{name}: "):
            slurm.batch_script(RUN, tiny("cluster.launcher=slurm", f"job.sbatch.{name}=x"))


def test_gpus_may_be_asked_for_in_own_words_where_nothing_else_asks():
    own = "job.sbatch.gres=gpu:mi250:8"
    assert "#SBATCH --gres=gpu:mi250:8" in slurm.batch_script(RUN, tiny("cluster.launcher=slurm", own))
    with pytest.raises(ConfigError, match=r"cluster\.gpu_request=gres asks for GPUs already"):
        slurm.batch_script(RUN, tiny("cluster.launcher=slurm", "cluster.gpu_request=gres", own))


# Texts that a shell would take for more than text

NAMES = [f.name for f in dataclasses.fields(JobConfig) if f.type == str | None]
TEXTS = ["a b", "it's", '"', "$(id)", "`id`", "a; id", "a\\", "#SBATCH --qos=x", "é漢", "& | > *", "${HOME}", "!"]
TEXTS += ["".join(random.Random(seed).choices(" '\"$(){}`;&|<>#\\!*?~=-aé漢\u2028\x85", k=12)) for seed in range(20)]


def job_of_texts(text):
    config = tiny("cluster.launcher=slurm")
    for name in NAMES:
        setattr(config.job, name, text)
    config.job.sbatch = {"comment": text}
    return config


def commands_in(script):
    return [line for line in script.split("\n") if not line.startswith("#")]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_stays_one_text_in_the_batch_script(text):
    config = job_of_texts(text)
    validate(config)
    script = slurm.batch_script(RUN, config)
    assert commands_in(script) == commands_in(slurm.batch_script(RUN, job_of_texts("harmless")))
    options = [shlex.split(line) for line in script.split("\n") if line.startswith("#SBATCH ")]
    assert {len(words) for words in options} == {2}
    given = {word.partition("=")[0]: word.partition("=")[2] for _, word in options}
    assert {given[f"--{name.replace('_', '-')}"] for name in [*NAMES, "comment"]} == {text}
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""


@pytest.mark.parametrize("text", TEXTS)
def test_an_argument_of_srun_stays_one_argument(text):
    config = tiny("cluster.launcher=slurm")
    plain = slurm.batch_script(RUN, config).split("\n")
    config.job.srun = [text]
    script = slurm.batch_script(RUN, config)
    [line] = [line for line in script.split("\n") if line not in plain]
    assert shlex.split(line)[:1] == ["srun"]
    assert text in shlex.split(line)
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_control_character_is_refused_with_its_key(name):
    config = tiny("cluster.launcher=slurm")
    for character in "\n\r\t\0\x1b\x7f":
        setattr(config.job, name, f"low{character}#SBATCH --qos=high")
        with pytest.raises(ConfigError, match=f"^job.{name}='low.*: has a control character; remove it$"):
            validate(config)


@pytest.mark.parametrize(
    ("key", "values"), [("sbatch.comment", {"comment": "a\nb"}), ("srun[0]", ["a\nb"]), ("setup[1]", ["a", "a\nb"])]
)
def test_a_control_character_in_a_list_is_refused_with_its_place(key, values):
    config = tiny("cluster.launcher=slurm")
    setattr(config.job, key.partition(".")[0].partition("[")[0], values)
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert str(caught.value) == f"job.{key}='a\\nb': has a control character; remove it"


@pytest.mark.parametrize("key", ["partition", "account"])
def test_a_control_character_never_reaches_the_batch_script(make_config, key):
    config = make_config("cluster=slurm")
    setattr(config.job, key, "low\n#SBATCH --qos=high")
    with pytest.raises(ConfigError, match=f"job.{key}='low.*control character"):
        slurm.batch_script(RUN, config)


def test_sbatch_gets_the_script_of_the_dry_run_and_none_of_the_variables_of_an_outer_job(
    make_run, commands, tmp_path, monkeypatch
):
    run = make_run(*SLURM_2_NODES)
    commands(srun="", sbatch=f'cp "$1" {tmp_path}/got; env > {tmp_path}/env; echo "job 42"')
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


# The script as bash runs it, with a stand-in for srun


@pytest.fixture
def batch(commands, tmp_path):
    """Run a batch script of a job that has started nothing yet: exit status and output, line by line."""

    def run(script):
        commands(srun='echo "srun: $FROM_SETUP"; exit 3')
        env = {**os.environ, "SLURM_JOB_ID": "42"}
        done = subprocess.run(["bash"], input=script, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=60)
        assert done.stderr == ""
        return done.returncode, done.stdout.splitlines()

    return run


def test_the_lines_of_the_user_come_after_ours_and_the_end_is_judged_by_what_srun_said(make_run, batch, tmp_path):
    old = make_run("cluster=slurm")
    config = task.load(old.config_path)
    config.job.setup = ['echo "setup: $PYTHONPATH"', "export FROM_SETUP=seen"]
    run = RunDir(tmp_path / "a b$(touch x)`touch x`;'é\"")
    shutil.move(old.path, run.path)
    code, lines = batch(slurm.batch_script(run, config))
    assert code == 1
    assert lines == [
        f"setup: {run.code_path}",
        "srun: seen",
        f"rechpc: srun ended with status 3 before an attempt began; see {run.submission_path}",
    ]
    assert not (tmp_path / "x").exists()


def test_a_node_that_does_not_see_the_run_says_so_and_starts_nothing(batch, tmp_path):
    run = RunDir(tmp_path / "it's gone")
    code, [line] = batch(slurm.batch_script(run, tiny("cluster.launcher=slurm")))
    assert code == 1
    assert line.endswith(f" does not see {run.config_path}: set runs_root= to a file system that all nodes share")


# What Slurm says, by stand-ins for its commands


def test_slurm_says_job_restart_and_node(monkeypatch):
    for name, value in {"SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": "2", "SLURM_NODEID": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert slurm.placement(slurm.Launcher.slurm, RUN) == slurm.Placement(
        attempt_name="42.2", node_rank=1, num_nodes=3, node_name="n1", parent_pid=None
    )


JOB = slurm.Job(
    launcher=Launcher.slurm, job_id="42", host=socket.gethostname(), pid=None, path=str(RUN.path), submitted_at_s=0.0
)
HEAD = "echo 'JOBID|STATE|REASON'"


@pytest.mark.parametrize(
    ("bodies", "name", "reason"),
    [
        ({"squeue": f"{HEAD}; echo '42|PENDING|Priority'"}, "PENDING", "Priority"),
        ({"squeue": f"{HEAD}; echo '42|RUNNING|None'; echo '43|FAILED|None'"}, "RUNNING", None),
        ({"squeue": f"{HEAD}; echo '42|TIMEOUT|TimeLimit'"}, "TIMEOUT", "TimeLimit"),
        ({"squeue": HEAD, "sacct": "echo '42|CANCELLED by 1000|None'"}, "CANCELLED", None),
        ({"sacct": "echo '42|FAILED|'"}, "FAILED", None),
        ({"squeue": HEAD, "sacct": "exit 1"}, slurm.FORGOTTEN, None),
    ],
)
def test_the_first_command_that_knows_the_job_says_its_state(commands, bodies, name, reason):
    commands(alone=True, **bodies)
    assert slurm.state(JOB) == slurm.JobState(name=name, reason=reason)
    assert slurm.is_alive(JOB, RUN) is (name in ("PENDING", "RUNNING"))


@pytest.mark.parametrize("bodies", [{}, {"squeue": "exit 1", "sacct": "exit 1"}])
def test_where_slurm_does_not_answer_nothing_is_said(commands, bodies):
    commands(alone=True, **bodies)
    assert slurm.state(JOB) is None
    assert slurm.is_alive(JOB, RUN) is None


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("00:05:00", 5), ("02:00:59", 120), ("1-00:30:00", 1470), ("30-00:00:00", 43_200), ("UNLIMITED", None)],
)
def test_a_time_limit_as_slurm_prints_it_is_minutes(text, minutes):
    assert slurm._minutes(text) == minutes
