"""How a step, start-up and memory grow with ranks, rows, tables and batch: python bench/growth.py

One dimension at a time, each point a start of its own: the pipeline of a rechpc run, on CPU ranks of a thread each,
over random batches that are in memory, ids uniform over the rows. Printed and appended to --out are the median step and
its parts on rank 0, samples/s of a rank, seconds to plan and to shard (which gives tables their weights), and the peak
memory of every rank beside what the plan says: weights, optimizer state and buffers. --series names some of: ranks,
rows, tables, batch, memory; ranks has both a batch that grows with the ranks and one that does not.

--files measures something else, at M: windows of training from prepared files, of training from the same batches in
memory, of evaluation from files, and of the forward pass of training alone, from files and from memory, in turn in the
same processes. How fast the files are read alone is in the record too.
"""

import argparse
import dataclasses
import json
import logging
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import peers  # noqa: E402

from rechpc import config as c  # noqa: E402
from rechpc.rank import breakdown, process  # noqa: E402
from rechpc.rank.data import Batch, GlobalBatches, open_splits  # noqa: E402
from rechpc.rank.metrics import gather_predictions  # noqa: E402
from rechpc.rank.model import build  # noqa: E402
from rechpc.rank.optim import Optimizers, fuse_sparse  # noqa: E402
from rechpc.rank.sharding import agree_on_plan, settle, shard  # noqa: E402
from rechpc.rules import dump, load  # noqa: E402
from rechpc.rundir import RunDir  # noqa: E402
from rechpc.topology import RankEnv  # noqa: E402

DENSE, MIB = 13, 1 << 20
WINDOW, WINDOWS = 20, 15  # steps; and windows that count


@dataclasses.dataclass(frozen=True)
class Point:
    """A model, a batch and the ranks that train it; peers' M but for the series rows and tables."""

    ranks: int = 2
    tables: int = 26
    rows: int = 100_000
    dim: int = 64
    batch: int = 2048
    dcn: bool = False
    optimizer: str = "sgd"


SMALL = Point(tables=8, dim=16)  # 10 million rows of it fit
MANY = Point(rows=10_000, dim=16)
SERIES = {
    "ranks": [Point(ranks=n, batch=b) for n in (1, 2, 4) for b in sorted({1024 * n, 2048})],
    "rows": [dataclasses.replace(SMALL, rows=10**n) for n in (4, 5, 6, 7)],
    # The pairs of a dot interaction grow with the square of the tables; those of 1,000 would fill the memory.
    "tables": [
        dataclasses.replace(MANY, tables=n, dcn=dcn) for dcn in (False, True) for n in (10, 100, 1000)[: 2 + dcn]
    ],
    "batch": [Point(batch=n) for n in (256, 2048, 8192, 32768)],
    "memory": [Point(tables=8, rows=2_000_000, optimizer="rowwise_adagrad")],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", nargs="+", choices=SERIES, default=list(SERIES))
    parser.add_argument("--warmup", type=int, default=5, help="steps that are not timed (default: 5)")
    parser.add_argument("--steps", type=int, default=10, help="steps that are (default: 10)")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/growth.jsonl")
    parser.add_argument("--files", action="store_true", help="files against memory, and evaluation; no series")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        (measure_files if options.files else measure)(options.rank)
        return
    if options.files:
        write(options.out, {"series": "files", **peers.machine(), **start_files()})
        return
    for series in options.series:
        for point in SERIES[series]:
            facts = {"series": series, **dataclasses.asdict(point), "warmup": options.warmup, "steps": options.steps}
            write(options.out, facts | peers.machine() | start(point, facts))


def write(out: Path, record: dict[str, Any]) -> None:
    """A line for programs, and one for people."""
    with out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(summary(record), flush=True)


def start(point: Point, facts: dict[str, Any]) -> dict[str, Any]:
    """Start the ranks and return what rank 0 saw."""
    with tempfile.TemporaryDirectory() as name:
        settings, run = Path(name) / "settings.json", Path(name) / "run"
        run.mkdir()
        settings.write_text(json.dumps(facts))
        launch(config_of(point), settings)
        answer: dict[str, Any] = json.loads((Path(name) / "answer.json").read_text())
        return answer


def launch(config: c.RunConfig, settings: Path, *further: str) -> None:
    """Run this file on every rank."""
    env = peers.environment(config, cpus=config.world_size)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(config.world_size), "--rdzv-backend", "c10d"]
    torchrun += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command = [sys.executable, *torchrun, __file__, "--rank", str(settings), *further]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the ranks failed:\n{done.stderr[-4000:]}")


def config_of(point: Point) -> c.RunConfig:
    """The run of a point."""
    features = [c.SparseFeature(name=f"C{i}", rows=point.rows) for i in range(1, point.tables + 1)]
    cross = {"interaction": c.Interaction.dcn, "dcn_layers": 1, "dcn_rank": 64}
    return c.RunConfig(
        cluster=c.ClusterConfig(launcher=c.Launcher.local, device=c.Device.cpu),
        job=c.JobConfig(ranks_per_node=point.ranks),
        sharding=c.ShardingConfig(type=c.ShardingType.table_wise),
        model=c.ModelConfig(
            embedding_dim=point.dim, dense_layers=[512, 256, point.dim], over_layers=[512, 512, 256, 1],
            **(cross if point.dcn else {"interaction": c.Interaction.dot}),
        ),
        data=c.DataConfig(kind=c.DataKind.synthetic, dense=[f"I{i}" for i in range(DENSE)], sparse=features),
        optimizer=c.OptimizerConfig(sparse=point.optimizer, dense=c.DenseOptimizer.sgd, learning_rate=0.01),
        trainer=c.TrainerConfig(global_batch=point.batch),
    )  # fmt: skip


def measure(path: Path) -> None:
    """The life of a rank."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    facts = json.loads(path.read_text())
    point = Point(**{f.name: facts[f.name] for f in dataclasses.fields(Point)})
    config, run, parts = config_of(point), RunDir(path.parent / "run"), breakdown.on(torch.device("cpu"))
    with process.start(config, RankEnv.from_environment()) as here, parts.counting_waits():
        imported_bytes = peak_bytes()
        began_s = time.perf_counter()
        model = build(config.model, config.data, seed=1, device=here.device)
        fuse_sparse(model, config.optimizer)
        plan = agree_on_plan(model, config, run, here)
        planned_s = time.perf_counter()
        sharded = shard(model, config, run, here)
        optimizers = Optimizers(sharded, config.optimizer)
        dist.barrier()
        sharded_s = time.perf_counter()
        batches = [random_batch(point, here.env.rank, step) for step in range(facts["warmup"] + facts["steps"])]
        settle(sharded, batches[0])
        steps_s, parts_s = train(breakdown.Pipeline(sharded, optimizers, here.device, parts), parts, batches)
        peaks = here.gather([peak_bytes(), imported_bytes])
        if peaks is None:
            return
        step_s = statistics.median(steps_s[facts["warmup"] :])
        timed = parts_s[facts["warmup"] :]
        predicted = [r["host_bytes"] + plan["dense_bytes"] for r in plan["ranks"]]
        answer = {
            "step_ms": 1000 * step_s, "samples_per_s_per_rank": point.batch / step_s / point.ranks,
            "parts_ms": {p: 1000 * statistics.median(one[p] for one in timed) for p in timed[0]},
            "plan_s": planned_s - began_s, "shard_s": sharded_s - planned_s,
            "predicted_mib": [size / MIB for size in predicted],
            "peak_rss_mib": [peak / MIB for peak, _ in peaks], "imported_rss_mib": [rss / MIB for _, rss in peaks],
            "peak_over_predicted": max(peak / size for (peak, _), size in zip(peaks, predicted, strict=True)),
        }  # fmt: skip
        (path.parent / "answer.json").write_text(json.dumps(answer))


def random_batch(point: Point, rank: int, step: int) -> Batch:
    """A rank's part of a global batch, one id of every table a sample."""
    local, generator = point.batch // point.ranks, torch.Generator().manual_seed(1000 * rank + step)
    return Batch(
        dense_BF=torch.rand(local, DENSE, generator=generator),
        sparse=KeyedJaggedTensor(
            keys=[f"C{i}" for i in range(1, point.tables + 1)],
            values=torch.randint(point.rows, (point.tables * local,), generator=generator),
            lengths=torch.ones(point.tables * local, dtype=torch.int32),
        ),
        labels_B=torch.randint(2, (local,), generator=generator).float(),
        weights_B=torch.full((local,), 1 / local),
    )


def train(
    pipeline: breakdown.Pipeline, parts: breakdown.Breakdown, batches: list[Batch]
) -> tuple[list[float], list[dict[str, float]]]:
    """Seconds of every step, and of its parts. Collective: every rank."""
    pipeline._model.train()
    iterator, steps_s, parts_s = iter(batches), [], []
    parts.end_step()  # what came before
    parts.take()
    for _ in batches:
        began_s = time.perf_counter()
        pipeline.progress(iterator)
        steps_s.append(time.perf_counter() - began_s)
        parts.end_step()
        parts_s.append(parts.take())
    return steps_s, parts_s


def start_files() -> dict[str, Any]:
    """Prepare rows as bench/peers.py does, start two ranks and return what rank 0 saw."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = peers.config_of(peers.M, argparse.Namespace(ranks=2, rate=0.1), folder, 1)
        peers.generate(folder / "npy", WINDOW * config.trainer.global_batch, peers.M.num_ids)
        peers.prepare(config.data)
        (folder / "run").mkdir()
        (folder / "config.yaml").write_text(dump(config))
        launch(config, folder / "config.yaml", "--files")
        answer: dict[str, Any] = json.loads((folder / "answer.json").read_text())
        return answer


def measure_files(path: Path) -> None:
    """The life of a rank of --files."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    config, parts = load(path), breakdown.on(torch.device("cpu"))
    batch = config.trainer.global_batch
    with process.start(config, RankEnv.from_environment()) as here:
        model = build(config.model, config.data, seed=1, device=here.device)
        fuse_sparse(model, config.optimizer)
        sharded = shard(model, config, RunDir(path.parent / "run"), here)
        pipeline = breakdown.Pipeline(sharded, Optimizers(sharded, config.optimizer), here.device, parts)
        source, where = open_splits(config.data)["train"], {"rank": here.env.rank, "world_size": here.env.world_size}
        shuffled = GlobalBatches(source, config.data, global_batch=batch, seed=1, **where)
        in_order = GlobalBatches(source, config.data, global_batch=batch, seed=None, **where)
        windows: list[dict[str, float]] = []
        for epoch in range(WINDOWS + 1):
            steps = range(epoch * WINDOW, (epoch + 1) * WINDOW)
            began_s = time.perf_counter()
            held = [shuffled.batch(step) for step in steps]
            seconds = {"reading": time.perf_counter() - began_s}
            ways: dict[str, Callable[[], None]] = {
                "files": lambda steps=steps: progress(pipeline, shuffled.batches(steps[0], steps[-1] + 1)),
                "memory": lambda held=held: progress(pipeline, iter(held)),
                "evaluation": lambda: evaluate(pipeline, in_order, here),
                "forward": lambda: progress(pipeline, in_order.batches(0, WINDOW)),
                "forward_memory": lambda held=held: progress(pipeline, iter(held)),
            }
            for name, way in ways.items():
                # TorchRec's pipeline goes backward if the model trains; the forward pass of this one does not differ.
                sharded.train(name in ("files", "memory"))
                dist.barrier()
                began_s = time.perf_counter()
                way()
                dist.barrier()
                seconds[name] = time.perf_counter() - began_s
            windows.append({name: WINDOW * batch / one_s for name, one_s in seconds.items()})
        if here.is_main:
            (path.parent / "answer.json").write_text(json.dumps({"samples_per_s": windows[1:]}))


def progress(pipeline: breakdown.Pipeline, batches: Iterator[Batch]) -> None:
    """Train a window."""
    for _ in range(WINDOW):
        pipeline.progress(batches)


@torch.no_grad()
def evaluate(pipeline: breakdown.Pipeline, batches: GlobalBatches, here: process.Process) -> None:
    """Evaluate a window as a run does, the scores included."""
    iterator, logits, labels = batches.batches(0, WINDOW), [], []
    for step in range(WINDOW):
        _, logits_B, labels_B, _ = pipeline.progress(iterator)
        real = slice(batches.num_local_samples(step))
        logits.append(logits_B[real])
        labels.append(labels_B[real])
    gather_predictions(logits, labels, here)


def peak_bytes() -> int:
    """Peak memory of this process so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def summary(record: dict[str, Any]) -> str:
    """One line."""
    if record["series"] == "files":
        windows = record["samples_per_s"]
        speeds = ", ".join(f"{name} {statistics.median(w[name] for w in windows):,.0f}" for name in windows[0])
        pairs = (("files", "memory"), ("evaluation", "forward"), ("evaluation", "forward_memory"))
        ratios = {(a, b): sorted(w[a] / w[b] for w in windows) for a, b in pairs}
        shown = (f"{a}/{b} {statistics.median(r):.3f} ({r[0]:.3f} to {r[-1]:.3f})" for (a, b), r in ratios.items())
        return f"samples/s: {speeds}; {', '.join(shown)}, {len(windows)} windows"
    line = (
        "{series}: {ranks} ranks, {tables} tables of {rows:,} x {dim}, batch {batch}, dcn {dcn}: "
        "step {step_ms:.1f} ms, {samples_per_s_per_rank:,.0f} samples/s a rank, "
        "plan {plan_s:.2f} s, shard {shard_s:.2f} s"
    ).format(**record)
    split = ", ".join(f"{name} {ms:.1f}" for name, ms in record["parts_ms"].items())
    sizes = (max(record[name]) for name in ("peak_rss_mib", "predicted_mib", "imported_rss_mib"))
    memory = "peak {:,.0f} MiB, predicted {:,.0f}, imports {:,.0f}".format(*sizes)
    return f"{line}; ms: {split}; {memory}, ratio {record['peak_over_predicted']:.2f}"


if __name__ == "__main__":
    main()
