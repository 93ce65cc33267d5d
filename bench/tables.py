"""FBGEMM's tables on a CPU with one thread and with two, in turn: python bench/tables.py

26 tables of 100,000 rows; ms of the forward pass, and of the backward pass with the update of the tables. Ranks have
such tables updated on one thread, whatever they have themselves (rechpc/rank/interaction.py).
"""

import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: E402
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation  # noqa: E402
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # noqa: E402
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from rechpc.config import RunConfig  # noqa: E402
from rechpc.host.task import rank_environment  # noqa: E402

TABLES, ROWS, DIM, WARMUP, ROUNDS = 26, 100_000, 64, 4, 10
SIZES = ((256, 1), (2048, 1), (16_384, 1), (32_768, 1), (2048, 8))  # samples, and ids of each for a table
OPTIMIZERS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)


def main() -> None:
    """Start anew with the variables of a rank of two threads, then measure."""
    if "GOMP_SPINCOUNT" not in os.environ:
        env = rank_environment(RunConfig(), {}, code_path=ROOT, cpus=2) | {"OMP_NUM_THREADS": "2"}
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | env)
    print("| optimizer | samples | ids | forward, 1 and 2 threads | backward, 1 and 2 threads |\n|---|---|---|---|---|")
    for optimizer in OPTIMIZERS:
        for samples, ids in SIZES:
            forward, backward = measure(optimizer, samples, ids)
            print(f"| {optimizer.value} | {samples:,} | {ids} | {forward} | {backward} |", flush=True)


def measure(optimizer: EmbOptimType, samples: int, ids: int) -> tuple[str, str]:
    """Medians of both passes with one thread and with two, as text."""
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU) for _ in range(TABLES)],
        optimizer=optimizer,
        learning_rate=0.1,
    )
    tables.init_embedding_weights_uniform(-0.01, 0.01)
    generator = torch.Generator().manual_seed(1)
    values = (ROWS * torch.rand(TABLES * samples * ids, generator=generator) ** 3).long()  # some are frequent
    offsets = torch.arange(0, len(values) + 1, ids)
    gradient_BE = torch.randn(samples, TABLES * DIM, generator=generator)
    seconds: dict[tuple[str, int], list[float]] = {(name, n): [] for name in ("forward", "backward") for n in (1, 2)}
    for _ in range(WARMUP + ROUNDS):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            began_s = time.perf_counter()
            pooled_BE = tables(values, offsets)
            between_s = time.perf_counter()
            pooled_BE.backward(gradient_BE)
            seconds["forward", threads].append(between_s - began_s)
            seconds["backward", threads].append(time.perf_counter() - between_s)
    ms = {key: 1000 * statistics.median(found[WARMUP:]) for key, found in seconds.items()}
    forward, backward = (f"{ms[name, 1]:.2f}, {ms[name, 2]:.2f} ms" for name in ("forward", "backward"))
    return forward, backward


if __name__ == "__main__":
    main()
