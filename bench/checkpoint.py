"""What saving and restoring cost, beside plain files, torch.distributed.checkpoint and torch.save.

    python bench/checkpoint.py             a model of 2 GB on 2 ranks
    python bench/checkpoint.py --quick     one of 0.1 GB
    python bench/checkpoint.py --dir DIR   on the file system of DIR

Everything is measured in turn, several times over, and the median counts; a measurement takes what the slowest rank
takes. Before a read the files are dropped from the page cache. "plain" writes the same bytes in sequence, then fsyncs.
"""

import argparse
import dataclasses
import functools
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rechpc import config as c  # noqa: E402
from rechpc.rank import checkpoint, process  # noqa: E402
from rechpc.rank.data import GlobalBatches, open_splits  # noqa: E402
from rechpc.rank.model import build  # noqa: E402
from rechpc.rank.optim import Optimizers, fuse_sparse  # noqa: E402
from rechpc.rank.saver import Saver  # noqa: E402
from rechpc.rank.sharding import shard  # noqa: E402
from rechpc.rundir import RunDir  # noqa: E402
from rechpc.topology import RankEnv  # noqa: E402

RANKS = 2
TABLES = 8
DIM = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="0.1 GB instead of 2")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (default: 3)")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where to write (default: %(default)s)")
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options)
        return 0
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        size = ["--quick"] if options.quick else []
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command += [__file__, *size, "--rounds", str(options.rounds), "--dir", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.run(command, env=environment, check=False).returncode


def configuration(rows: int) -> c.RunConfig:
    features = [c.SparseFeature(name=f"f{i}", rows=rows) for i in range(TABLES)]
    sparse, dense = c.SparseOptimizer.rowwise_adagrad, c.DenseOptimizer.adam
    return c.RunConfig(
        cluster=c.ClusterConfig(launcher=c.Launcher.local, device=c.Device.cpu),
        job=c.JobConfig(ranks_per_node=RANKS),
        model=c.ModelConfig(embedding_dim=DIM, dense_layers=[DIM], over_layers=[64, 1], interaction=c.Interaction.dot),
        sharding=c.ShardingConfig(type=c.ShardingType.row_wise),
        data=c.DataConfig(kind=c.DataKind.synthetic, dense=["d0"], sparse=features),
        optimizer=c.OptimizerConfig(sparse=sparse, dense=dense, learning_rate=0.01),
        checkpoint=c.CheckpointConfig(keep=1),
    )


def measure(options: argparse.Namespace) -> None:
    """The life of a rank."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    config = configuration(50_000 if options.quick else 1_000_000)
    with process.start(config, RankEnv.from_environment()) as here:
        subject = Subject(config, Path(options.dir), here)
        subject.round()  # warms up
        subject.seconds.clear()
        for _ in range(options.rounds):
            subject.round()
        if here.is_main:
            report(subject)


class Subject:
    """A model that trains, and all ways to save it."""

    def __init__(self, config: c.RunConfig, folder: Path, here: process.Process) -> None:
        self.here, self.folder, self.step = here, folder, 0
        self.run = RunDir(Path(here.agree(str(RunDir.create(folder, "run").path) if here.is_main else None)))
        model = build(config.model, config.data, seed=1, device=here.device)
        fuse_sparse(model, config.optimizer)
        self.model = shard(model, config, self.run, here)
        self.optimizers = Optimizers(self.model, config.optimizer)
        self.optimizers.set_step(0)
        rank = here.env.rank
        source = open_splits(config.data)["train"]
        batches = GlobalBatches(source, config.data, global_batch=2048, rank=rank, world_size=RANKS, seed=1)
        self.stream = batches.batches(0, 10**6)
        self.pipeline = TrainPipelineSparseDist(
            self.model, self.optimizers.combined, here.device, execute_all_batches=True
        )
        self.train(5)
        self.records: list[dict[str, Any]] = []
        self.beside, self.waiting = (self.saver(config, asynchronous) for asynchronous in (True, False))
        pieces = [piece for _, piece in checkpoint.share(0, {}, self.model, self.optimizers, rank, None).pieces]
        self.tensors = {str(number): piece for number, piece in enumerate(pieces)}
        self.size_bytes = here.agree(sum(here.gather(sum(p.nbytes for p in pieces)) or []))
        self.plain_path, self.torch_path = folder / f"plain-{rank}", folder / f"torch-{rank}"
        self.buffer = bytearray(16 << 20)
        self.seconds: dict[str, list[float]] = {}

    def saver(self, config: c.RunConfig, asynchronous: bool) -> Saver:
        settings = dataclasses.replace(config.checkpoint, asynchronous=asynchronous)
        changed = dataclasses.replace(config, checkpoint=settings)
        return Saver(
            self.run, self.model, self.optimizers, changed, self.here, lambda _, values: self.records.append(values)
        )

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.pipeline.progress(self.stream)

    def timed(self, name: str, action: Callable[[], Any], divisor: int = 1) -> None:
        dist.barrier()
        began = time.perf_counter()
        action()
        dist.barrier()
        self.seconds.setdefault(name, []).append((time.perf_counter() - began) / divisor)

    def round(self) -> None:
        self.timed("write plain", self.write_plain)
        self.step += 1
        self.timed("save, waiting for it", functools.partial(self.waiting.save, self.step, {}))
        self.save_beside()
        self.timed("a step", functools.partial(self.train, 5), 5)
        target = self.folder / "dcp"
        if self.here.is_main:
            shutil.rmtree(target, ignore_errors=True)
        states = {"model": self.model.state_dict(), "optimizer": self.optimizers.combined.state_dict()}
        self.timed("torch.distributed.checkpoint save", functools.partial(dcp.save, states, checkpoint_id=target))
        self.timed("torch.save of each rank, no fsync", functools.partial(torch.save, self.tensors, self.torch_path))
        os.sync()
        self.timed_read("read plain", self.read_plain)
        self.timed_read("restore", self.waiting.restore)
        self.timed_read("torch.distributed.checkpoint load", functools.partial(dcp.load, states, checkpoint_id=target))
        self.timed_read("torch.load of each rank", functools.partial(torch.load, self.torch_path))

    def timed_read(self, name: str, action: Callable[[], Any]) -> None:
        for path in self.folder.rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self.timed(name, action)

    def save_beside(self) -> None:
        self.step += 1
        self.timed("save beside training: stall", functools.partial(self.beside.save, self.step, {}))
        steps, began, busy = 0, time.perf_counter(), torch.ones(())
        while busy.item():
            self.train(1)
            steps += 1
            busy.fill_(float(self.beside.busy))
            dist.all_reduce(busy)
        self.seconds.setdefault("a step meanwhile", []).append((time.perf_counter() - began) / steps)
        self.beside.settle(last=True)
        duration_s = self.records[-1]["checkpoint_duration_s"]
        self.seconds.setdefault("save beside training: until committed", []).append(duration_s)

    def write_plain(self) -> None:
        with open(self.plain_path, "wb") as file:
            for piece in self.tensors.values():
                file.write(memoryview(piece.view(torch.uint8).numpy()))
            file.flush()
            os.fsync(file.fileno())

    def read_plain(self) -> None:
        with open(self.plain_path, "rb", buffering=0) as file:
            while file.readinto(self.buffer):
                pass


def report(subject: Subject) -> None:
    median = {name: statistics.median(values) for name, values in subject.seconds.items()}
    print(f"{subject.size_bytes / 1e9:.2f} GB on {RANKS} ranks, {os.cpu_count()} CPUs")
    for name, seconds in median.items():
        rate = "" if name.startswith("a step") or "stall" in name else f"{subject.size_bytes / seconds / 1e9:8.2f} GB/s"
        print(f"  {name:40} {seconds:9.3f} s {rate}")
    stall = median["save beside training: stall"] / median["save, waiting for it"]
    print(f"stall of a save beside training / a save that is waited for: {stall:.1%}")
    print(f"save / plain writes, speed: {median['write plain'] / median['save, waiting for it']:.1%}")
    print(f"restore / plain reads, speed: {median['read plain'] / median['restore']:.1%}")


if __name__ == "__main__":
    sys.exit(main())
