"""Jobs: how a run is submitted, on this machine or to Slurm; the one file that knows submitit and Slurm's words.

Both launchers take the same way through submitit. Must not know what a job does.
"""

import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.slurm.slurm import _make_sbatch_string

from rechpc.config import Device, Launcher, RunConfig
from rechpc.errors import ConfigError, LaunchError
from rechpc.rundir import RunDir, read_json, write_json

# Variables of a job: they must reach neither a job submitted from inside it (SLURM_CPU_BIND would pin all of it to
# the few cores of the outer one, array ids confuse submitit, issue 1782) nor the ranks, which do not know Slurm.
JOB_VARIABLES = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "PMI_", "PMIX_", "SUBMITIT_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One submission of a run."""

    launcher: Launcher
    job_id: str
    host: str
    pid: int | None  # of submitit's controller, where the launcher is local
    path: str  # the run directory, which may have been copied since
    submitted_at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """What the launcher tells a host task about itself."""

    attempt_name: str
    node_rank: int
    parent_pid: int | None  # of submitit's controller, where the launcher is local


def check(run: RunDir, config: RunConfig) -> None:
    """Raise ConfigError for text that would change the meaning of the batch script or of submitit's file names."""
    texts = {
        "runs_root": str(run.path),
        "job.partition": config.job.partition,
        "job.account": config.job.account,
        "the path of this Python": sys.executable,
    }
    for key, text in texts.items():
        if text and re.search(r"[\x00-\x1f\x7f]", text):
            raise ConfigError(f"{key}={text!r}: has a control character, which would break the batch script; remove it")
    if "%" in str(run.path):
        raise ConfigError(f"runs_root={run.path}: has a '%', which Slurm and submitit replace; choose another path")


def submit(task: Callable[[], str], *, run: RunDir, config: RunConfig) -> Job:
    """Hand `task` to the launcher, once per node. Raises LaunchError when it is refused."""
    check(run, config)
    submitted_at_s = time.time()
    try:
        with _submission_environment(run):
            job_id = str(_executor(run, config).submit(task).job_id)
    except (RuntimeError, ValueError, OSError) as error:  # submitit raises RuntimeErrors of its own
        reason = " ".join(str(error).split())
        raise LaunchError(f"cluster.launcher={config.cluster.launcher}: could not submit: {reason}") from error
    return Job(
        launcher=config.cluster.launcher,
        job_id=job_id,
        host=socket.gethostname(),
        pid=int(job_id) if config.cluster.launcher is Launcher.local else None,
        path=str(run.path),
        submitted_at_s=submitted_at_s,
    )


def record(run: RunDir, job: Job, overrides: list[str]) -> None:
    """Append a submission to `job.json`."""
    history = (read_json(run.job_path) or {}).get("submissions", [])
    write_json(run.job_path, {"submissions": [*history, {**asdict(job), "overrides": overrides}]})


def newest_job(run: RunDir) -> Job | None:
    """The last submission of a run; None where there is none yet, or its record is torn."""
    try:
        facts = (read_json(run.job_path) or {})["submissions"][-1]
        return Job(**{**{name: facts[name] for name in Job.__slots__}, "launcher": Launcher(facts["launcher"])})
    except (OSError, ValueError, LookupError):
        return None


def is_alive(job: Job | None, run: RunDir) -> bool | None:
    """Whether the process of a local job still runs; None where this machine cannot tell."""
    here = job is not None and job.host == socket.gethostname() and job.path == str(run.path)
    if job is None or job.pid is None or not here or not Path("/proc/self").exists():
        return None
    try:
        command = Path(f"/proc/{job.pid}/cmdline").read_bytes()  # empty for a zombie
    except OSError:
        return False
    # The folder tells it from a later process that got the same id.
    return os.fsencode(run.submission_path) in command.split(b"\0")


def batch_script(run: RunDir, config: RunConfig) -> str:
    """The text that `submit` would hand to sbatch."""
    check(run, config)
    # Private in submitit 1.5.4, which has no public way to see the script before it is submitted; a test compares
    # it with what sbatch gets.
    return str(_make_sbatch_string(_task_command(run), run.submission_path, **_sbatch_parameters(run, config)))


def local_command(run: RunDir) -> str:
    """What submitit's local controller would start."""
    return _task_command(run)


def placement(launcher: Launcher, run: RunDir) -> Placement:
    """Where this host task stands, from the variables that its launcher set."""
    if launcher is Launcher.local:
        job_id = os.environ["SUBMITIT_LOCAL_JOB_ID"]
        # Process ids come again, in a container even soon, and an attempt must not find the files of an older one.
        restart = sum(attempt.name.startswith(f"{job_id}.") for attempt in run.attempts())
        return Placement(attempt_name=f"{job_id}.{restart}", node_rank=0, parent_pid=int(job_id))
    restart = int(os.environ.get("SLURM_RESTART_COUNT", 0))  # unset in the first start
    name = f"{os.environ['SLURM_JOB_ID']}.{restart}"
    return Placement(attempt_name=name, node_rank=int(os.environ["SLURM_NODEID"]), parent_pid=None)


def _executor(run: RunDir, config: RunConfig) -> Any:
    if config.cluster.launcher is Launcher.slurm:
        executor = submitit.SlurmExecutor(run.submission_path)
        executor.update_parameters(**_sbatch_parameters(run, config))
        return executor
    executor = submitit.LocalExecutor(run.submission_path)
    # submitit sets CUDA_VISIBLE_DEVICES (to nothing for a CPU run); the ones that the user chose must stay.
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    executor.update_parameters(
        timeout_min=config.job.time_limit_min,
        signal_delay_s=int(config.job.signal_lead_s),
        gpus_per_node=config.ranks_per_node if config.cluster.device is Device.cuda else 0,
        visible_gpus=tuple(int(gpu) for gpu in chosen.split(",") if gpu.strip().isdigit()),
    )
    return executor


def _sbatch_parameters(run: RunDir, config: RunConfig) -> dict[str, Any]:
    """submitit's names for what `config` asks of Slurm: one task per node, which starts all ranks of it."""
    ranks = config.ranks_per_node
    parameters: dict[str, Any] = {
        "job_name": config.name,
        "partition": config.job.partition,
        "account": config.job.account,
        "time": config.job.time_limit_min,
        "nodes": config.job.nodes,
        "ntasks_per_node": 1,
        "gpus_per_node": ranks if config.cluster.device is Device.cuda else None,
        "signal_delay_s": int(config.job.signal_lead_s),
        "setup": [f"export {name}={shlex.quote(value)}" for name, value in _code_variables(run).items()],
        # submitit sends neither --requeue nor --kill-on-bad-exit: without the one a site with JobRequeue=0 refuses
        # to requeue, without the other a dead node leaves the rest waiting in a collective (42 s against 3 s, tried).
        "additional_parameters": {"requeue": True},
        "srun_args": ["--kill-on-bad-exit=1", "--cpu-bind=none"],
    }
    if ranks == config.cluster.ranks_per_node:
        parameters["exclusive"] = True
    else:
        # A CPU for each rank is the least; srun of Slurm 22.05 and 23.02 does not take it from sbatch.
        parameters["cpus_per_task"] = ranks
        parameters["srun_args"].append(f"--cpus-per-task={ranks}")
    return {name: value for name, value in parameters.items() if value is not None}


def _task_command(run: RunDir) -> str:
    return f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(run.submission_path))}"


def _code_variables(run: RunDir) -> dict[str, str]:
    """The host task imports the run's own code; PYTHONSAFEPATH, for `python -m` puts the current directory first."""
    return {"PYTHONPATH": str(run.code_path), "PYTHONSAFEPATH": "1"}


@contextmanager
def _submission_environment(run: RunDir) -> Iterator[None]:
    """What a job inherits: the variables that lead to its code, and deafness to this terminal.

    submitit's local controller is a plain child in our process group: Ctrl-C would kill it where the run shall be
    drained, and closing the terminal where it shall go on.
    """
    variables = dict(os.environ)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    for name in variables:
        if name.startswith(JOB_VARIABLES) and name != "SLURM_CONF":
            del os.environ[name]
    os.environ.update(_code_variables(run))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        for number, handler in handlers.items():
            signal.signal(number, handler)
