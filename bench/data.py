"""Prepare and read a Criteo-like log beside public tools, on one core, as ratios.

  python bench/data.py [--quick] [--rows 2000000] [--dir DIR]

Every tool does its part in turn, several rounds; the median counts, in rows per second of CPU time, so that other work
on the machine disturbs little. The text is generated; what is read was prepared from it, through the page cache.

prepare   rechpc.prepare does everything: parses, maps ids, fits, shuffles through the disk, writes and hashes. "parse
          and map" is its first part alone. Polars and PyArrow parse the columns only (hexadecimals stay text), and
          TorchRec's CriteoIterDataPipe makes Python lists of them.
read      batches of labels, dense values and a KeyedJaggedTensor: rechpc checks every value and shuffles; TorchRec's
          InMemoryBinaryCriteoIterDataPipe has npy arrays of the same rows in memory.

training  a DLRM on two ranks: what a step waits for data.

TorchRec's two need `pip install torchrec[datasets]` (iopath); without it they are left out, and that is said.
"""

import os

os.environ.update(POLARS_MAX_THREADS="1", OMP_NUM_THREADS="1")  # before the libraries are imported

import argparse
import contextlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.csv as pa_csv
import torch

from rechpc.config import DataConfig, DataKind, IdMapping, SparseFeature
from rechpc.prepare import sources
from rechpc.prepare.convert import prepare
from rechpc.prepare.criteo import COLUMNS, DENSE, SPARSE
from rechpc.prepare.rows import Judge, typed
from rechpc.rank.data import GlobalBatches, open_splits

BATCH = 4096
# MLPerf's 26 features, the longest cut so that a row has 112 ids.
MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 18, 11, 6, 3, 1, 1)
HAS_IOPATH = importlib.util.find_spec("iopath") is not None

Task = tuple[int, Callable[[], object]]  # rows, and what is timed


def main() -> None:
    """Generate, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute: 200,000 rows, 3 rounds")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--dir", help="where files go (a temporary folder)")
    arguments = parser.parse_args()
    num_rows, rounds = (200_000, 3) if arguments.quick else (arguments.rows, 5)
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    torch.set_num_threads(1)
    print(f"{num_rows:,} rows, {rounds} rounds, one core; versions: {_versions()}")
    if not HAS_IOPATH:
        print("without TorchRec's data pipes: iopath is not installed")
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        path = Path(folder)
        generate(path / "in", num_rows)
        command("prepare", f"data.source={path / 'in'}", f"data.path={path / 'criteo'}")
        peak_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        print(f"peak memory of rechpc.prepare: {peak_gib:.2f} GiB")
        compare("prepare", preparing(path, num_rows), rounds)
        compare("read, 26 ids a row", reading(path), rounds)
        compare(f"read, {sum(MULTI_HOT)} ids a row", reading_multi_hot(path, num_rows), rounds)
        os.sched_setaffinity(0, cpus)
        train(path)


def command(entry: str, *overrides: str) -> None:
    """Run rechpc as a user does."""
    argv = [sys.executable, "-m", f"rechpc.{entry}", "data=criteo_kaggle", *overrides]
    subprocess.run(argv, check=True, capture_output=True)


def train(path: Path) -> None:
    """How long steps of a DLRM on two ranks wait for data."""
    batch = ["trainer.global_batch=2048", "trainer.max_steps=80", "checkpoint.every=0"]
    command("submit", f"data.path={path / 'criteo'}", f"runs_root={path / 'runs'}", *batch)
    (metrics,) = path.glob("runs/*/*/metrics.jsonl")
    records = [r for r in map(json.loads, metrics.read_text().splitlines()) if r.get("step_time_ms")]
    step_ms, wait_ms = (statistics.mean(r[key] for r in records) for key in ("step_time_ms", "rank0_data_wait_ms"))
    print(f"\ntraining, 2 ranks: {wait_ms:.3f} of {step_ms:.1f} ms a step waiting for data, {wait_ms / step_ms:.2%}")


def compare(title: str, tasks: dict[str, Task], rounds: int) -> None:
    """Time all tasks in turn; the first one is what the others are compared with."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, (_, run) in tasks.items():
            start_s = time.process_time()
            with contextlib.redirect_stderr(io.StringIO()):  # progress
                run()
            times[name].append(time.process_time() - start_s)
    speeds = {name: rows / statistics.median(times[name]) for name, (rows, _) in tasks.items()}
    first = next(iter(speeds.values()))
    print(f"\n{title}\n{'':44} {'rows/s of a core':>16} {'ratio':>7}")
    for name, speed in speeds.items():
        print(f"  {name:42} {speed:16,.0f} {speed / first:7.2f}")


def generate(folder: Path, num_rows: int) -> None:
    """train.tsv, and a small test.tsv: numbers and categories of all lengths, a fifth missing, ids by a power law."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    with (folder / "train.tsv").open("wb") as file:
        for start in range(0, num_rows, 50_000):
            n = min(50_000, num_rows - start)
            columns = [rng.integers(2, size=n).astype("S")]
            columns += [rng.geometric(0.02, n).astype("S") for _ in DENSE]
            ids = (rng.zipf(1.2, (len(SPARSE), n)) * 2654435761 % 2**32).astype(np.uint32)
            columns += [np.char.mod(b"%08x", column) for column in ids]
            for column in columns[1:]:
                column[rng.random(n) < 0.2] = b""
            file.write(b"".join(b"\t".join(row) + b"\n" for row in zip(*columns, strict=True)))
    with (folder / "train.tsv").open("rb") as whole:
        (folder / "test.tsv").write_bytes(b"".join(itertools.islice(whole, 1000)))


def config(path: Path, out: str, **changes: object) -> DataConfig:
    """The schema of Criteo, with tables of 100,000 rows."""
    values = {"kind": DataKind.criteo, "source": str(path / "in"), "path": str(path / out), "dense": list(DENSE)}
    return DataConfig(**{**values, "sparse": [SparseFeature(name=name, rows=100_000) for name in SPARSE], **changes})


def preparing(path: Path, num_rows: int) -> dict[str, Task]:
    """Everything that parses the text."""
    text = path / "in/train.tsv"
    settings = config(path, "criteo")

    def whole() -> None:
        shutil.rmtree(path / "criteo", ignore_errors=True)
        prepare(settings)

    def parse_and_map() -> None:
        judge = Judge(settings)
        for rows in sources.read(text, settings, judge):
            typed(rows, settings, judge)

    def polars() -> None:
        types = {c: pl.String if c in SPARSE else pl.Int32 for c in COLUMNS}
        pl.read_csv(text, separator="\t", has_header=False, schema=types, quote_char=None)

    def arrow() -> None:
        pa_csv.read_csv(
            text,
            read_options=pa_csv.ReadOptions(column_names=list(COLUMNS), use_threads=False),
            parse_options=pa_csv.ParseOptions(delimiter="\t", quote_char=False),
        )

    tasks = {
        "rechpc.prepare, all of it": (num_rows, whole),
        "rechpc.prepare, parse and map": (num_rows, parse_and_map),
        "Polars read_csv, columns only": (num_rows, polars),
        "PyArrow read_csv, columns only": (num_rows, arrow),
    }
    if HAS_IOPATH:
        from torchrec.datasets.criteo import CriteoIterDataPipe  # noqa: PLC0415 - optional

        part = min(num_rows, 20_000)
        tasks["TorchRec CriteoIterDataPipe, lists"] = (
            part,
            lambda: list(itertools.islice(iter(CriteoIterDataPipe([str(text)])), part)),
        )
    return tasks


def reading(path: Path) -> dict[str, Task]:
    """Everything that makes batches with one id a feature."""
    settings = config(path, "criteo")
    tasks = _rechpc(settings)
    if HAS_IOPATH:
        from torchrec.datasets.criteo import InMemoryBinaryCriteoIterDataPipe  # noqa: PLC0415 - optional

        source = open_splits(settings)["train"]
        blocks = [source.read(i) for i in range(-(-source.rows // source.block_rows))]
        arrays = {
            "dense": np.concatenate([b.dense_NF for b in blocks]),
            "sparse": np.concatenate([np.stack([b.bags[n][1] for n in SPARSE], axis=1) for b in blocks]),
            "labels": np.concatenate([b.labels_N for b in blocks])[:, None].astype(np.int32),
        }
        for name, array in arrays.items():
            np.save(path / f"{name}.npy", array)
        for shuffle in (False, True):
            pipe = InMemoryBinaryCriteoIterDataPipe(
                "train", *([str(path / f"{name}.npy")] for name in arrays), BATCH, 0, 1, shuffle_batches=shuffle
            )
            how = "shuffled batches" if shuffle else "in order"
            tasks[f"TorchRec InMemoryBinaryCriteo, {how}"] = (
                source.rows,
                lambda pipe=pipe: [batch.dense_features.shape for batch in pipe],
            )
    return tasks


def reading_multi_hot(path: Path, num_rows: int) -> dict[str, Task]:
    """Batches with lists of ids, of lengths that vary around MLPerf's."""
    rng = np.random.default_rng(1)
    n = min(num_rows, 300_000)
    columns: dict[str, pl.Series] = {"label": pl.Series(rng.integers(2, size=n)), "x": pl.Series(rng.random(n))}
    sparse = []
    for i, mean in enumerate(MULTI_HOT):
        ids = pl.Series(rng.integers(100_000, size=n * mean, dtype=np.int32))
        if mean > 1:
            cuts = np.sort(rng.integers(n * mean + 1, size=n - 1))
            lengths = np.diff(np.concatenate([[0], cuts, [n * mean]]))
            rows = pl.DataFrame({"row": np.repeat(np.arange(n), lengths), "id": ids}).group_by("row").agg("id")
            ids = pl.DataFrame({"row": np.arange(n)}).join(rows, on="row", how="left", maintain_order="left")["id"]
        columns[f"c{i}"] = ids
        sparse.append(SparseFeature(name=f"c{i}", rows=100_000, ids_per_sample=mean, mapping=IdMapping.as_is))
    (path / "bags").mkdir()
    for split in ("train", "test"):
        frame = pl.DataFrame(columns)
        (frame if split == "train" else frame.head(100)).write_parquet(path / f"bags/{split}.parquet")
    settings = config(path, "multi_hot", kind=DataKind.parquet, source=str(path / "bags"), dense=["x"], sparse=sparse)
    with contextlib.redirect_stderr(io.StringIO()):
        prepare(settings)
    return _rechpc(settings)


def _rechpc(settings: DataConfig) -> dict[str, Task]:
    source = open_splits(settings)["train"]

    def read(seed: int | None) -> None:
        batches = GlobalBatches(source, settings, global_batch=BATCH, rank=0, world_size=1, seed=seed)
        for step in range(batches.steps_per_epoch):
            batches.batch(step)

    return {
        "rechpc, checked and shuffled": (source.rows, lambda: read(1)),
        "rechpc, checked, in order": (source.rows, lambda: read(None)),
    }


def _versions() -> str:
    names = ("polars", "pyarrow", "numpy", "torch", "torchrec")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    return ", ".join([f"rechpc {commit.strip() or '?'}", *(f"{n} {importlib.metadata.version(n)}" for n in names)])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
