"""The host task: what the launcher runs once on every node, outside the container.

It starts torchrun, turns signals into the stop file, and sees to it that an attempt never ends without an outcome.
Knows the run directory and the environment; Slurm's words are in `rechpc.host.slurm`, Apptainer's in
`rechpc.host.container`. Never imports torch.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from rechpc import lifeline, topology
from rechpc.config import ContainerRuntime, Device, RunConfig
from rechpc.errors import LaunchError
from rechpc.host import container, slurm
from rechpc.rules import load
from rechpc.rundir import AttemptDir, Outcome, RunDir, StopReason, read_json, write_json

_POLL_S = 0.1
# Other nodes see what node 0 wrote through a shared file system that may cache "no such file" for a minute.
_JOIN_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Where the torchruns of several nodes meet: a port of node 0."""

    host: str
    port: int


@dataclass(frozen=True)
class HostTask:
    """One attempt of a run on this node; submitit pickles it and calls it."""

    run_dir: str

    def __call__(self) -> str:
        """Run the ranks to their end and return the outcome; raises LaunchError when the attempt failed.

        It must not return then: its exit status makes srun end the other nodes, and Slurm call the job failed.
        """
        stop = _StopSignals()
        run = RunDir.open(self.run_dir)
        config = load(run.config_path)
        here = slurm.placement(config.cluster.launcher, run)
        if here.parent_pid is not None:
            lifeline.die_with(here.parent_pid)
        attempt, rendezvous = _begin(run, config, here)
        argv = command(run, config, attempt_name=attempt.name, node_rank=here.node_rank, rendezvous=rendezvous)
        log_path = attempt.node_log_path(here.node_rank)
        error = _run_ranks(argv, log_path, attempt, stop, stop_timeout_s=config.job.stop_timeout_s)
        if here.node_rank == 0:
            _ensure_outcome(attempt, run, error)
        # What the ranks agreed on counts, even where one of them broke on its way out.
        outcome = read_json(attempt.outcome_path) or {"outcome": Outcome.failed if error else "ended", "error": error}
        if outcome["outcome"] == Outcome.failed:
            raise LaunchError(f"{run.path}: attempt {attempt.name} failed: {outcome['error']}")
        return str(outcome["outcome"])


class _StopSignals:
    """Takes the signals over from submitit, which would requeue at once on SIGUSR2 and ignore SIGTERM.

    A handler only notes what came: waiting for a child in a handler that interrupted such a wait never sees its end.
    """

    def __init__(self) -> None:
        self.reason: StopReason | None = None
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.reason = self.reason or (StopReason.requeue if number == signal.SIGUSR2 else StopReason.drain)


def command(
    run: RunDir,
    config: RunConfig,
    *,
    attempt_name: str,
    node_rank: int = 0,
    rendezvous: Rendezvous | None = None,
) -> list[str]:
    """The command that starts the ranks of one node, with every variable that is set for them."""
    env = rank_environment(config, os.environ, code_path=run.code_path, cpus=topology.num_cpus())
    binds = [str(run.path), *([config.data.path] if config.data.path else [])]
    inner = torchrun_argv(config, run, attempt_name=attempt_name, node_rank=node_rank, rendezvous=rendezvous)
    return container.argv(config.container, inner, env=env, binds=binds, gpu=config.cluster.device is Device.cuda)


def torchrun_argv(
    config: RunConfig, run: RunDir, *, attempt_name: str, node_rank: int = 0, rendezvous: Rendezvous | None = None
) -> list[str]:
    """torchrun and the ranks behind it; `rendezvous` is needed by more than one node only."""
    python = sys.executable if config.container.runtime is ContainerRuntime.none else "python"
    if rendezvous is None:
        # Port 0 lets the system choose a free one, which torchrun passes on; tried with torch 2.13, also where the
        # host name does not resolve. --standalone would look the host name up.
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    else:
        # With the c10d backend node ranks come as they join, and the host is guessed from its name (pytorch 73656).
        meet = ["--node-rank", str(node_rank), "--master-addr", rendezvous.host, "--master-port", str(rendezvous.port)]
    return [
        *(python, "-u", "-m", "torch.distributed.run"),
        *("--nnodes", str(config.job.nodes), "--nproc-per-node", str(config.ranks_per_node), *meet),
        *("-m", "rechpc.train", str(run.path), "--attempt", attempt_name),
    ]


def rank_environment(config: RunConfig, host: Mapping[str, str], *, code_path: Path, cpus: int) -> dict[str, str]:
    """The variables that are set for the ranks; `container.env` comes last and wins."""
    env = {
        # Unset, two ranks on two cores ran 2.8 times slower: each takes a thread per core and spins while it waits.
        "OMP_NUM_THREADS": str(max(1, cpus // config.ranks_per_node)),
        "OMP_WAIT_POLICY": "PASSIVE",
        # torchrun reads its defaults from PET_*. It would install handlers for SIGTERM and SIGINT, which a stopping
        # run must survive; it needs one signal at least. From torch 2.9 on (older ones ignore it), where torchrun
        # overwrites TORCHELASTIC_SIGNALS_TO_HANDLE.
        "PET_SIGNALS_TO_HANDLE": "SIGHUP",
        "PYTHONNOUSERSITE": "1",
        "PYTHONPATH": str(code_path),
        "PYTHONSAFEPATH": "1",  # else `python -m` prefers the current directory to the run's own code
        "PYTHONUNBUFFERED": "1",
    }
    if config.job.nodes == 1:
        env["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo needs a host name that resolves
    env.update(_visible_devices(host))
    return env | config.container.env


def _visible_devices(host: Mapping[str, str]) -> dict[str, str]:
    """One variable that says which GPUs there are.

    Slurm sets several to the same value; on ROCm the first filters and the others index what it left, so that two
    equal ones leave no GPU at all (Parsl 3858). torch on another vendor's GPU reads the last only.
    """
    names = ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"]
    if not Path("/dev/kfd").exists():
        names = names[-1:]
    return dict([(name, host[name]) for name in names if name in host][:1])


def _base_environment(host: Mapping[str, str]) -> dict[str, str]:
    """What the ranks inherit without a container: everything but the launcher's and the devices' variables."""
    devices = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
    return {k: v for k, v in host.items() if not k.startswith((*slurm.JOB_VARIABLES, "PET_")) and k not in devices}


def _begin(run: RunDir, config: RunConfig, here: slurm.Placement) -> tuple[AttemptDir, Rendezvous | None]:
    """Node 0 starts the attempt and says where to meet; the others wait for it."""
    attempt = run.attempt(here.attempt_name)
    if here.node_rank == 0:
        attempt = run.start_attempt(here.attempt_name)
    if config.job.nodes == 1:
        return attempt, None
    if here.node_rank == 0:
        # A name from Slurm's node list need not resolve; a port that the system just gave out is free.
        with socket.create_server(("", 0)) as server:
            rendezvous = Rendezvous(host=socket.gethostname(), port=server.getsockname()[1])
        write_json(attempt.rendezvous_path, asdict(rendezvous))
        return attempt, rendezvous
    give_up_at = time.monotonic() + _JOIN_TIMEOUT_S
    while (facts := read_json(attempt.rendezvous_path)) is None:
        if time.monotonic() > give_up_at:
            raise LaunchError(
                f"{attempt.rendezvous_path}: not there after {_JOIN_TIMEOUT_S:.0f} s; node 0 writes it: "
                "is runs_root= on a file system that all nodes share, and did node 0 start?"
            )
        time.sleep(_POLL_S)
    return attempt, Rendezvous(**facts)


def _run_ranks(
    argv: list[str], log_path: Path, attempt: AttemptDir, stop: _StopSignals, *, stop_timeout_s: float
) -> str | None:
    """Start torchrun and wait for its end; one line on what went wrong on this node, if anything did."""
    me = os.getpid()
    with log_path.open("ab") as log:
        log.write(f"{shlex.join(argv)}\n".encode())
        log.flush()
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_base_environment(os.environ),
                start_new_session=True,
                preexec_fn=lambda: lifeline.die_with(me),
            )
        except OSError as error:
            return f"{argv[0]}: cannot be started on {socket.gethostname()}: {error.strerror}; is it on the PATH there?"
    if _wait(process, attempt, stop, stop_timeout_s=stop_timeout_s):
        return f"the ranks did not end within job.stop_timeout_s={stop_timeout_s:g} and were killed"
    return _exit_reason(attempt, log_path, process.returncode) if process.returncode else None


def _wait(
    process: "subprocess.Popen[bytes]", attempt: AttemptDir, stop: _StopSignals, *, stop_timeout_s: float
) -> bool:
    """Wait for torchrun, passing a stop on to the ranks; whether it had to be killed."""
    kill_at: float | None = None
    killed = False
    while process.poll() is None:
        if stop.reason is not None:
            attempt.request_stop(stop.reason)
        if kill_at is None and (attempt.stop_path.exists() or attempt.outcome_path.exists()):
            kill_at = time.monotonic() + stop_timeout_s
        if kill_at is not None and time.monotonic() > kill_at and not killed:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks have sessions of their own, and die with torchrun
            killed = True
        time.sleep(_POLL_S)
    return killed


def _exit_reason(attempt: AttemptDir, log_path: Path, status: int) -> str:
    """One line for ranks that ended badly: the first error, else how torchrun says that one died."""
    if first := attempt.first_error():
        return f"rank {first['rank']}: {' '.join(str(first['error']).split())}"
    lines = [line for line in log_path.read_text(errors="replace").splitlines() if line.strip()][1:]
    for line in lines:
        if match := re.search(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", line):
            code, local_rank = int(match[1]), match[2]
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            hint = "; out of host memory?" if -code == signal.SIGKILL else ""
            return f"local rank {local_rank} {how}{hint}"
    return f"torchrun ended with status {status}: " + (" | ".join(lines[-3:]) or f"{log_path} is empty")


def _ensure_outcome(attempt: AttemptDir, run: RunDir, error: str | None) -> None:
    """Write the outcome that the ranks did not live to write."""
    if attempt.outcome_path.exists():
        return
    facts = {
        "outcome": Outcome.failed,
        "step": int((read_json(attempt.heartbeat_path) or {}).get("step", 0)),
        "checkpoint_step": next(iter(run.committed_steps()), None),
        "error": error or "the ranks ended without an outcome",
    }
    write_json(attempt.outcome_path, facts)
