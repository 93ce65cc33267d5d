"""What saving and restoring cost, beside plain files, torch.distributed.checkpoint and torch.save.

    python bench/checkpoint.py             a model of 2 GB on 2 ranks
    python bench/checkpoint.py --quick     one of 0.1 GB
    python bench/checkpoint.py --dir DIR   on the file system of DIR

Everything is measured in turn, several times over, and the median counts; a round takes what the slowest rank takes.
Before a read the files are dropped from the page cache. "plain" writes the same bytes in sequence, then fsyncs.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
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
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.run(command, env=environment, check=False).returncode


def configuration(rows: int) -> Any:
    from rechpc import config as c

    features = [c.SparseFeature(name=f"f{i}", rows=rows) for i in range(TABLES)]
    return c.RunConfig(
        cluster=c.ClusterConfig(launcher=c.Launcher.local, device=c.Device.cpu),
        job=c.JobConfig(ranks_per_node=RANKS),
        model=c.ModelConfig(
            embedding_dim=DIM, dense_layers=[DIM], over_layers=[64, 1], interaction=c.Interaction.dot
        ),
        sharding=c.ShardingConfig(type=c.ShardingType.row_wise),
        data=c.DataConfig(kind=c.DataKind.synthetic, dense=["d0"], sparse=features),
        optimizer=c.OptimizerConfig(
            sparse=c.SparseOptimizer.rowwise_adagrad, dense=c.DenseOptimizer.adam, learning_rate=0.01
        ),
        checkpoint=c.CheckpointConfig(keep=1),
    )  # fmt: skip


def drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(options: argparse.Namespace) -> None:
    import dataclasses
    import logging
    import warnings

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    from rechpc.rank import checkpoint, process
    from rechpc.rank.data import GlobalBatches, open_splits
    from rechpc.rank.model import build
    from rechpc.rank.optim import Optimizers, fuse_sparse
    from rechpc.rank.saver import Saver
    from rechpc.rank.sharding import shard
    from rechpc.rundir import RunDir
    from rechpc.topology import RankEnv

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    env, folder = RankEnv.from_environment(), Path(options.dir)
    config = configuration(50_000 if options.quick else 1_000_000)
    with process.start(config, env) as here:
        run = RunDir(Path(here.agree(str(RunDir.create(folder, "run").path) if here.is_main else None)))
        model = build(config.model, config.data, seed=1, device=here.device)
        fuse_sparse(model, config.optimizer)
        sharded = shard(model, config, run, here)
        optimizers = Optimizers(sharded, config.optimizer)
        source = open_splits(config.data)["train"]
        batches = GlobalBatches(source, config.data, global_batch=2048, rank=env.rank, world_size=RANKS, seed=1)
        pipeline = TrainPipelineSparseDist(sharded, optimizers.combined, here.device, execute_all_batches=True)
        stream = batches.batches(0, 10**6)
        optimizers.set_step(0)
        for _ in range(5):
            pipeline.progress(stream)
        records: list[dict[str, Any]] = []

        def saver(asynchronous: bool) -> Saver:
            settings = dataclasses.replace(config.checkpoint, asynchronous=asynchronous)
            changed = dataclasses.replace(config, checkpoint=settings)
            return Saver(run, sharded, optimizers, changed, here, lambda _, values: records.append(values))

        beside, waiting = saver(True), saver(False)
        pieces = checkpoint.share(0, {}, sharded, optimizers, env.rank, None).pieces
        tensors = {f"{i}": piece for i, (_, piece) in enumerate(pieces)}
        size_bytes = sum(piece.nbytes for _, piece in pieces)
        total = sum(here.agree(here.gather(size_bytes)))
        mine = folder / f"plain-{env.rank}"
        step = 0

        def timed(action: Callable[[], Any]) -> float:
            dist.barrier()
            began = time.perf_counter()
            action()
            dist.barrier()
            return time.perf_counter() - began

        def emptied(name: str) -> Path:
            if here.is_main:
                shutil.rmtree(folder / name, ignore_errors=True)
            dist.barrier()
            return folder / name

        def write_plain() -> None:
            with open(mine, "wb") as file:
                for _, piece in pieces:
                    file.write(memoryview(piece.view(torch.uint8).numpy()))
                file.flush()
                os.fsync(file.fileno())

        def read_plain() -> None:
            with open(mine, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

        def save_beside() -> tuple[float, float]:
            """Stall, and seconds of a step while it is written."""
            stall = timed(lambda: beside.save(step, {}))
            steps, began = 0, time.perf_counter()
            while True:
                pipeline.progress(stream)
                steps += 1
                flag = torch.tensor(float(beside.busy))
                dist.all_reduce(flag)
                if not flag.item():
                    break
            slow = (time.perf_counter() - began) / steps
            beside.settle(last=True)
            return stall, slow

        buffer = bytearray(16 << 20)
        found: dict[str, list[float]] = {}

        def note(name: str, value: float) -> None:
            found.setdefault(name, []).append(here.agree(value))

        for round_ in range(-1, options.rounds):  # the first warms up
            if round_ == 0:
                found.clear()
            note("write plain", timed(write_plain))
            step += 1
            note("save, waiting for it", timed(lambda: waiting.save(step, {})))
            step += 1
            stall, slow = save_beside()
            note("save beside training: stall", stall)
            note("save beside training: until committed", records[-1]["checkpoint_duration_s"])
            note("a step meanwhile", slow)
            note("a step", timed(lambda: [pipeline.progress(stream) for _ in range(5)]) / 5)
            target = emptied("dcp")
            states = {"model": sharded.state_dict(), "optimizer": optimizers.combined.state_dict()}
            note("torch.distributed.checkpoint save", timed(lambda: dcp.save(states, checkpoint_id=target)))
            note("torch.save of each rank, no fsync", timed(lambda: torch.save(tensors, folder / f"torch-{env.rank}")))
            os.sync()
            drop_from_cache(folder)
            note("read plain", timed(read_plain))
            drop_from_cache(folder)
            note("restore", timed(waiting.restore))
            drop_from_cache(folder)
            note("torch.distributed.checkpoint load", timed(lambda: dcp.load(states, checkpoint_id=target)))
            drop_from_cache(folder)
            note("torch.load of each rank", timed(lambda: torch.load(folder / f"torch-{env.rank}", mmap=False)))
        if here.is_main:
            report({name: statistics.median(values) for name, values in found.items()}, total)


def report(median: dict[str, float], total: int) -> None:
    print(f"{total / 1e9:.2f} GB on {RANKS} ranks, {os.cpu_count()} CPUs")
    for name, seconds in median.items():
        rate = "" if name.startswith("a step") or "stall" in name else f"{total / seconds / 1e9:8.2f} GB/s"
        print(f"  {name:40} {seconds:9.3f} s {rate}")
    stall = median["save beside training: stall"] / median["save, waiting for it"]
    print(f"stall of a save beside training / a save that is waited for: {stall:.1%}")
    print(f"save / plain writes, speed: {median['write plain'] / median['save, waiting for it']:.1%}")
    print(f"restore / plain reads, speed: {median['read plain'] / median['restore']:.1%}")


if __name__ == "__main__":
    sys.exit(main())
