"""The sharded model: one plan for all ranks, shards as it says, and their initial weights.

The plan is made on rank 0 and travels to all ranks as text, so that a fresh plan and one that a later attempt or the
login node made take the same way. How a plan is found is `rechpc.rank.planning`'s.
"""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import (
    CacheParams,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardedTensor,
    ShardingEnv,
    ShardingPlan,
)

from rechpc.choices import Device
from rechpc.config import RunConfig
from rechpc.errors import ConfigError, RechpcError
from rechpc.planned import Plan, made_for, render
from rechpc.rank.data import Batch
from rechpc.rank.interaction import update_tables_on_one_thread
from rechpc.rank.model import WeightedLoss, init_table_shard
from rechpc.rank.planning import Sharder, make_plan
from rechpc.rank.process import Process
from rechpc.rundir import RunDir, read_json, write_json, write_text

logger = logging.getLogger(__name__)


def shard(model: WeightedLoss, config: RunConfig, run: RunDir, process: Process) -> DistributedModelParallel:
    """The model spread over all ranks, its tables initialised; writes `plan.json` and `plan.txt`.

    Collective: every rank. Raises ConfigError on every rank when no plan fits.
    """
    plan = agree_on_plan(model, config, run, process)
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=process.device,
        plan=_from_json(plan, process.device),
        sharders=[Sharder(config)],
    )
    _init_tables(sharded, config)
    if process.device.type == Device.cpu:
        update_tables_on_one_thread(sharded)
    return sharded


def settle(model: DistributedModelParallel, nothing: Batch) -> None:
    """Take the gradient of nothing, so that every real step sums gradients in the same order.

    Collective: every rank. DDP lays its buckets out anew after its first passes (with torch 2.13 after the second),
    and on three or more ranks the layout decides the order in which an all-reduce adds up: the first steps after a
    resume would differ in their last bits from the same steps of a run that was never stopped.
    """
    for _ in range(3):
        loss, _ = model(nothing)
        loss.backward()
    model.zero_grad(set_to_none=True)


def agree_on_plan(model: WeightedLoss, config: RunConfig, run: RunDir, process: Process) -> Plan:
    """The plan of this world size: that of an earlier attempt if there is one, else a new one.

    Collective: every rank. A failure on rank 0 reaches all of them; TorchRec's own collective planning leaves the
    others waiting for ever.
    """
    answer: dict[str, Any] = {}
    if process.is_main:
        try:
            plan = read_json(run.plan_path)
            wanted = made_for(config)
            if plan is None or plan["made_for"] != wanted:
                if plan is not None:
                    before = plan["made_for"]
                    other = [key for key in wanted if before.get(key) != wanted[key]]
                    logger.warning("plan.json was made for another %s: planning anew", ", ".join(other))
                plan = make_plan(model, config)
                write_json(run.plan_path, plan)
                write_text(run.plan_text_path, render(plan, config))
            answer = {"plan": plan}
        except RechpcError as error:
            answer = {"error": str(error)}
    answer = process.agree(answer)
    if "error" in answer:
        raise ConfigError(answer["error"])
    plan = answer["plan"]
    assert isinstance(plan, dict)
    return plan


def _from_json(plan: Plan, device: torch.device) -> ShardingPlan:
    local_world_size = plan["made_for"]["local_world_size"]
    tables = EmbeddingModuleShardingPlan()
    for name, table in plan["tables"].items():
        shards = [
            ShardMetadata(
                shard_offsets=part["offset"],
                shard_sizes=part["shape"],
                placement=f"rank:{part['rank']}/"
                + (f"cuda:{part['rank'] % local_world_size}" if device.type == Device.cuda else "cpu"),
            )
            for part in table["shards"]
        ]
        tables[name] = ParameterSharding(
            sharding_type=table["type"],
            compute_kernel=table["kernel"],
            ranks=table["ranks"],
            cache_params=CacheParams(load_factor=table["cache_load_factor"]) if table["cache_load_factor"] else None,
            sharding_spec=EnumerableShardingSpec(shards) if shards else None,
        )
    return ShardingPlan({plan["module"]: tables})


def _init_tables(sharded: DistributedModelParallel, config: RunConfig) -> None:
    """Give this rank's part of every table its initial weights."""
    weights = {key.rpartition(".embedding_bags.")[2]: w for key, w in sharded.state_dict().items()}
    for table in config.data.tables().values():
        weight = weights[f"{table.name}.weight"]
        for (row, column), part in local_shards(weight):
            init_table_shard(
                part, table=table.name, rows=table.rows, row=row, column=column,
                dim=config.model.embedding_dim, seed=config.seed,
            )  # fmt: skip


def local_shards(tensor: torch.Tensor | ShardedTensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """This rank's parts of a tensor, each with its offset in the whole; a plain tensor is one part at the origin."""
    if isinstance(tensor, ShardedTensor):
        return [(tuple(s.metadata.shard_offsets), s.tensor) for s in tensor.local_shards()]
    return [((0,) * tensor.dim(), tensor)]
