"""Stands in for torchrun where it is not what is tested: starts the ranks, and ends them all when one fails."""

import os
import subprocess
import sys
import time

argv = sys.argv[1:]
num_ranks, module = int(argv[argv.index("--nproc-per-node") + 1]), argv.index("-m")
ranks = [
    subprocess.Popen([sys.executable, *argv[module:]], env={**os.environ, "RANK": str(rank)}, start_new_session=True)
    for rank in range(num_ranks)
]
while None in (statuses := [rank.poll() for rank in ranks]) and not any(statuses):
    time.sleep(0.02)
for rank in ranks:
    rank.terminate()
    rank.wait()
sys.exit(1 if any(statuses) else 0)
