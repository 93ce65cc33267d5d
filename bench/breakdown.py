"""What it costs to measure where the time of a step goes, as a share of the step: python bench/breakdown.py

Trains on 2 ranks, with global batches of the default size and with tiny ones, counts how often a step says what it
does, and times just that in a loop. Comparing steps with it and without would show the noise of the machine instead,
which is a hundred times as large.
"""

import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rechpc import config as c  # noqa: E402
from rechpc.rank import breakdown, process  # noqa: E402
from rechpc.rank.data import GlobalBatches, open_splits  # noqa: E402
from rechpc.rank.model import build  # noqa: E402
from rechpc.rank.optim import Optimizers, fuse_sparse  # noqa: E402
from rechpc.rank.sharding import shard  # noqa: E402
from rechpc.rundir import RunDir  # noqa: E402
from rechpc.topology import RankEnv  # noqa: E402

RANKS = 2
WARMUP, STEPS, ROUNDS = 10, 100, 2000


def main() -> int:
    if "RANK" in os.environ:
        measure(Path(sys.argv[1]))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.run([*command, __file__, folder], env=environment, check=False).returncode


def measure(folder: Path) -> None:
    """The life of a rank."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    config = configuration()
    with process.start(config, RankEnv.from_environment()) as here:
        for global_batch in (2048, 64):
            run = RunDir(folder / str(global_batch))
            if here.is_main:
                run.path.mkdir()
            seconds, entries = train(config, run, here, global_batch)
            if here.is_main:
                show(global_batch, seconds, entries)


def configuration() -> c.RunConfig:
    """A DLRM of the default run's size."""
    features = [c.SparseFeature(name=f"f{i}", rows=10_000) for i in range(8)]
    return c.RunConfig(
        cluster=c.ClusterConfig(launcher=c.Launcher.local, device=c.Device.cpu),
        job=c.JobConfig(ranks_per_node=RANKS),
        model=c.ModelConfig(
            embedding_dim=16, dense_layers=[64, 16], over_layers=[64, 1], interaction=c.Interaction.dot
        ),
        sharding=c.ShardingConfig(type=c.ShardingType.row_wise),
        data=c.DataConfig(kind=c.DataKind.synthetic, dense=["d0", "d1", "d2", "d3"], sparse=features),
        optimizer=c.OptimizerConfig(
            sparse=c.SparseOptimizer.adagrad, dense=c.DenseOptimizer.adagrad, learning_rate=0.02
        ),
    )


def train(config: c.RunConfig, run: RunDir, here: process.Process, global_batch: int) -> tuple[dict[str, float], float]:
    """Mean seconds of the parts of a step, and how often a step begins a part."""
    model = build(config.model, config.data, seed=1, device=here.device)
    fuse_sparse(model, config.optimizer)
    sharded = shard(model, config, run, here)
    optimizers = Optimizers(sharded, config.optimizer)
    source = open_splits(config.data)["train"]
    batches = GlobalBatches(
        source, config.data, global_batch=global_batch, rank=here.env.rank, world_size=RANKS, seed=1
    ).batches(0, WARMUP + STEPS)
    parts, entries = breakdown.on(here.device), 0
    part = parts.part

    def counted(one: breakdown.Part):
        nonlocal entries
        entries += 1
        return part(one)

    sums = dict.fromkeys(breakdown.Part, 0.0)
    with parts.counting_waits():
        pipeline = breakdown.Pipeline(sharded, optimizers, here.device, parts)
        for step in range(WARMUP + STEPS):
            if step == WARMUP:
                parts.part = counted
            pipeline.progress(batches)
            parts.end_step()
            taken = parts.take()
            if step >= WARMUP:
                sums = {name: sums[name] + taken[name] / STEPS for name in sums}
    return sums, entries / STEPS


def show(global_batch: int, seconds: dict[str, float], entries: float) -> None:
    parts = breakdown.on(torch.device("cpu"))
    began = time.perf_counter()
    for _ in range(ROUNDS):
        for _ in range(round(entries)):
            with parts.part(breakdown.Part.forward):
                pass
        parts.end_step()
        parts.take()
    cost, step = (time.perf_counter() - began) / ROUNDS, sum(seconds.values())
    shares = ", ".join(f"{name} {value / step:.0%}" for name, value in seconds.items())
    print(f"global batch {global_batch}: a step of {1000 * step:.2f} ms ({shares})")
    print(f"  {entries:.0f} parts begun in a step; to say so takes {1e6 * cost:.0f} us, {cost / step:.2%} of it")


if __name__ == "__main__":
    sys.exit(main())
