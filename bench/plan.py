"""How long planning takes, and what measured pooling factors are worth.

python bench/plan.py              # the MLPerf model on 1 to 16 nodes, 1,000 tables of 4 TB on 64 nodes
python bench/plan.py --search     # the same with TorchRec's own search, where that ends
python bench/plan.py --quality    # plans with measured pooling factors and without, in turn, on 4 CPU ranks
"""

import argparse
import contextlib
import dataclasses
import io
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hydra.core.config_store import ConfigStore
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from rechpc import compose
from rechpc.config import CommandConfig, RunConfig, SparseFeature
from rechpc.errors import ConfigError
from rechpc.planned import made_for, pooling_factors, summary
from rechpc.rank import planning, process
from rechpc.rank.data import GlobalBatches, open_splits
from rechpc.rank.model import build
from rechpc.rank.optim import Optimizers, fuse_sparse
from rechpc.rank.sharding import shard
from rechpc.rundir import RunDir, write_json
from rechpc.topology import RankEnv

RANKS, STEPS, ROUNDS = 4, 30, 3


def config_of(*overrides: str) -> RunConfig:
    ConfigStore.instance().store(name="schema", node=CommandConfig)
    with hydra.initialize_config_dir(str(compose.CONF_PATH), version_base="1.3"):
        return compose.typed(hydra.compose("config", list(overrides)))


def models() -> dict[str, RunConfig]:
    mlperf = "experiment=mlperf_dlrm_dcnv2"
    found = {
        f"mlperf {nodes:>2} x 8 mi300x": config_of(mlperf, "cluster=mi300x", f"job.nodes={nodes}")
        for nodes in (1, 2, 4, 8, 16)
    }
    found["mlperf 16 x 8 mi250x"] = config_of(mlperf, "cluster=mi250x", "job.nodes=16")
    large = config_of(mlperf, "cluster=mi300x", "job.nodes=64")
    shapes = [large.data.sparse[i % 26] for i in range(1000)]
    scale = 8e9 / sum(f.rows for f in shapes)  # 8e9 rows of 512 bytes
    large.data.sparse = [
        SparseFeature(name=f"f{i}", rows=max(1, int(f.rows * scale)), ids_per_sample=f.ids_per_sample)
        for i, f in enumerate(shapes)
    ]
    found["1,000 tables, 64 x 8 mi300x"] = large
    return found


def times(*, own_search: bool) -> None:
    for name, config in models().items():
        if own_search and len(config.data.sparse) > 26:
            print(f"{name:28} left out: see docs/sharding.md")
            continue
        started_s = time.perf_counter()
        try:
            result = torchrec_search(config) if own_search else summary(planning.plan_of(config), config)
        except ConfigError as error:
            result = str(error)
        print(f"{name:28} {time.perf_counter() - started_s:6.1f} s  {result}", flush=True)


def torchrec_search(config: RunConfig) -> str:
    """TorchRec's planner as it comes, told of the hardware and the pooling factors alone."""
    model = build(config.model, config.data, seed=config.seed, device=torch.device("cpu"))
    fuse_sparse(model, config.optimizer)
    pooling = pooling_factors(config)
    constraints = {
        t.name: ParameterConstraints(pooling_factors=[pooling[f.name] for f in t.features])
        for t in config.data.tables().values()
    }
    planner = EmbeddingShardingPlanner(
        topology=planning.torchrec_topology(config, int(config.cluster.hbm_gib * 0.8 * (1 << 30))),
        batch_size=config.trainer.global_batch // config.world_size,
        constraints=constraints,
    )
    planner.plan(model, [planning.Sharder(config)])
    return f"slowest rank {planner._perf_model.rate(planner._best_plan):.2f} ms"


# Quality: the same model under two plans.


def skewed() -> RunConfig:
    """Tables of one size, whose ids in a sample follow a power law in an order of chance."""
    ids = [200 // n for n in range(1, 17)]
    random.Random(0).shuffle(ids)
    sparse = ", ".join(f"{{name: f{i}, rows: 20_000, ids_per_sample: {n}}}" for i, n in enumerate(ids))
    return config_of(
        f"data.sparse=[{sparse}]", f"job.ranks_per_node={RANKS}", "sharding=table_wise", "trainer.global_batch=256",
        "model.embedding_dim=64", "model.dense_layers=[64,64]", "data.synthetic.train_rows=8192",
    )  # fmt: skip


def one_rank(rank: int, port: int, config: RunConfig, path: str, results: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    with contextlib.redirect_stderr(io.StringIO()):
        env = RankEnv(rank=rank, local_rank=rank, world_size=RANKS, local_world_size=RANKS)
        with process.start(config, env) as here:
            model = build(config.model, config.data, seed=1, device=here.device)
            fuse_sparse(model, config.optimizer)
            sharded = shard(model, config, RunDir(Path(path)), here)
            batches = GlobalBatches(
                open_splits(config.data)["train"], config.data, global_batch=config.trainer.global_batch,
                rank=rank, world_size=RANKS, seed=1,
            )  # fmt: skip
            held = [batches.batch(step) for step in range(STEPS)]
            (collection,) = (m for m in sharded.modules() if isinstance(m, ShardedEmbeddingBagCollection))
            ids = []
            for lookup in collection._lookups:
                lookup.register_forward_hook(lambda _, inputs, __: ids.append(inputs[0].values().numel()))
            pipeline = TrainPipelineSparseDist(
                sharded, Optimizers(sharded, config.optimizer).combined, here.device, execute_all_batches=True
            )
            iterator, steps_s = iter(held), []
            for _ in range(STEPS):
                dist.barrier()
                started_s = time.perf_counter()
                pipeline.progress(iterator)
                steps_s.append(time.perf_counter() - started_s)
            found = here.gather((sum(ids), statistics.median(steps_s[10:])))
            if found:
                results.put(found)


def quality() -> None:
    config = skewed()
    blind = dataclasses.replace(
        config, data=dataclasses.replace(
            config.data, sparse=[dataclasses.replace(f, ids_per_sample=1.0) for f in config.data.sparse]
        )
    )  # fmt: skip
    plans = {"pooling measured": planning.plan_of(config), "pooling 1": planning.plan_of(blind)}
    plans["pooling 1"]["made_for"] = made_for(config)
    context = mp.get_context("spawn")
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
    for _ in range(ROUNDS):
        for name, plan in plans.items():
            with tempfile.TemporaryDirectory() as path:
                write_json(RunDir(Path(path)).plan_path, plan)
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
                results = context.SimpleQueue()
                mp.spawn(one_rank, (store.port, config, path, results), nprocs=RANKS)
                found = results.get()
            loads = [ids for ids, _ in found]
            rounds[name].append((max(loads) * RANKS / sum(loads), max(step_s for _, step_s in found)))
            print(
                f"{name:18} load max/mean {rounds[name][-1][0]:.2f}  step {rounds[name][-1][1] * 1e3:.1f} ms",
                flush=True,
            )
    medians = {name: statistics.median(step for _, step in found) for name, found in rounds.items()}
    print(f"step time, pooling 1 over measured: {medians['pooling 1'] / medians['pooling measured']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true", help="TorchRec's own search")
    parser.add_argument("--quality", action="store_true", help="pooling factors measured and not")
    arguments = parser.parse_args()
    if arguments.quality:
        quality()
    else:
        times(own_search=arguments.search)


if __name__ == "__main__":
    sys.exit(main())
