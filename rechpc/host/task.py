"""The host task: what the launcher runs once on every node, outside the container.

Also `python -m rechpc.host.task RUN_DIR`. It starts torchrun, turns signals into the stop file, and sees to it that an
attempt never ends without an outcome.
Knows the run directory and the environment; Slurm's words are in `rechpc.host.slurm`, Apptainer's in
`rechpc.host.container`. Never imports torch.
"""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from rechpc import lifeline, topology
from rechpc.choices import ContainerRuntime, Device, NumaBinding
from rechpc.config import JobConfig, RunConfig
from rechpc.errors import LaunchError, RechpcError
from rechpc.findings import has_preflight
from rechpc.host import container, hang, slurm
from rechpc.host.preflight import NodeStage
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
    check_port: int = 0  # where preflight tries whether node 0 can be reached


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
        if run.result_path.exists():  # Slurm requeues a preempted job that has just ended
            return str(Outcome.finished)
        if not has_preflight(config):  # which names the node
            container.check_runtime(config.container, config.cluster.binds)
        attempt, rendezvous = _begin(run, config, here)
        if has_preflight(config):
            _preflight(run, config, attempt, here, rendezvous, stop)
        identifying = threading.Thread(target=_record_image, args=(run, attempt, config), daemon=True)
        if here.node_rank == 0 and config.container.image:
            identifying.start()  # beside the run: it may have to read the whole image
        argv = command(run, config, attempt_name=attempt.name, node_rank=here.node_rank, rendezvous=rendezvous)
        error = _run_ranks(argv, attempt, stop, config=config, here=here)
        shutil.rmtree(_cache_path(attempt.name), ignore_errors=True)
        if here.node_rank == 0:
            ensure_outcome(attempt, run, error)
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
    inner = torchrun_argv(config, run, attempt_name=attempt_name, node_rank=node_rank, rendezvous=rendezvous)
    return contained(run, config, inner, attempt_name=attempt_name)


def contained(run: RunDir, config: RunConfig, inner: list[str], *, attempt_name: str) -> list[str]:
    """The command that runs `inner` where ranks run, with what they get: the container, its binds, the variables."""
    env = _contained_environment(run, config, attempt_name=attempt_name)
    binds = [str(run.path), *([config.data.path] if config.data.path else []), *config.cluster.binds]
    return container.argv(config.container, inner, env=env, binds=binds, gpu=config.cluster.device is Device.cuda)


def _contained_environment(run: RunDir, config: RunConfig, *, attempt_name: str) -> dict[str, str]:
    env = rank_environment(config, os.environ, code_path=run.code_path, cpus=topology.num_cpus())
    caches = _cache_path(attempt_name)
    if config.container.runtime is not ContainerRuntime.none:
        # Compiled kernels: in a home that all nodes share they cost a lock and go stale; see docs/container.md.
        names = ("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        env = {name: f"{caches}/{name.lower()}" for name in names} | env
    if has_preflight(config) and config.cluster.device is Device.cuda:
        # RCCL says which transport it takes in these words alone, once, when it sets itself up; it fills in %h and %p.
        log = run.attempt(attempt_name).preflight_folder / "rccl-%h-%p.log"
        env = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(log)} | env
    return env


def _preflight(
    run: RunDir,
    config: RunConfig,
    attempt: AttemptDir,
    here: slurm.Placement,
    rendezvous: Rendezvous | None,
    stop: "_StopSignals",
) -> None:
    """Check this node; raises LaunchError, on node 0 with an outcome written, where one of the nodes fails."""
    python = _python(config)

    def probe(out: Path) -> list[str]:
        inner = [python, "-u", "-m", "rechpc.rank.probe", str(run.path), str(out)]
        return contained(run, config, inner, attempt_name=attempt.name)

    try:
        NodeStage(config, attempt, here).run(
            probe,
            env=_contained_environment(run, config, attempt_name=attempt.name),
            meet=(rendezvous.host, rendezvous.check_port) if rendezvous else None,
            stopped=lambda: stop.reason is not None,
        )
    except LaunchError as error:
        if here.node_rank == 0:
            ensure_outcome(attempt, run, str(error))
        raise


def _python(config: RunConfig) -> str:
    return sys.executable if config.container.runtime is ContainerRuntime.none else "python"


def torchrun_argv(
    config: RunConfig, run: RunDir, *, attempt_name: str, node_rank: int = 0, rendezvous: Rendezvous | None = None
) -> list[str]:
    """torchrun and the ranks behind it; `rendezvous` is needed by more than one node only."""
    if rendezvous is None:
        # Port 0 lets the system choose a free one, which torchrun passes on; tried with torch 2.13, also where the
        # host name does not resolve. --standalone would look the host name up.
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    else:
        # With the c10d backend node ranks come as they join, and the host is guessed from its name (pytorch 73656).
        meet = ["--node-rank", str(node_rank), "--master-addr", rendezvous.host, "--master-port", str(rendezvous.port)]
    binding = config.cluster.numa_binding
    bind = [] if binding is NumaBinding.none else ["--numa-binding", str(binding)]
    ranks_here = config.world_size // config.machines
    return [
        *(_python(config), "-u", "-m", "torch.distributed.run"),
        *("--nnodes", str(config.machines), "--nproc-per-node", str(ranks_here), *meet, *bind),
        *("-m", "rechpc.train", str(run.path), "--attempt", attempt_name),
    ]


def rank_environment(config: RunConfig, host: Mapping[str, str], *, code_path: Path, cpus: int) -> dict[str, str]:
    """The variables that are set for the ranks; those of the cluster win, and `container.env` over them."""
    threads = len(topology.bound_cpus(config, 0)) or max(1, cpus * config.machines // config.world_size)
    env = {
        # Unset, two ranks on two cores ran 2.8 times slower: each takes a thread per core and spins while it waits.
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        # Threads of libgomp look this often before they sleep. FBGEMM's backward pass has hundreds of short parallel
        # parts: 1 rank of 2 threads took 74 ms a step without, 58 with 1,000, 51 with 10,000; beside a busy process on
        # one of the cores 89, 95 and 149 (2026-12-01, docs/performance.md).
        "GOMP_SPINCOUNT": "1000",
        # glibc gives large arrays back to the system after every step and gets them anew page by page: 6 ms for 60 MB
        # that are gone when it keeps them (2.36, docs/performance.md); kept, they cost what a step needs at its peak.
        "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
        "MALLOC_TOP_PAD_": str(128 << 20),
        # torchrun reads its defaults from PET_*. It would install handlers for SIGTERM and SIGINT, which a stopping
        # run must survive; it needs one signal at least. From torch 2.9 on (older ones ignore it), where torchrun
        # overwrites TORCHELASTIC_SIGNALS_TO_HANDLE.
        "PET_SIGNALS_TO_HANDLE": "SIGHUP",
        "PYTHONNOUSERSITE": "1",
        "PYTHONPATH": str(code_path),
        "PYTHONSAFEPATH": "1",  # else `python -m` prefers the current directory to the run's own code
        "PYTHONUNBUFFERED": "1",
    }
    if config.machines == 1:
        env["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo needs a host name that resolves
    env.update(_visible_devices(host))
    configured = config.cluster.env | config.container.env
    if "OMP_WAIT_POLICY" in configured:
        del env["GOMP_SPINCOUNT"]  # which would win
    return env | configured


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
    if here.num_nodes != config.machines:
        raise LaunchError(f"job.nodes={config.job.nodes}, but the job has {here.num_nodes} nodes; make them the same")
    attempt = run.attempt(here.attempt_name)
    if here.node_rank == 0:
        attempt = run.start_attempt(here.attempt_name)
    if config.machines == 1:
        return attempt, None
    if here.node_rank == 0:
        rendezvous = Rendezvous(
            host=_address(here.node_name),
            port=_free_port(here.attempt_name),
            check_port=_free_port(f"{here.attempt_name} preflight"),
        )
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


def _address(node_name: str) -> str:
    """The address of this node for the others: the one that Slurm itself uses, else that of a name of this host."""
    for name in (slurm.node_address(node_name), node_name, socket.gethostname(), socket.getfqdn()):
        try:
            address = socket.gethostbyname(name) if name else "127.0.0.1"
        except OSError:
            continue
        # With a loopback address every node would wait for itself (Debian gives one to the host name). Where it is
        # Slurm's own, all nodes are on one machine.
        if not address.startswith("127.") or address == slurm.node_address(node_name):
            return address
    raise LaunchError(
        f"node {node_name}: neither this name nor {socket.gethostname()} resolves to an address that other nodes can "
        "reach; ask the administrators, or add it to /etc/hosts"
    )


def _free_port(attempt_name: str) -> int:
    """A port for the ranks to meet, below the range from which the system takes those of outgoing connections.

    Each attempt begins its search elsewhere: the port of the one before may still be in TIME_WAIT.
    """
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    first = min(10_000, low // 2)
    start = zlib.crc32(attempt_name.encode())
    for offset in range(100):
        port = first + (start + offset) % (low - first)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise LaunchError(f"no free port among 100 below {low} on {socket.gethostname()}")


def _run_ranks(
    argv: list[str], attempt: AttemptDir, stop: _StopSignals, *, config: RunConfig, here: slurm.Placement
) -> str | None:
    """Start torchrun and wait for its end; one line on what went wrong on this node, if anything did."""
    log_path = attempt.node_log_path(here.node_rank)
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
    if killed := _wait(process, attempt, stop, config.job, here):
        return killed
    if not process.returncode:
        return None
    return _exit_reason(attempt, log_path, process.returncode, first_rank=here.node_rank * config.ranks_per_node)


def _wait(
    process: "subprocess.Popen[bytes]",
    attempt: AttemptDir,
    stop: _StopSignals,
    limits: JobConfig,
    here: slurm.Placement,
) -> str | None:
    """Wait for torchrun, passing a stop on to the ranks; why it had to be killed, if it had to."""
    kill_at: float | None = None
    killed: str | None = None
    watch = hang.Watch(attempt, limits.hang_timeout_s)
    while process.poll() is None:
        if stop.reason is not None:
            attempt.request_stop(stop.reason)
        if kill_at is None and (attempt.stop_path.exists() or attempt.outcome_path.exists()):
            kill_at = time.monotonic() + limits.stop_timeout_s
        if killed is None and kill_at is not None and time.monotonic() > kill_at:
            killed = f"the ranks did not end within job.stop_timeout_s={limits.stop_timeout_s:g}, and were killed"
        elif killed is None and watch.exceeded():
            hang.look(process.pid, attempt, node_rank=here.node_rank, node_name=here.node_name)
            killed = hang.conclude(attempt, watch.words(), node_rank=here.node_rank, num_nodes=here.num_nodes)
        if killed:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the ranks have sessions of their own, and die with torchrun
        time.sleep(_POLL_S)
    return killed


def _exit_reason(attempt: AttemptDir, log_path: Path, status: int, *, first_rank: int) -> str:
    """One line for ranks that ended badly: the first error, else how torchrun says that one died.

    `first_rank` is the lowest rank of this node. Leaves the word of a rank that was killed and could not.
    """
    lines = [line for line in log_path.read_text(errors="replace").splitlines() if line.strip()][1:]
    died = next(
        (m for line in lines if (m := re.search(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", line))), None
    )
    if died and int(died[1]) < 0:
        rank, name = first_rank + int(died[2]), signal.Signals(-int(died[1])).name
        error = f"killed by {name} on {socket.gethostname()}" + "; out of memory?" * (name == "SIGKILL")
        record = {"rank": rank, "time_s": time.time(), "error": error, "traceback": "", "killed": True}
        if not attempt.error_path(rank).exists():
            write_json(attempt.error_path(rank), record)
    if first := attempt.first_error():
        return f"rank {first['rank']}: {' '.join(str(first['error']).split())}"
    return f"torchrun ended with status {status}: " + (" | ".join(lines[-3:]) or f"{log_path} is empty")


def _cache_path(attempt_name: str) -> Path:
    """Where the ranks of this node keep what they compile, as long as the attempt lasts."""
    return Path(tempfile.gettempdir()) / f"rechpc-{os.getuid()}-{attempt_name}"


def _record_image(run: RunDir, attempt: AttemptDir, config: RunConfig) -> None:
    """Write which image this attempt runs in, and whether the one before ran in another."""
    assert config.container.image is not None
    path = Path(config.container.image)
    image = {**asdict(container.identify(path)), "facts": container.facts(path)}
    before = [found for a in run.attempts() if a.name != attempt.name and (found := read_json(a.image_path))]
    changed = bool(before) and before[-1]["sha256"] != image["sha256"]
    write_json(attempt.image_path, {**image, **({"changed_from": before[-1]["sha256"]} if changed else {})})


def ensure_outcome(attempt: AttemptDir, run: RunDir, error: str | None) -> None:
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


def main() -> int:
    """Run one node's part of an attempt, for batch scripts that do not come from `rechpc.submit`."""
    parser = argparse.ArgumentParser(prog="python -m rechpc.host.task", description=main.__doc__)
    parser.add_argument("run_dir", help="run directory, as written by python -m rechpc.submit stage=true")
    try:
        print(HostTask(parser.parse_args().run_dir)())
    except RechpcError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
