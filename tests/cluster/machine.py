"""A machine of its own inside this one: a root file system with namespaces, cgroup, devices and processes around it.

Knows the kernel and util-linux, nothing of Slurm or Apptainer. `enter.sh` does the work. Everything that runs in a
machine ends with it, however it was started.
"""

import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_ENTER = Path(__file__).with_name("enter.sh")
_TOOLS = ("unshare", "nsenter", "setpriv", "mount", "pivot_root")
_USER_ID = 1000


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A place for a machine, which runs between `start` and `stop`. The name of `state` is that of its cgroup."""

    state: Path
    env: Mapping[str, str] = field(default_factory=dict)  # of every command in it


class MachineError(Exception):
    """A machine did not start, or a command in it failed."""


def why_not() -> str | None:
    """Why machines cannot run here, in a line; None where they can."""
    if platform.system() != "Linux":
        return f"{platform.system()} is not Linux"
    if os.geteuid() != 0:
        return "not root, which mounts and network namespaces need"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} missing; on Debian: apt install util-linux"
    probes = {
        "namespaces": "true",
        "a file system of its own": 'mount -t tmpfs tmpfs "$1" && mkdir "$1/up" "$1/work" "$1/root" && '
        'mount -t overlay -o "lowerdir=/usr,upperdir=$1/up,workdir=$1/work" overlay "$1/root"',
        "devices": 'mount -t tmpfs tmpfs "$1" && mknod "$1/fuse" c 10 229 && : <>"$1/fuse"',
        # What Apptainer does for an ordinary user.
        "user namespaces for ordinary users": f"setpriv --reuid {_USER_ID} --regid {_USER_ID} --clear-groups "
        "unshare --user --map-root-user --mount true",
    }
    namespaces = ["unshare", "--cgroup", "--uts", "--ipc", "--net", "--pid", "--mount", "--fork"]
    with tempfile.TemporaryDirectory() as scratch:
        for what, command in probes.items():
            probe = [*namespaces, "sh", "-c", command, "sh", scratch]
            done = subprocess.run(probe, capture_output=True, text=True, timeout=30, check=False)
            if done.returncode != 0:
                return f"no {what}: {' '.join(done.stderr.split()) or f'status {done.returncode}'}"
    return None


def start(machine: Machine, *, tree: Path, binds: Sequence[str] = (), has_network: bool = False) -> None:
    """Start process 1 of `machine`, after ending one that was left over; raises MachineError.

    `tree` is its root file system and is not written to. `binds` are source:target[:ro].
    """
    stop(machine)
    shutil.rmtree(machine.state, ignore_errors=True)
    machine.state.mkdir(parents=True)
    log_path = machine.state / "enter.log"
    network = "host" if has_network else "private"
    arguments = ["cgroup", str(machine.state), str(tree), cgroup_version(), network, *binds]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", str(_ENTER), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    ready = Path("/proc", str(process.pid), "root", "run/ready")  # its root is the tree once pivot_root is done
    if not wait_for(lambda: ready.exists() or process.poll() is not None, timeout_s=60) or process.poll() is not None:
        stop(machine)
        raise MachineError(f"{machine.state.name} did not start: {log_path.read_text().strip()}")


def process_id(machine: Machine) -> int | None:
    """The process that stands for a running machine, None where it does not run."""
    try:
        pid = int((machine.state / "pid").read_text())
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return None
    return pid if os.fsencode(machine.state) in arguments else None  # ids are reused


def stop(machine: Machine) -> None:
    """End every process of `machine`, and leave neither a mount nor a cgroup; does nothing where there is none."""
    if (pid := process_id(machine)) is not None:
        os.kill(pid, signal.SIGKILL)
        if not wait_for(lambda: process_id(machine) is None, timeout_s=30):
            raise MachineError(f"{machine.state.name}: process {pid} does not end")
    kind = ["cgroup", "-o", "freezer"] if cgroup_version() == "v1" else ["cgroup2"]
    # The kernel empties a cgroup some time after its last process is gone.
    script = 'mount -t "$@" cgroup "$0" && ! [ -e "$0/$NAME" ] || find "$0/$NAME" -depth -type d -exec rmdir {} +'
    with tempfile.TemporaryDirectory() as scratch:
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, scratch, *kind]
        env = {**os.environ, "NAME": machine.state.name}

        def remove() -> bool:
            return subprocess.run(command, env=env, capture_output=True, timeout=30, check=False).returncode == 0

        if not wait_for(remove, timeout_s=30):
            raise MachineError(f"{machine.state.name}: its cgroup cannot be removed; does something still run in it?")


@contextmanager
def running(machine: Machine, *, tree: Path, binds: Sequence[str], has_network: bool = False) -> Iterator[None]:
    """A machine for the time of a block."""
    start(machine, tree=tree, binds=binds, has_network=has_network)
    try:
        yield
    finally:
        stop(machine)


def command(
    machine: Machine, argv: Sequence[str], *, user: str, cwd: str | None = None, env: Mapping[str, str] | None = None
) -> list[str]:
    """The command that runs `argv` in a running machine, with nothing of the environment around but TERM and proxies.

    Its exit status is that of `argv`, which dies with it. Raises MachineError where the machine does not run.
    """
    pid = process_id(machine)
    if pid is None:
        raise MachineError(f"{machine.state.name} does not run")
    home = "/" if user == "root" else f"/home/{user}"
    keep = ("TERM", "http_proxy", "https_proxy", "no_proxy")
    variables = {
        **{name: os.environ[name] for name in keep if name in os.environ},
        **{"HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/bash", "LANG": "C.UTF-8"},
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        **machine.env,
        **(env or {}),
    }
    # Who joins a cgroup namespace stays in the cgroup it came from, and a slurmd is started in the one it is in.
    join = 'echo 0 >/run/init.cgroup/cgroup.procs && cd "$1" && shift && exec "$@"'
    become = ["setpriv", "--reuid", user, "--regid", user, "--init-groups", "--pdeathsig", "KILL", "--"]
    return [
        *("nsenter", "--target", str(pid), "--mount", "--uts", "--ipc", "--net", "--cgroup"),
        # The process that stands for the machine made its process namespace and is not in it.
        f"--pid=/proc/{pid}/ns/pid_for_children",
        *("--", "sh", "-c", join, "sh", cwd or home),
        *become,
        *("env", "-i", *(f"{name}={value}" for name, value in variables.items()), *argv),
    ]


def run(
    machine: Machine,
    argv: Sequence[str],
    *,
    user: str,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
) -> str:
    """The output of a command in `machine`; raises MachineError with its last lines where it fails."""
    with tempfile.TemporaryFile("w+") as output:  # a pipe would be held open by a daemon that the command leaves
        try:
            status = subprocess.run(
                command(machine, argv, user=user, cwd=cwd, env=env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
        output.seek(0)
        text = output.read()
    if status != 0:
        end = f"ended with status {status}" if status is not None else f"did not end within {timeout_s:g} s"
        raise MachineError("\n".join([f"{' '.join(argv)}: {end}:", *text.splitlines()[-20:]]))
    return text


def cgroup_version() -> str:
    """v1 where any such hierarchy is in use, as Slurm sees it."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    return "v2" if all(line.startswith("0::") for line in lines) else "v1"


def wait_for(condition: Callable[[], bool], *, timeout_s: float, poll_s: float = 0.1) -> bool:
    """Whether `condition` held before the time was over."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(poll_s)
    return True
