"""Where every table lives: TorchRec's planner, the plan as a file, and the sharded model.

The plan is computed on rank 0 and travels to all ranks as text, so that a fresh plan and one that a later attempt
reads from `plan.json` take the same way. The only file that imports the planner.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardedTensor,
    ShardingEnv,
    ShardingPlan,
)

from rechpc import topology
from rechpc.config import Device, RunConfig, ShardingType, SparseOptimizer, Table
from rechpc.errors import ConfigError
from rechpc.rank.data import Batch
from rechpc.rank.model import WeightedLoss, init_table_shard
from rechpc.rank.process import Process
from rechpc.rundir import RunDir, read_json, write_json, write_text

logger = logging.getLogger(__name__)

Plan = dict[str, Any]  # what plan.json holds, see _to_json

_FORMAT = 1
_BYTES_PER_WEIGHT = 4


class _Sharder(EmbeddingBagCollectionSharder):
    """Offers row-wise sharding on the CPU too.

    TorchRec leaves it out there because gloo once had no reduce-scatter (meta-pytorch/torchrec#1252); it has one
    now, and the results equal those of the unsharded module. Delete when the CPU list has row_wise.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        types: list[str] = super().sharding_types(compute_device_type)
        return types if ShardingType.row_wise in types else [*types, str(ShardingType.row_wise)]


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
        sharders=[_Sharder()],
    )
    _init_tables(sharded, config)
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
            if plan is None or plan["made_for"] != _made_for(config):
                plan = make_plan(model, config)
                write_json(run.plan_path, plan)
                write_text(run.plan_text_path, render(plan))
            answer = {"plan": plan}
        except ConfigError as error:
            answer = {"error": str(error)}
    answer = process.agree(answer)
    if "error" in answer:
        raise ConfigError(answer["error"])
    plan = answer["plan"]
    assert isinstance(plan, dict)
    return plan


def make_plan(model: WeightedLoss, config: RunConfig) -> Plan:
    """A plan for the model on the hardware of the configuration. Needs no GPU and no process group."""
    hardware = topology.of(config)
    tables = config.data.tables()
    constraints = {t.name: _constraint(t, config) for t in tables.values()}
    with _quiet_planner():
        planner = EmbeddingShardingPlanner(
            topology=Topology(
                world_size=hardware.world_size,
                local_world_size=hardware.local_world_size,
                compute_device=str(hardware.device),
                hbm_cap=hardware.hbm_bytes,
                ddr_cap=hardware.host_memory_bytes,
                # TorchRec counts in bytes per millisecond.
                hbm_mem_bw=hardware.hbm_bytes_per_s / 1000,
                ddr_mem_bw=hardware.host_memory_bytes_per_s / 1000,
                intra_host_bw=hardware.intra_node_bytes_per_s / 1000,
                inter_host_bw=hardware.inter_node_bytes_per_s / 1000,
            ),
            batch_size=config.trainer.global_batch // hardware.world_size,
            storage_reservation=FixedPercentageStorageReservation(percentage=config.sharding.reserve),
            constraints=constraints,
        )
        try:
            plan = planner.plan(model, [_Sharder()])
        except (PlannerError, RuntimeError) as error:
            raise ConfigError(
                f"sharding.type={config.sharding.type}: no plan fits {hardware.world_size} ranks: {error}"
            ) from error
    (module, parameters), *others = plan.plan.items()
    assert not others, "one EmbeddingBagCollection holds all tables"
    return {
        "format": _FORMAT,
        "made_for": _made_for(config),
        "module": module,
        "tables": {name: _to_json(tables[name], parameters[name], config) for name in tables},
    }


def render(plan: Plan) -> str:
    """The plan as a table: where every table lives, and the bytes of weights on every rank."""
    lines = [f"{'table':24} {'rows':>12} {'dim':>5} {'sharding':14} {'kernel':8} ranks"]
    by_rank = [0] * plan["made_for"]["world_size"]
    for name, table in plan["tables"].items():
        ranks = [s["rank"] for s in table["shards"]] or ["all"]
        lines.append(
            f"{name:24} {table['rows']:>12,} {table['dim']:>5} {table['type']:14} {table['kernel']:8} "
            + ",".join(str(r) for r in ranks)
        )
        for part in table["shards"]:
            by_rank[part["rank"]] += part["shape"][0] * part["shape"][1] * _BYTES_PER_WEIGHT
        if not table["shards"]:
            by_rank = [b + table["rows"] * table["dim"] * _BYTES_PER_WEIGHT for b in by_rank]
    lines += ["", "weights of tables by rank:"]
    lines += [f"  rank {rank:<5} {size / (1 << 20):12,.1f} MiB" for rank, size in enumerate(by_rank)]
    return "\n".join(lines) + "\n"


def _constraint(table: Table, config: RunConfig) -> ParameterConstraints:
    dim, world_size = config.model.embedding_dim, config.world_size
    chosen = config.sharding.type
    if chosen is ShardingType.row_wise and _has_empty_shard(table.rows, world_size):
        # FBGEMM's CPU kernel fails on a shard without rows ("weights[0] must be a GPU or MTIA tensor").
        logger.warning(
            "table=%s rows=%d world_size=%d row_wise would leave a rank without rows: table_wise instead",
            table.name, table.rows, world_size,
        )  # fmt: skip
        chosen = ShardingType.table_wise
    types = [str(chosen)]
    if chosen is ShardingType.auto:
        types = [str(t) for t in ShardingType if t is not ShardingType.auto]
        if _has_empty_shard(table.rows, world_size):
            types.remove(ShardingType.row_wise)
        if config.optimizer.sparse is SparseOptimizer.rowwise_adagrad:
            types.remove(ShardingType.column_wise)  # a state per column shard: another model, see config.py
    # An even split into whole groups of 4 columns; TorchRec's own minimum of 128 would not split at all.
    width = -(-dim // (4 * world_size)) * 4
    return ParameterConstraints(
        sharding_types=types,
        min_partition=width if str(ShardingType.column_wise) in types else None,
        pooling_factors=[max(f.ids_per_sample, 1e-3) for f in table.features],
    )


def _has_empty_shard(rows: int, world_size: int) -> bool:
    block = -(-rows // world_size)
    return block * (world_size - 1) >= rows


def _made_for(config: RunConfig) -> dict[str, Any]:
    """What a plan depends on; a plan made for anything else is not used."""
    return {
        "world_size": config.world_size,
        "local_world_size": config.ranks_per_node,
        "device": str(config.cluster.device),
        "sharding": str(config.sharding.type),
        "sparse_optimizer": str(config.optimizer.sparse),
        "embedding_dim": config.model.embedding_dim,
        "tables": {table.name: table.rows for table in config.data.tables().values()},
    }


def _to_json(table: Table, parameter: ParameterSharding, config: RunConfig) -> dict[str, Any]:
    shards = parameter.sharding_spec.shards if parameter.sharding_spec else []
    return {
        "rows": table.rows,
        "dim": config.model.embedding_dim,
        "type": parameter.sharding_type,
        "kernel": parameter.compute_kernel,
        "ranks": parameter.ranks,
        "shards": [
            {"rank": s.placement.rank(), "offset": list(s.shard_offsets), "shape": list(s.shard_sizes)} for s in shards
        ],
    }


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


@contextlib.contextmanager
def _quiet_planner() -> Iterator[None]:
    """Silence a log line for every proposal, and advice about parts of the planner that rechpc does not use."""
    planner = logging.getLogger("torchrec.distributed.planner")
    level = planner.level
    planner.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        planner.setLevel(level)
