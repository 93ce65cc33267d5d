"""A rehearsal of scale: so many nodes with so many CPU ranks each, all on this machine, to step 1 and a clean end.

    python bench/rehearsal.py --nodes 8 --ranks 8

The host tasks, preflight, torchrun and ranks are the real ones. Faked are the nodes: their variables of Slurm, and a
scontrol that says where each is (127.0.0.1). Prints seconds and the least memory that was left.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMALL = (
    "cluster=slurm",
    "container.env.GLOO_SOCKET_IFNAME=lo",
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=8, help="ranks on each node")
    given = parser.parse_args()
    world = given.nodes * given.ranks
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        argv = [sys.executable, "-m", "rechpc.submit", "stage=true", *SMALL, f"runs_root={ROOT}/runs"]
        argv += [f"job.nodes={given.nodes}", f"job.ranks_per_node={given.ranks}", f"trainer.global_batch={10 * world}"]
        said = subprocess.run(
            [*argv[:3], *(f"+{a}" if a.startswith("container.env") else a for a in argv[3:])],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        found = re.search(r"^run +(\S+)$", said.stdout, re.MULTILINE)
        if not found:
            print(said.stdout + said.stderr)
            return 1
        run = (Path.cwd() / found[1]).resolve()
        names = [f"fake{i}" for i in range(given.nodes)]
        scontrol = folder / "scontrol"
        listed = "\\n".join(names)
        scontrol.write_text(f'#!/bin/sh\n[ "$2" = hostnames ] && printf "{listed}\\n" || echo NodeAddr=127.0.0.1\n')
        scontrol.chmod(0o755)
        env |= {"PATH": f"{folder}:{env['PATH']}", "SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": str(given.nodes)}
        began = time.monotonic()
        tasks = [
            subprocess.Popen(
                [sys.executable, "-m", "rechpc.host.task", str(run)],
                env={**env, "PYTHONPATH": str(run / "code"), "SLURM_NODEID": str(i), "SLURMD_NODENAME": name},
            )
            for i, name in enumerate(names)
        ]
        attempt, least, marks = run / "attempts" / "1.0", free_gib(), {}
        while any(task.poll() is None for task in tasks):
            least = min(least, free_gib())
            beat = attempt / "heartbeat"
            seen = {"nodes checked": attempt / "preflight.json", "ranks met and step 0": beat}
            marks |= {n: time.monotonic() - began for n, p in seen.items() if n not in marks and p.exists()}
            if "step 1" not in marks and beat.exists() and '"step": ' in beat.read_text():
                marks["step 1"] = time.monotonic() - began
            time.sleep(0.2)
        marks["end"] = time.monotonic() - began
    statuses = {task.returncode for task in tasks}
    print(f"{world} ranks on {given.nodes} faked nodes, {os.cpu_count()} CPUs: exit statuses {sorted(statuses)}")
    print(", ".join(f"{name} after {seconds:.0f} s" for name, seconds in marks.items()))
    print(f"least memory left: {least:.1f} GiB, {free_gib():.1f} GiB after the end; run {run}")
    print((attempt / "preflight.json").read_text()[:300] if (attempt / "preflight.json").exists() else "no verdict")
    return max(statuses)


def free_gib() -> float:
    return int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1]) / (1 << 20)


if __name__ == "__main__":
    sys.exit(main())
