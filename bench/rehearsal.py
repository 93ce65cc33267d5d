"""A rehearsal of scale: so many nodes with so many CPU ranks each, all on this machine, to step 2 and a clean end.

    python bench/rehearsal.py --nodes 8 --ranks 8

Real are the host tasks, preflight, the ranks, gloo between them, and the training. Faked are the nodes (their variables
of Slurm, and a scontrol that says where each is: 127.0.0.1), and torchrun, unless --torchrun: a stand-in imports torch
once a node and forks its ranks, for 64 imports take two cores longer than everything else. Prints seconds and memory.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rechpc import lifeline

ROOT = Path(__file__).resolve().parents[1]
SMALL = (
    "cluster=slurm",
    "+container.env.GLOO_SOCKET_IFNAME=lo",
    "model.embedding_dim=8",
    "model.dense_layers=[16,8]",
    "model.over_layers=[16,1]",
    "data.dense=[d0]",
    "data.sparse=[{name: user, rows: 6400}, {name: item, rows: 640}]",
    "sharding=row_wise",
    "data.synthetic.train_rows=64000",
    "data.synthetic.val_rows=0",
    "data.synthetic.test_rows=640",
    "data.block_rows=640",
    "trainer.max_steps=2",
    "checkpoint.every=0",
    "preflight.timeout_s=900",
    "preflight.min_memory_gib=0",
)
# Python runs this file first; it takes the place of torchrun, with the variables that torchrun sets.
FORK = """
import os, signal, sys
if "torch.distributed.run" in sys.orig_argv:
    argv = sys.orig_argv
    given = lambda name: argv[argv.index(name) + 1]
    ranks, node = int(given("--nproc-per-node")), int(given("--node-rank"))
    from rechpc.rank import loop
    from rechpc import train
    children = []
    for local in range(ranks):
        if pid := os.fork():
            children.append(pid)
            continue
        world = {"RANK": node * ranks + local, "LOCAL_RANK": local, "WORLD_SIZE": int(given("--nnodes")) * ranks}
        world |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": given("--master-addr")}
        world |= {"MASTER_PORT": given("--master-port")}
        os.environ.update({name: str(value) for name, value in world.items()})
        sys.argv = argv[argv.index("rechpc.train"):]
        status = train.main()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    while children:
        pid, status = os.wait()
        children.remove(pid)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            os._exit(1)
    os._exit(0)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=8, help="ranks on each node")
    parser.add_argument("--torchrun", action="store_true", help="the real one, which imports torch once a rank")
    given = parser.parse_args()
    world = given.nodes * given.ranks
    with tempfile.TemporaryDirectory() as scratch:
        run = stage(Path(scratch), given.nodes, given.ranks)
        if not given.torchrun:
            (run / "code/sitecustomize.py").write_text(FORK)
        attempt, before, least, marks = run / "attempts/1.0", free_gib(), free_gib(), {}
        began = time.monotonic()
        with host_tasks(run, Path(scratch), given.nodes) as tasks:
            while any(task.poll() is None for task in tasks):
                least = min(least, free_gib())
                for name, held in stages(attempt).items():
                    if held and name not in marks:
                        marks[name] = time.monotonic() - began
                time.sleep(0.2)
        marks["the end"] = time.monotonic() - began
        statuses = sorted({task.returncode for task in tasks})
        print(f"{world} ranks on {given.nodes} faked nodes, {os.cpu_count()} CPUs: exit statuses {statuses}")
        print(", ".join(f"{name} after {seconds:.0f} s" for name, seconds in marks.items()))
        print(f"memory: {before - least:.1f} of {before:.1f} GiB taken at the most")
        print(subprocess.run([sys.executable, "-m", "rechpc.status", run], text=True, capture_output=True).stdout)
    return max(statuses)


def stage(folder: Path, num_nodes: int, ranks: int) -> Path:
    argv = [sys.executable, "-m", "rechpc.submit", "stage=true", *SMALL, f"runs_root={folder}/runs"]
    argv += [f"job.nodes={num_nodes}", f"job.ranks_per_node={ranks}", f"trainer.global_batch={10 * num_nodes * ranks}"]
    said = subprocess.run(argv, capture_output=True, text=True, check=False)
    found = re.search(r"^run +(\S+)$", said.stdout, re.MULTILINE)
    if not found:
        sys.exit(said.stdout + said.stderr)
    return (Path.cwd() / found[1]).resolve()


@contextmanager
def host_tasks(run: Path, folder: Path, num_nodes: int) -> Iterator[list[subprocess.Popen]]:
    """One on each faked node; they die with this process."""
    names = [f"fake{i}" for i in range(num_nodes)]
    scontrol = folder / "scontrol"
    listed = "\\n".join(names)
    scontrol.write_text(f'#!/bin/sh\n[ "$2" = hostnames ] && printf "{listed}\\n" || echo NodeAddr=127.0.0.1\n')
    scontrol.chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(run / "code")}
    env |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": str(num_nodes)}
    me = os.getpid()
    argv = [sys.executable, "-m", "rechpc.host.task", str(run)]
    tasks = [
        subprocess.Popen(
            argv,
            env={**env, "SLURM_NODEID": str(i), "SLURMD_NODENAME": name},
            preexec_fn=lambda: lifeline.die_with(me),
        )
        for i, name in enumerate(names)
    ]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.kill()


def stages(attempt: Path) -> dict[str, bool]:
    """What has been reached, by the files of the attempt."""
    beat = attempt / "heartbeat"
    told = beat.read_text() if beat.exists() else ""
    verdict = attempt / "preflight.json"
    return {
        "every node checked": verdict.exists(),
        "all ranks met": verdict.exists() and '"*"' in verdict.read_text(),
        "step 1": '"step"' in told and '"step": 0' not in told,
    }


def free_gib() -> float:
    return int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1]) / (1 << 20)


if __name__ == "__main__":
    sys.exit(main())
