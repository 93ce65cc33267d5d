"""What starting rechpc costs beside starting TorchRec: python bench/startup.py

From the start of torchrun to the end of the first step, on 2 CPU ranks of a thread each: `python -m rechpc.train` on a
prepared data set, as a run starts its ranks, and a bare program that imports the same libraries, makes the process
group, plans, shards and builds the same model, and takes one step on a batch in memory. In turn, each in processes of
its own; the first pair warms the caches of the disk. The end of rechpc's step is the time of its record, which is
written when the sums of all ranks have arrived.

Prints the median difference of the pairs and appends a record to --out; --trace shows when rank 0 of rechpc was where.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from rechpc.rundir import RunDir  # noqa: E402

RANKS, BATCH = 2, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--trace", action="store_true", help="print the log of rechpc's rank 0")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/startup.jsonl")
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        bare(options.bare)
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Both in turn; prints and writes what came of it."""
    import peers  # noqa: PLC0415 - imports torch, which the ranks are to do when their clock runs

    from rechpc.rules import dump  # noqa: PLC0415

    facts = argparse.Namespace(ranks=RANKS, rate=0.1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = peers.config_of(peers.M, facts, folder, seed=1)
        config.trainer.max_steps = 1
        peers.generate(folder / "npy", 10 * BATCH, peers.M.num_ids)
        peers.prepare(config.data)
        env = peers.environment(config, cpus=RANKS)
        pairs = []
        for pair in range(options.pairs + 1):
            seconds = {}
            for who in ("bare", "ours"):
                run = RunDir.create(folder, f"{who}{pair}")
                run.config_path.write_text(dump(config))
                run.start_attempt("bench.0")
                seconds[who] = first_step_s(who, run.path, env)
            pairs.append(seconds)
            print(f"pair {pair}: rechpc {seconds['ours']:.2f} s, bare {seconds['bare']:.2f} s", flush=True)
        if options.trace:
            print(run.attempt("bench.0").rank_log_path(0).read_text())
    extra_s = [p["ours"] - p["bare"] for p in pairs[1:]]
    record = {**peers.machine(), "command": " ".join(sys.argv), "extra_s": statistics.median(extra_s), "pairs": pairs}
    with options.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(f"rechpc takes {statistics.median(extra_s):+.2f} s ({min(extra_s):+.2f} to {max(extra_s):+.2f})")


def first_step_s(who: str, run: Path, env: dict[str, str]) -> float:
    """Seconds from the start of torchrun to the end of the first step."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--rdzv-backend", "c10d"]
    torchrun += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    program = [__file__, "--bare", str(run)] if who == "bare" else ["-m", "rechpc.train", str(run)]
    command = [sys.executable, *torchrun, *program, *(["--attempt", "bench.0"] if who == "ours" else [])]
    began_s = time.time()
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{who} failed:\n{done.stderr[-4000:]}")
    if who == "bare":
        return float((run / "first-step").read_text()) - began_s
    return next(r["time_s"] for r in RunDir.open(run).metrics() if "loss" in r) - began_s


def bare(path: Path) -> None:
    """One rank that does what every program with this model must."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor  # noqa: PLC0415
    from torchrec.distributed import DistributedModelParallel  # noqa: PLC0415
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology  # noqa: PLC0415
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist  # noqa: PLC0415
    from torchrec.distributed.types import ShardingEnv  # noqa: PLC0415
    from torchrec.models.dlrm import DLRM, DLRMTrain  # noqa: PLC0415
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward  # noqa: PLC0415
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper  # noqa: PLC0415
    from torchrec.optim.optimizers import in_backward_optimizer_filter  # noqa: PLC0415
    from torchrec.streamable import Pipelineable  # noqa: PLC0415

    dist.init_process_group("gloo")
    cpu, names, local = torch.device("cpu"), [f"C{i}" for i in range(26)], BATCH // RANKS
    tables = [
        EmbeddingBagConfig(name=f"t{n}", feature_names=[n], num_embeddings=100_000, embedding_dim=64) for n in names
    ]
    # Without memory until it is sharded, as in dlrm_main.py: weights of whole tables on each rank take seconds.
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    model = DLRMTrain(DLRM(bags, 13, [512, 256, 64], [512, 512, 256, 1]))
    apply_optimizer_in_backward(torch.optim.SGD, model.model.sparse_arch.parameters(), {"lr": 0.1})
    planner = EmbeddingShardingPlanner(topology=Topology(RANKS, "cpu", local_world_size=RANKS), batch_size=local)
    plan = planner.collective_plan(model, pg=dist.group.WORLD)
    sharded = DistributedModelParallel(
        model, env=ShardingEnv.from_process_group(dist.group.WORLD), device=cpu, plan=plan
    )
    rest = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    dense = KeyedOptimizerWrapper(rest, lambda params: torch.optim.SGD(params, lr=0.1))
    combined = CombinedOptimizer([sharded.fused_optimizer, dense])

    @dataclasses.dataclass
    class Batch(Pipelineable):
        dense_features: torch.Tensor
        sparse_features: KeyedJaggedTensor
        labels: torch.Tensor

        def to(self, *_: object, **__: object) -> "Batch":
            return self

        def record_stream(self, _: torch.Stream) -> None:
            pass

    sparse = KeyedJaggedTensor(
        names, torch.randint(100_000, (26 * local,)), lengths=torch.ones(26 * local, dtype=torch.int32)
    )
    batch = Batch(torch.rand(local, 13), sparse, torch.randint(2, (local,)))
    TrainPipelineSparseDist(sharded, combined, cpu, execute_all_batches=True).progress(iter([batch]))
    if dist.get_rank() == 0:
        (path / "first-step").write_text(repr(time.time()))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
