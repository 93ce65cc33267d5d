"""The test cluster: a real Slurm with three nodes and a real Apptainer, in namespaces of this machine.

    python -m tests.cluster.cluster build                        trees and image, cached in ~/.cache or RECHPC_CACHE
    python -m tests.cluster.cluster up [--accounting]            start it; seconds, once built
    python -m tests.cluster.cluster exec [--user root] -- CMD    run a command on its login node
    python -m tests.cluster.cluster status                       0: up, 1: down, 3: it cannot run here, and why
    python -m tests.cluster.cluster down                         stop all clusters of this checkout

Inside, /checkout is this checkout (read only), /scratch a directory that the nodes share, of user hpc, and
/srv/images/rechpc-cpu.sif the image. With --accounting it is a second cluster beside the first, with slurmdbd.
"""

import argparse
import hashlib
import os
import shutil
import string
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import machine, stages
from tests.cluster.machine import Machine, MachineError
from tests.cluster.stages import CACHE, CHECKOUT, VENV

NODES = ("n1", "n2", "n3")
IMAGE = "/srv/images/rechpc-cpu.sif"
BASE = "/srv/base"  # the tree that the image was made from
SCRATCH = "/scratch"
CANNOT_RUN = 3

_HERE = Path(__file__).parent
_USER = "hpc"
_START_TIMEOUT_S = 120.0
_ENV = {
    "PATH": f"{VENV}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "PYTHONPATH": "/checkout",
    "PYTHONDONTWRITEBYTECODE": "1",
}
_PLAIN = """
JobRequeue=1
"""
# Settings of a site whose users must name an account, whose jobs are not requeued unless they ask for it, and whose
# queue forgets what has ended at once.
_ACCOUNTING = """
JobRequeue=0
MinJobAge=2
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=login
AccountingStorageEnforce=associations
JobAcctGatherType=jobacct_gather/linux
"""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of this checkout: where its files are, and how to run something on it."""

    accounting: bool = False

    @property
    def path(self) -> Path:
        """Configuration, logs and scratch; they stay after the end, until the next start."""
        key = hashlib.sha256(os.fsencode(CHECKOUT)).hexdigest()[:8]
        return CACHE / "clusters" / (f"{key}-accounting" if self.accounting else key)

    @property
    def scratch(self) -> Path:
        """What /scratch inside is outside."""
        return self.path / "scratch"

    @property
    def machine(self) -> Machine:
        return Machine(state=CACHE / "machines" / f"rechpc-{self.path.name}", env=_ENV)

    @property
    def is_up(self) -> bool:
        """Whether it was started to the end, and still runs."""
        return self.up_path.exists() and machine.process_id(self.machine) is not None

    @property
    def up_path(self) -> Path:
        """Written last by a start, for one that was killed must not look like a cluster."""
        return self.path / "up"

    def command(
        self, *argv: str, user: str = _USER, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> list[str]:
        """The command, on this machine, that runs `argv` on the login node; for tests that need a process."""
        return machine.command(self.machine, argv, user=user, cwd=cwd, env=env)

    def run(
        self,
        *argv: str,
        user: str = _USER,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` on the login node to its end, whatever its status."""
        command = self.command(*argv, user=user, cwd=cwd, env=env)
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def check(
        self,
        *argv: str,
        user: str = _USER,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> str:
        """What `argv` printed on the login node; an AssertionError with its messages where it failed."""
        done = self.run(*argv, user=user, cwd=cwd, env=env, timeout_s=timeout_s)
        assert done.returncode == 0, f"{' '.join(argv)}: status {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def kill_node(self, name: str) -> None:
        """End a node at once, with all that runs on it; Slurm notices after SlurmdTimeout."""
        self.check("sh", "/checkout/tests/cluster/node.sh", name, "kill", user="root")

    def start_node(self, name: str) -> None:
        """Start a node that was killed; it is idle some seconds later."""
        self.check("sh", "/checkout/tests/cluster/node.sh", name, "start", user="root")


def up(cluster: Cluster) -> None:
    """Start `cluster` and wait until its nodes are idle; raises MachineError, and leaves nothing running then.

    One that is up stays as it is, unless it is made of something else or its slurmctld does not answer.
    """
    parts = stages.build()
    binds = {
        CHECKOUT: "/checkout:ro",
        parts.venv: f"{VENV}:ro",
        parts.images: f"{Path(IMAGE).parent}:ro",
        parts.base: f"{BASE}:ro",
        cluster.scratch: SCRATCH,
        cluster.path / "etc": "/etc/slurm",
        cluster.path / "log": "/var/log/slurm",
    }
    recipe = "\n".join(
        [f"{parts} {binds}", *(path.read_text() for path in sorted([*_HERE.glob("*.conf"), *_HERE.glob("*.sh")]))]
    )
    with stages.lock(cluster.path.name):
        if cluster.is_up:
            if cluster.up_path.read_text() == recipe and node_states(cluster):
                return
            print("test cluster: it has changed or does not answer; starting it again", flush=True)
        _prepare(cluster)
        here = cluster.machine
        machine.start(here, tree=parts.host, binds=[f"{source}:{target}" for source, target in binds.items()])
        try:
            readable = machine.command(here, ["test", "-r", "/checkout/rechpc/config.py"], user=_USER)
            if subprocess.run(readable, check=False).returncode != 0:
                raise MachineError(f"{CHECKOUT} is not readable for others, as user {_USER} is; chmod -R go+rX it")
            daemons = ["sh", "/checkout/tests/cluster/daemons.sh", *(["accounting"] if cluster.accounting else [])]
            machine.run(here, daemons, user="root", timeout_s=_START_TIMEOUT_S)
            if not machine.wait_for(lambda: node_states(cluster) == dict.fromkeys(NODES, "idle"), timeout_s=60):
                raise MachineError(f"nodes: {node_states(cluster)}, expected idle; see {cluster.path / 'log'}")
            cluster.up_path.write_text(recipe)
        except BaseException:
            machine.stop(here)
            raise


def down(cluster: Cluster) -> None:
    """Stop `cluster`, whatever state it is in."""
    with stages.lock(cluster.path.name):
        cluster.up_path.unlink(missing_ok=True)
        machine.stop(cluster.machine)


def node_states(cluster: Cluster) -> dict[str, str]:
    """Slurm's state of each node, such as idle or down*."""
    done = cluster.run("sinfo", "--noheader", "--Node", "--format=%N %T", user="root")
    return dict(line.split() for line in done.stdout.splitlines())


def _prepare(cluster: Cluster) -> None:
    """Write the configuration and empty the directories, once nothing uses them any more."""
    machine.stop(cluster.machine)
    shutil.rmtree(cluster.path, ignore_errors=True)
    for name in ("etc", "log", "scratch"):
        (cluster.path / name).mkdir(parents=True)
    os.chown(cluster.scratch, 1000, 1000)
    values = {
        "first_job_id": str(int(time.time()) % 60_000 * 1000 + 1),  # Slurm's largest id is 67 million
        "site": _ACCOUNTING if cluster.accounting else _PLAIN,
        "cgroup": machine.cgroup_version(),
    }
    for name in ("slurm.conf", "gres.conf", "cgroup.conf", "slurmdbd.conf"):
        path = cluster.path / "etc" / name
        path.write_text(string.Template((_HERE / name).read_text()).substitute(values))
    path.chmod(0o600)  # slurmdbd insists


def _inside(directory: Path, cluster: Cluster) -> str | None:
    """Where a directory of this machine is in the cluster, None where it is not."""
    for outside, inside in ((CHECKOUT, "/checkout"), (cluster.scratch, SCRATCH)):
        if directory.is_relative_to(outside):
            return str(inside / directory.relative_to(outside))
    return None


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    for name in ("build", "up", "down", "status", "exec"):
        action = actions.add_parser(name)
        if name in ("up", "status", "exec"):
            action.add_argument("--accounting", action="store_true", help="the cluster with slurmdbd")
        if name == "exec":
            action.add_argument("--user", default=_USER)
            action.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
            action.add_argument("command", nargs="+")
    return parser.parse_args()


def main() -> None:
    """The command line of the docstring above."""
    arguments = _parse()
    if reason := machine.why_not():
        print(f"the test cluster cannot run here: {reason}")
        sys.exit(CANNOT_RUN)
    cluster = Cluster(accounting=getattr(arguments, "accounting", False))
    try:
        match arguments.action:
            case "build":
                stages.build()
            case "up":
                up(cluster)
                print(f"up: {cluster.path}")
            case "down":
                for accounting in (False, True):
                    down(Cluster(accounting=accounting))
            case "status":
                print(f"up: {node_states(cluster)}" if cluster.is_up else "down")
                sys.exit(not cluster.is_up)
            case "exec":
                env = dict(item.split("=", 1) for item in arguments.env)
                cwd = _inside(Path.cwd(), cluster)
                command = cluster.command(*arguments.command, user=arguments.user, cwd=cwd, env=env)
                os.execvp(command[0], command)
    except (MachineError, stages.BuildError) as error:
        sys.exit(f"test cluster: {error}")


if __name__ == "__main__":
    main()
