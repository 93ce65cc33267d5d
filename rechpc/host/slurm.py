"""Jobs: how a run is submitted, on this machine or to Slurm; the one file that knows submitit and Slurm's words.

Both launchers take the same way through submitit. Must not know what a job does.
"""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.slurm.slurm import _make_sbatch_string

from rechpc.choices import Device, GpuRequest, Launcher
from rechpc.config import RunConfig
from rechpc.errors import ConfigError, LaunchError
from rechpc.rundir import AttemptDir, RunDir, read_json, write_json

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
    num_nodes: int
    node_name: str
    parent_pid: int | None  # of submitit's controller, where the launcher is local


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """What Slurm says of a job, in its own words."""

    name: str
    reason: str | None

    @property
    def ended(self) -> bool:
        return self.name in _ENDED

    @property
    def pending(self) -> bool:
        return self.name in _PENDING


FORGOTTEN = "FORGOTTEN"  # our word for a job that Slurm no longer knows
Known = Mapping[str, JobState]  # what Slurm said of many jobs at one moment, by job id
_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT", FORGOTTEN),
}
_PENDING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}

# Options of sbatch that a key stands for already; given a second time, in job.sbatch, one of the two would win
# without a word.
_KEY_OF_OPTION = {
    **{name: f"job.{name}" for name in ("partition", "account", "qos", "constraint", "reservation", "nodelist")},
    **{name: f"job.{name}" for name in ("exclude", "dependency", "nodes", "exclusive")},
    **{"mail-user": "job.mail_user", "mail-type": "job.mail_type", "time": "job.time_limit_min", "job-name": "name"},
    **{"mem": "job.memory_gib", "cpus-per-task": "job.cpus_per_rank", "signal": "job.signal_lead_s"},
}
_OWN_OPTIONS = {"array", "error", "ntasks", "ntasks-per-node", "open-mode", "output", "requeue", "no-requeue", "wrap"}


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
    for name in config.cluster.sbatch | config.job.sbatch:
        key = f"{'job' if name in config.job.sbatch else 'cluster'}.sbatch.{name}"
        if name in _KEY_OF_OPTION:
            raise ConfigError(f"{key}: --{name} comes from {_KEY_OF_OPTION[name]}; set that instead")
        if name in _OWN_OPTIONS:
            raise ConfigError(f"{key}: rechpc sets --{name} itself; leave it out")
        if name in ("gres", "gpus-per-node") and config.cluster.gpu_request is not GpuRequest.none:
            asked = f"cluster.gpu_request={config.cluster.gpu_request} asks for GPUs already"
            raise ConfigError(f"{key}: {asked}; set cluster.gpu_request=none to ask in your own words")


def submit(task: Callable[[], str], *, run: RunDir, config: RunConfig) -> Job:
    """Hand `task` to the launcher, once per node. Raises LaunchError when it is refused."""
    check(run, config)
    submitted_at_s = time.time()
    try:
        with submission_environment(run):
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


def is_alive(job: Job | None, run: RunDir, known: Known | None = None) -> bool | None:
    """Whether a job still waits or runs; None where this machine cannot tell."""
    if job is None or job.path != str(run.path):
        return None
    if job.launcher is Launcher.slurm:
        found = state(job) if known is None else known.get(job.job_id)
        return None if found is None else not found.ended
    if job.pid is None or job.host != socket.gethostname() or not Path("/proc/self").exists():
        return None
    try:
        command = Path(f"/proc/{job.pid}/cmdline").read_bytes()  # empty for a zombie
    except OSError:
        return False
    # The folder tells it from a later process that got the same id.
    return os.fsencode(run.submission_path) in command.split(b"\0")


def state(job: Job) -> JobState | None:
    """What Slurm says of a job; None where it is not at hand."""
    return snapshot([job]).get(job.job_id)


def snapshot(jobs: Iterable[Job]) -> Known:
    """What Slurm says of all these jobs now; nothing where it is not at hand.

    squeue knows the living and what ended some minutes ago, sacct everything, where there is accounting.
    """
    wanted = {job.job_id for job in jobs if job.launcher is Launcher.slurm}
    found: dict[str, JobState] = {}
    # One id more, for squeue fails where it has forgotten the only one; it prints its line of names when it answers.
    queue = ("squeue", "--array", "--states=all", "--format=%i|%T|%r", "--jobs=1,")
    accounting = ("sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State,Reason", "--jobs=")
    answered = False
    for *command, ids in (queue, accounting):
        missing = sorted(wanted - found.keys())
        text = ask(*command, ids + ",".join(missing)) if missing else ""
        answered |= text.startswith("JOBID|")
        for job_id, name, reason in (line.split("|") for line in text.splitlines() if line.count("|") == 2):
            if job_id in missing:
                words = name.split()  # "CANCELLED by 1000"
                found[job_id] = JobState(name=words[0], reason=None if reason in ("None", "") else reason)
    if answered:
        found |= {job_id: JobState(name=FORGOTTEN, reason=None) for job_id in wanted - found.keys()}
    return found


def node_address(node_name: str) -> str | None:
    """Where Slurm finds a node; None where it does not say."""
    match = re.search(r"NodeAddr=(\S+)", ask("scontrol", "show", "node", "--oneliner", node_name))
    return match[1] if match else None


def cancel(job: Job) -> None:
    """End a job at once. Raises LaunchError when Slurm refuses."""
    if job.pid is None:
        tell("scancel", job.job_id)
        return
    with suppress(ProcessLookupError):  # it ended by itself meanwhile
        os.kill(job.pid, signal.SIGKILL)  # of the local controller; its host task, torchrun and ranks die with it


def requeue() -> None:
    """Have the job that this process belongs to start again; Slurm ends what is left of it now."""
    own_id = job_id()
    try:
        tell("scontrol", "requeue", own_id)
    except LaunchError as error:
        raise LaunchError(
            f"job {own_id} should start again, but {error}; this site may forbid it (JobRequeue=0, --no-requeue): "
            "go on with python -m rechpc.submit resume=RUN_DIR"
        ) from error


def check_site(run: RunDir, config: RunConfig) -> None:
    """Raise ConfigError for what this site would refuse, or keep waiting for ever. Queues nothing."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "cluster.launcher=slurm: sbatch is not on the PATH; go to a login node, load the site's Slurm module, "
            "or choose cluster=local"
        )
    partition = config.job.partition
    known = ask("sinfo", "--all", "--noheader", "--format=%R").split()
    if partition and known and not set(partition.split(",")) <= set(known):
        raise ConfigError(f"job.partition={partition}: no such partition; expected one of {', '.join(sorted(known))}")
    limits = dict(re.findall(r"(\w+)=(\S+)", ask("scontrol", "show", "partition", "--oneliner", partition or "")))
    minutes = _minutes(limits.get("MaxTime", "UNLIMITED"))
    if partition and minutes is not None and config.job.time_limit_min > minutes:
        # Without EnforcePartLimits Slurm takes such a job and never starts it (PartitionTimeLimit).
        raise ConfigError(
            f"job.time_limit_min={config.job.time_limit_min}: partition {partition} allows {minutes}; set "
            f"job.time_limit_min={minutes}, the run is requeued until it is done"
        )
    nodes = limits.get("TotalNodes", "")
    if partition and nodes.isdigit() and config.job.nodes > int(nodes):
        raise ConfigError(f"job.nodes={config.job.nodes}: partition {partition} has {nodes}; set job.nodes={nodes}")
    script = batch_script(run, config)
    done = _run(["sbatch", "--test-only"], text=script)
    if done.returncode:
        words = " ".join(done.stderr.replace("sbatch: error:", "").replace("allocation failure:", "").split())
        raise ConfigError(f"Slurm refuses the job: {words}; look at {_asked(config)}")


def attempt_of_this_job(run: RunDir) -> AttemptDir | None:
    """The attempt that the job around this process has started; None where it did not come that far."""
    attempt = run.attempt(_slurm_attempt_name())
    return attempt if attempt.facts_path.exists() else None


def batch_script(run: RunDir, config: RunConfig, *, element: bool = False) -> str:
    """The text that `submit` would hand to sbatch; with `element` what an element of an array runs, without submitit.

    submitit's host tasks look for a file that is named by the job, which is not known before an array is submitted.
    """
    check(run, config)
    task = shlex.join([sys.executable, "-u", "-m", "rechpc.host.task", str(run.path)])
    # Private in submitit 1.5.4, which has no public way to see the script before it is submitted; a test compares
    # it with what sbatch gets.
    parameters = _sbatch_parameters(run, config) | {"map_count": 1 if element else None}
    return str(_make_sbatch_string(task if element else _task_command(run), run.submission_path, **parameters))


def local_command(run: RunDir) -> str:
    """What submitit's local controller would start."""
    return _task_command(run)


def placement(launcher: Launcher, run: RunDir) -> Placement:
    """Where this host task stands, from the variables that its launcher set."""
    if launcher is Launcher.local:
        job_id = os.environ["SUBMITIT_LOCAL_JOB_ID"]
        # Process ids come again, in a container even soon, and an attempt must not find the files of an older one.
        restart = sum(attempt.name.startswith(f"{job_id}.") for attempt in run.attempts())
        return Placement(
            attempt_name=f"{job_id}.{restart}", node_rank=0, num_nodes=1, node_name="localhost", parent_pid=int(job_id)
        )
    return Placement(
        attempt_name=_slurm_attempt_name(),
        node_rank=int(os.environ["SLURM_NODEID"]),
        num_nodes=int(os.environ["SLURM_JOB_NUM_NODES"]),
        node_name=os.environ["SLURMD_NODENAME"],
        parent_pid=None,
    )


def _slurm_attempt_name() -> str:
    # The count is unset in the first start of a job.
    return f"{job_id()}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"


def job_id() -> str:
    """The id of this job as `submit` knew it: an element of an array has one of its own beside it."""
    array, element = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    return f"{array}_{element}" if array else os.environ["SLURM_JOB_ID"]


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
    job, ranks = config.job, config.ranks_per_node
    exclusive = ranks == config.cluster.ranks_per_node if job.exclusive is None else job.exclusive
    cpus = None if exclusive and job.cpus_per_rank is None else ranks * (job.cpus_per_rank or 1)
    request = config.cluster.gpu_request
    # In the place of the shell, which would die of the SIGTERM of a requeue and take what follows one with it.
    finish = f"exec {shlex.quote(sys.executable)} -m rechpc.host.finish {shlex.quote(str(run.path))} --status $?"
    parameters: dict[str, Any] = {
        "job_name": config.name,
        **{name: getattr(job, name) for name in ("partition", "account", "qos", "constraint", "nodelist", "exclude")},
        **{name: getattr(job, name) for name in ("dependency", "mail_user", "mail_type")},
        "time": job.time_limit_min,
        "nodes": job.nodes,
        "ntasks_per_node": 1,
        "gpus_per_node": ranks if request is GpuRequest.gpus_per_node else None,
        "gres": f"gpu:{ranks}" if request is GpuRequest.gres else None,
        "mem": None if job.memory_gib is None else f"{job.memory_gib}G",
        "exclusive": True if exclusive else None,
        "cpus_per_task": cpus,
        "signal_delay_s": int(job.signal_lead_s),
        "setup": [*_setup(run), *job.setup],
        "teardown": [finish],
        # submitit sends neither --requeue nor --kill-on-bad-exit: without the one a site with JobRequeue=0 refuses
        # to requeue, without the other a dead node leaves the rest waiting in a collective (42 s against 3 s, tried).
        "additional_parameters": {
            "requeue": True,
            **({"reservation": job.reservation} if job.reservation else {}),
            **_options(config.cluster.sbatch | job.sbatch),
        },
        # srun of Slurm 22.05 and 23.02 does not take the CPUs from sbatch.
        "srun_args": [
            "--kill-on-bad-exit=1",
            "--cpu-bind=none",
            *([f"--cpus-per-task={cpus}"] if cpus else []),
            *job.srun,
        ],
    }
    # submitit's default, its own name, is refused by a site that knows its wckeys.
    return {**{name: value for name, value in parameters.items() if value is not None}, "wckey": None}


def _options(given: dict[str, str]) -> dict[str, str | bool]:
    """For submitit: an option that is `true` stands alone, one that is `false` (to undo a site's) is left out."""
    return {
        name: True if value.lower() == "true" else value for name, value in given.items() if value.lower() != "false"
    }


def _setup(run: RunDir) -> list[str]:
    """Lines in front of srun: the run's own code, and a word where this node does not see the run at all."""
    path = shlex.quote(str(run.config_path))
    return [
        *(f"export {name}={shlex.quote(value)}" for name, value in _code_variables(run).items()),
        f'[ -r {path} ] || {{ echo "$(hostname) does not see "{path}": set runs_root= to a file system that all nodes '
        'share"; exit 1; }',
    ]


def _task_command(run: RunDir) -> str:
    return f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(run.submission_path))}"


def _code_variables(run: RunDir) -> dict[str, str]:
    """The host task imports the run's own code; PYTHONSAFEPATH, for `python -m` puts the current directory first."""
    return {"PYTHONPATH": str(run.code_path), "PYTHONSAFEPATH": "1"}


@contextmanager
def submission_environment(run: RunDir) -> Iterator[None]:
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


def ask(*command: str) -> str:
    """What a command of Slurm prints; nothing where it is not at hand, fails or takes too long."""
    try:
        done = _run(list(command))
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def tell(*command: str, text: str = "") -> str:
    """What a command of Slurm prints. Raises LaunchError where it fails."""
    try:
        done = _run(list(command), text=text)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{shlex.join(command)}: {error}") from error
    if done.returncode:
        raise LaunchError(f"{shlex.join(command)}: {' '.join(done.stderr.split()) or f'status {done.returncode}'}")
    return done.stdout


def _run(command: list[str], *, text: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=30, check=False)


def _minutes(limit: str) -> int | None:
    """Minutes of a time limit as Slurm prints it, days-hours:minutes:seconds; None for no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", limit)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return days * 1440 + hours * 60 + minutes + seconds // 60


def _asked(config: RunConfig) -> str:
    """The keys that Slurm may have meant, with their values."""
    names = ("nodes", "partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude", "memory_gib")
    given = [f"job.{n}={getattr(config.job, n)}" for n in names if getattr(config.job, n) is not None]
    return ", ".join([*given, f"job.ranks_per_node={config.ranks_per_node}"])
