"""How long `rechpc.status` takes for many runs: python bench/status.py [RUNS]

Half of the runs have finished, half run as elements of arrays; a stand-in for squeue answers for all of them at once.
Prints the seconds for 1 run and for all, each the median of five in turn.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from rechpc import table
from rechpc.config import Launcher
from rechpc.host import slurm
from rechpc.rundir import RunDir, write_json

HEARTBEAT = {"phase": "training", "step": 7, "total_steps": 90, "samples_per_s": 1e4, "loss": 0.5, "seconds_left": 60.0}


def make(root: Path, count: int) -> None:
    write_json(root / "sweep.json", {"objective": "test_auc"})
    lines = []
    for index in range(count):
        run = RunDir.create(root.parent, root.name, f"{index:05d}")
        run.config_path.write_text("name: x\n")
        job_id = f"1_{index}"
        job = slurm.Job(
            launcher=Launcher.slurm, job_id=job_id, host="h", pid=None, path=str(run.path), submitted_at_s=1.0
        )
        slurm.record(run, job, [f"seed={index}", "optimizer.learning_rate=0.1"])
        attempt = run.start_attempt(f"{job_id}.0")
        write_json(attempt.heartbeat_path, {**HEARTBEAT, "time_s": time.time()})
        run.checkpoint_path(5).mkdir()
        if index % 2:
            write_json(run.result_path, {"state": "finished", "step": 90, "test_auc": 0.7 + index / 1e5})
        else:
            lines.append(f"{job_id}|RUNNING|None\n")
    (root / "queue").write_text("".join(lines))
    (root / "squeue").write_text(f"#!/bin/sh\ncat {root}/queue\n")
    (root / "squeue").chmod(0o755)


def seconds(path: Path) -> float:
    started_s = time.perf_counter()
    table.render(table.read(path))
    return time.perf_counter() - started_s


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "sweep"
        root.mkdir()
        make(root, count)
        os.environ["PATH"] = f"{root}:{os.environ['PATH']}"
        timings = [(seconds(root / "00000"), seconds(root)) for _ in range(5)]
    one, all_ = (statistics.median(column) for column in zip(*timings, strict=True))
    print(f"1 run {one:.3f} s, {count:,} runs {all_:.3f} s")


if __name__ == "__main__":
    main()
