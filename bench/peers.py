"""Training speed and loss beside others, in turn, in the same processes.

  python bench/peers.py --dlrm PATH --case M      beside facebookresearch/dlrm, whose checkout is at PATH
  python bench/peers.py --case M                  beside a bare loop: same model, plan and pipeline, batches in memory
  python bench/peers.py --dlrm PATH --case S --loss    the loss of one epoch, three seeds
  python bench/peers.py --dlrm PATH --case M --stock   tuned against stock: each started as its own users start it

torchrec_dlrm/dlrm_main.py runs unmodified, on its own data loader; what is measured is its pipeline's `progress`.
After every window of its steps the loop of a rechpc run, with metrics, heartbeat, stop checks and reading from files,
takes as many steps in the same processes, so that both have the same threads, allocator, environment and neighbours.
Both read the same generated rows, from npy files and from a data set prepared from them, and have the same model,
table-wise plan, optimizer and learning rate; each has initial weights and an order of samples of its own. The first
pair of windows warms up. Ours begin with an empty pipeline and a reader that starts, which a run has once, so that
windows of few steps make it look slow. A record of every pair, with the machine, is appended to --out. samples/s are
of wall time, over all ranks; the ratio is that of a pair, and the median counts.

With --stock a pair is two starts: one without any variable that rechpc gives its ranks, of which the peer counts, and
one with all of them, of which rechpc counts. That says what a user gets, not which trainer is faster.

dlrm_main.py needs iopath (`pip install iopath`); PYTHONPATH is passed on.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rechpc import config as c  # noqa: E402
from rechpc.host.task import rank_environment  # noqa: E402
from rechpc.prepare.convert import prepare  # noqa: E402
from rechpc.rank import breakdown, loop, process  # noqa: E402
from rechpc.rank.data import GlobalBatches, open_splits  # noqa: E402
from rechpc.rank.model import build  # noqa: E402
from rechpc.rank.optim import Optimizers, fuse_sparse  # noqa: E402
from rechpc.rank.report import Report  # noqa: E402
from rechpc.rank.sharding import shard  # noqa: E402
from rechpc.rules import dump, load  # noqa: E402
from rechpc.rundir import RunDir  # noqa: E402
from rechpc.topology import RankEnv, num_cpus  # noqa: E402

ROWS, FEATURES = 100_000, 26


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of 26 tables of 100,000 rows, how many ids a sample has of each, an optimizer and a global batch."""

    dim: int
    dense: list[int]
    over: list[int]
    dcn: bool = False
    num_ids: tuple[int, ...] = (1,) * FEATURES
    optimizer: str = "sgd"
    batch: int = 2048


MLPERF_NUM_IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
M = Case(64, [512, 256, 64], [512, 512, 256, 1])
H = Case(128, [512, 256, 128], [1024, 1024, 512, 256, 1])
CASES = {
    "S": Case(16, [512, 256, 16], [512, 256, 1]),
    "M": M,
    "MH": dataclasses.replace(M, num_ids=(1, 2, 3, 4) * 6 + (2, 3)),
    "H": H,
    "D": dataclasses.replace(M, dcn=True),
    "DH": dataclasses.replace(H, dcn=True, num_ids=MLPERF_NUM_IDS, optimizer="adagrad"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dlrm", type=Path, help="checkout of facebookresearch/dlrm; without it: a bare loop")
    parser.add_argument("--case", choices=CASES, default="M")
    parser.add_argument("--batch", type=int, help="global batch (default: that of the case)")
    parser.add_argument("--optimizer", choices=["sgd", "adagrad"], help="default: that of the case")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate (default: 0.1)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="OMP threads of a rank (default: 1)")
    parser.add_argument("--window", type=int, default=40, help="steps of a window (default: 40)")
    parser.add_argument("--pairs", type=int, default=6, help="pairs that count (default: 6)")
    parser.add_argument("--loss", action="store_true", help="one epoch of 100 steps for three seeds, no speed")
    parser.add_argument("--stock", action="store_true", help="tuned against stock: two starts a pair")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/peers.jsonl")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        compete(options.rank)
        return
    if options.loss:
        options.window, options.pairs = 100, 0
    for seed in (1, 2, 3) if options.loss else (1,):
        record = {"seed": seed, **(measure_stock(options, seed) if options.stock else measure(options, seed))}
        with options.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(summary(record), flush=True)


def measure_stock(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Pairs of a window of the peer without our variables and one of ours with them, each of a start of its own."""
    short = argparse.Namespace(**{**vars(options), "pairs": 3})
    pairs: list[dict[str, Any]] = []
    for _ in range(options.pairs + 1):
        stock, tuned = measure(short, seed, tuned=False), measure(short, seed)
        pairs.append({"peer": middle(stock, "peer"), "ours": middle(tuned, "ours")})
    return {**tuned, "peer": f"stock {tuned['peer']}", "pairs": pairs}


def middle(record: dict[str, Any], who: str) -> dict[str, float]:
    """The window of median speed."""
    return sorted((p[who] for p in record["pairs"][1:]), key=lambda w: w["samples_per_s"])[1]  # type: ignore[no-any-return]


def measure(options: argparse.Namespace, seed: int, *, tuned: bool = True) -> dict[str, Any]:
    """Generate the data, start the ranks, and return what rank 0 saw."""
    with tempfile.TemporaryDirectory() as folder:
        return _measure(options, Path(folder), seed, tuned)


def _measure(options: argparse.Namespace, folder: Path, seed: int, tuned: bool) -> dict[str, Any]:
    case = CASES[options.case]
    case = dataclasses.replace(case, batch=options.batch or case.batch, optimizer=options.optimizer or case.optimizer)
    config = config_of(case, options, folder, seed)
    generate(folder / "npy", case.batch * options.window * (options.pairs + 1), case.num_ids)
    prepare(config.data)
    run = RunDir.create(folder, "run")
    run.config_path.write_text(dump(config))
    run.start_attempt("bench.0")
    settings = folder / "settings.json"
    facts = {"dlrm": options.dlrm and str(options.dlrm.absolute()), "case": options.case, "run": str(run.path)}
    facts |= {"npy": str(folder / "npy"), "window": options.window, "pairs": options.pairs, "seed": seed}
    settings.write_text(json.dumps({**facts, "answer": str(folder / "answer.json")}))
    env = environment(config, cpus=options.ranks * options.threads, tuned=tuned)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks), "--rdzv-backend", "c10d"]
    torchrun += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command = [sys.executable, *torchrun, __file__, "--rank", str(settings)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the ranks failed:\n{done.stderr[-4000:]}")
    about = {"case": options.case, "peer": "dlrm_main" if options.dlrm else "bare loop", "batch": case.batch}
    about |= {"optimizer": case.optimizer, "rate": options.rate, "ranks": options.ranks, "threads": options.threads}
    return {**about, **machine(), **json.loads((folder / "answer.json").read_text())}


def environment(config: c.RunConfig, *, cpus: int, tuned: bool = True) -> dict[str, str]:
    """What ranks are started with: this checkout and, if `tuned`, the variables that a host task sets."""
    ours = rank_environment(config, {}, code_path=ROOT, cpus=cpus) if tuned else {}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **ours, "PYTHONPATH": path}


def config_of(case: Case, options: argparse.Namespace, folder: Path, seed: int) -> c.RunConfig:
    """The run that dlrm_main.py's arguments describe."""
    sparse = [
        c.SparseFeature(name=f"C{i}", rows=ROWS, mapping=c.IdMapping.as_is, ids_per_sample=n)
        for i, n in enumerate(case.num_ids, 1)
    ]
    return c.RunConfig(
        seed=seed,
        cluster=c.ClusterConfig(launcher=c.Launcher.local, device=c.Device.cpu),
        job=c.JobConfig(ranks_per_node=options.ranks),
        sharding=c.ShardingConfig(type=c.ShardingType.table_wise),
        model=c.ModelConfig(
            embedding_dim=case.dim, dense_layers=case.dense, over_layers=case.over,
            interaction=c.Interaction.dcn if case.dcn else c.Interaction.dot,
        ),
        data=c.DataConfig(
            kind=c.DataKind.npy, source=str(folder / "npy"), path=str(folder / "prepared"),
            dense=[f"I{i}" for i in range(1, 14)], dense_transform=c.DenseTransform.none,
            sparse=sparse,
        ),
        optimizer=c.OptimizerConfig(sparse=case.optimizer, dense=case.optimizer, learning_rate=options.rate),
        trainer=c.TrainerConfig(global_batch=case.batch, epochs=1, log_every=10),
        checkpoint=c.CheckpointConfig(every=0),
    )  # fmt: skip


def generate(folder: Path, rows: int, num_ids: tuple[int, ...]) -> None:
    """Rows as dlrm_main.py reads them, with labels that can be learned; and a small test split."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for split, n in (("train", rows), ("test", 1000)):
        dense = rng.random((n, 13), dtype=np.float32)
        ids = [
            (ROWS * rng.random((n, k), dtype=np.float32) ** 3).astype(np.int32) for k in num_ids
        ]  # some are frequent
        sparse = np.concatenate([bag[:, :1] for bag in ids], axis=1)
        logit = 3 * (dense[:, 0] - 0.5) + ((sparse[:, :8] % 7) - 3).sum(axis=1) / 8 - 1
        labels = (rng.random(n) < 1 / (1 + np.exp(-logit))).astype(np.int32)[:, None]
        for name, array in (("dense", dense), ("labels", labels)):
            np.save(folder / f"{split}_{name}.npy", array)
        if max(num_ids) > 1:
            np.savez(folder / f"{split}_sparse_multi_hot.npz", **{str(i): bag for i, bag in enumerate(ids)})
        else:
            np.save(folder / f"{split}_sparse.npy", sparse)


class Done(Exception):
    """Enough was measured; ends dlrm_main.py."""


def compete(path: Path) -> None:
    """One rank: the peer trains, and hands over to rechpc after every window."""
    settings = json.loads(path.read_text())
    run, env = RunDir.open(settings["run"]), RankEnv.from_environment()
    config = load(run.config_path)
    torch.manual_seed(settings["seed"])
    contest = Contest(settings, config, run, env)
    progress = TrainPipelineSparseDist.progress

    def turn(pipeline: Any, batches: Any) -> Any:
        if contest.ours_runs or not pipeline._model.training:
            return progress(pipeline, batches)
        return contest.peer_step(pipeline, lambda: progress(pipeline, batches))

    TrainPipelineSparseDist.progress = turn
    try:
        if settings["dlrm"]:
            sys.path.insert(0, f"{settings['dlrm']}/torchrec_dlrm")
            import dlrm_main  # noqa: PLC0415

            if not hasattr(
                np.lib.format, "_read_array_header"
            ):  # its reader of multi-hot files is older than NumPy 2.3
                np.lib.format._read_array_header = np.lib._format_impl._read_array_header  # type: ignore[attr-defined]
            dlrm_main.main(arguments(settings, config))
        else:
            bare(config, run, env)
    except Done:
        pass
    dist.barrier()
    os._exit(0)  # threads that read ahead may still be at it


def arguments(settings: dict[str, Any], config: c.RunConfig) -> list[str]:
    """What makes dlrm_main.py train the model of the configuration."""
    model, local = config.model, config.trainer.global_batch // config.world_size
    one_hot = all(feature.ids_per_sample == 1 for feature in config.data.sparse)
    kind = "in_memory_binary" if one_hot else "synthetic_multi_hot"
    found = [f"--{kind}_criteo_path", settings["npy"], "--dataset_name", "criteo_kaggle"]
    found += ["--batch_size", str(local), "--num_embeddings", str(ROWS), "--embedding_dim", str(model.embedding_dim)]
    found += ["--dense_arch_layer_sizes", ",".join(map(str, model.dense_layers))]
    found += ["--over_arch_layer_sizes", ",".join(map(str, model.over_layers)), "--epochs", "2"]
    found += ["--learning_rate", str(config.optimizer.learning_rate), "--drop_last_training_batch"]
    if model.interaction is c.Interaction.dcn:
        found += ["--interaction_type", "dcn", "--dcn_num_layers", "3", "--dcn_low_rank_dim", "512"]
    return found + ["--adagrad"] * (config.optimizer.sparse is c.SparseOptimizer.adagrad)


def bare(config: c.RunConfig, run: RunDir, env: RankEnv) -> None:
    """TorchRec alone: the pipeline over batches that are in memory, nothing looked at, nothing written."""
    with process.start(config, env) as here:
        model = build(config.model, config.data, seed=config.seed, device=here.device)
        fuse_sparse(model, config.optimizer)
        sharded = shard(model, config, run, here)
        optimizers = Optimizers(sharded, config.optimizer)
        batches = GlobalBatches(
            open_splits(config.data)["train"], config.data, global_batch=config.trainer.global_batch,
            rank=env.rank, world_size=env.world_size, seed=config.seed,
        )  # fmt: skip
        held = [batches.batch(step) for step in range(batches.steps_per_epoch)]
        pipeline = TrainPipelineSparseDist(sharded, optimizers.combined, here.device, execute_all_batches=True)
        iterator = iter(held * 2)
        while True:
            pipeline.progress(iterator)


class Contest:
    """Windows of both in turn; rank 0 keeps the times."""

    def __init__(self, settings: dict[str, Any], config: c.RunConfig, run: RunDir, env: RankEnv) -> None:
        self._settings, self._config, self._run, self._env = settings, config, run, env
        self._loop: loop._Loop | None = None
        self.ours_runs = False
        self._steps = 0
        self._losses: list[torch.Tensor] = []
        self._start: tuple[float, float, float] = (0, 0, 0)
        self._pairs: list[dict[str, Any]] = []

    def peer_step(self, pipeline: Any, progress: Callable[[], Any]) -> Any:
        """A step of the peer, then a window of ours where it was the last of one."""
        if self._loop is None:
            self._loop = self._build(pipeline._model)
        if not self._steps:
            self._begin()
        output = progress()
        self._losses.append(output[0].detach())  # both give the loss first
        self._steps += 1
        if self._steps == self._settings["window"]:
            peer = self._end()
            self._steps = 0
            self.ours_runs = True
            self._begin()
            self._loop._train_until(self._loop.state.step + self._settings["window"])
            self.ours_runs = False
            self._pairs.append({"peer": peer, "ours": self._end()})
            if len(self._pairs) > self._settings["pairs"]:
                self._answer()
                raise Done
        return output

    def _build(self, peer: Any) -> "loop._Loop":
        here = process.Process(self._env, torch.device("cpu"), dist.new_group(backend="gloo"))
        attempt = self._run.attempt("bench.0")
        report = Report(self._run, attempt, here)
        self.ours_runs = True  # it settles
        ours = loop._Loop(self._config, self._run, attempt, here, report, breakdown.on(here.device))
        self.ours_runs = False
        sizes = [
            sum(p.numel() for n, p in m.named_parameters() if "embedding_bags" not in n) for m in (peer, ours._model)
        ]
        assert sizes[0] == sizes[1], f"dense parameters of the peer and ours: {sizes}"
        ours._model.train()
        return ours

    def _begin(self) -> None:
        dist.barrier()
        self._start = time.perf_counter(), time.process_time(), busy_s()

    def _end(self) -> dict[str, float]:
        dist.barrier()
        wall_s, own_s, all_s = (a - b for a, b in zip(self._now(), self._start, strict=True))
        own = torch.tensor([own_s], dtype=torch.float64)
        dist.all_reduce(own)
        samples = self._settings["window"] * self._config.trainer.global_batch
        foreign = max(0.0, all_s - own.item()) / (wall_s * (os.cpu_count() or 1))
        return {"samples_per_s": samples / wall_s, "cpu_us": 1e6 * own.item() / samples, "foreign_share": foreign}

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), busy_s()

    def _answer(self) -> None:
        losses = torch.stack([loss.float() for loss in self._losses])
        dist.all_reduce(losses)
        peer = (losses / self._env.world_size).tolist()
        if self._env.rank == 0:
            records = [r for r in self._run.metrics() if "loss" in r]  # each the mean since the one before
            steps = np.diff([0, *(r["step"] for r in records)])
            ours = [r["loss"] for r in records]
            means = {"peer_loss": statistics.mean(peer), "ours_loss": float(np.average(ours, weights=steps))}
            tail = {"peer_last_loss": statistics.mean(peer[-int(steps[-1]) :]), "ours_last_loss": ours[-1]}
            Path(self._settings["answer"]).write_text(json.dumps({**means, **tail, "pairs": self._pairs}))


def busy_s() -> float:
    """CPU seconds that this machine has spent, stolen ones included."""
    fields = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, Any]:
    """Where and with what."""
    cpu = next(
        (line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().split("\n") if "model name" in line), "?"
    )
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    versions = {n: importlib.metadata.version(n) for n in ("torch", "torchrec", "numpy")}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"time": now, "commit": commit, "cpu": cpu, "cpus": num_cpus(), "kernel": platform.release(), **versions}


def summary(record: dict[str, Any]) -> str:
    """One line."""
    head = "{case} batch {batch} {optimizer} {ranks}x{threads} seed {seed} beside {peer}".format(**record)
    losses = "loss {ours_loss:.4f} beside {peer_loss:.4f}, last {ours_last_loss:.4f} beside {peer_last_loss:.4f}"
    pairs = record["pairs"][1:]
    if not pairs:
        return f"{head}: {losses.format(**record)}"
    ratios = [p["ours"]["samples_per_s"] / p["peer"]["samples_per_s"] for p in pairs]
    cpu = [p["peer"]["cpu_us"] / p["ours"]["cpu_us"] for p in pairs]
    speed = {who: statistics.median(p[who]["samples_per_s"] for p in pairs) for who in ("ours", "peer")}
    foreign = max(p[who]["foreign_share"] for p in pairs for who in ("ours", "peer"))
    return (
        f"{head}: {speed['ours']:,.0f} beside {speed['peer']:,.0f} samples/s, ratio {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} pairs), CPU time {statistics.median(cpu):.3f}, "
        f"others used up to {foreign:.0%}; {losses.format(**record)}"
    )


if __name__ == "__main__":
    main()
