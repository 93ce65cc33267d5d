"""Which part of which table goes where, and why it fits: TorchRec's planner, asked for one run on any machine.

Needs no process group and no GPU. The only file that imports the planner. `python -m rechpc.rank.planning DIR` answers
every DIR/*.yaml with a DIR/*.json; the login node starts it where torch is (`rechpc.host.planner`).
"""

import contextlib
import dataclasses
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    PlannerError,
    Proposer,
    Shard,
    ShardEstimator,
    ShardingOption,
    Stats,
    Storage,
)
from torchrec.distributed.types import CacheParams, ParameterSharding
from torchrec.modules.embedding_configs import DataType

from rechpc import memory, topology
from rechpc.choices import Device, Kernel, Pooling, Precision, ShardingType, SparseOptimizer, TablePrecision
from rechpc.config import RunConfig, Table
from rechpc.errors import ConfigError, RechpcError
from rechpc.planned import FORMAT, Plan, made_for, pooling_factors
from rechpc.rank.model import WeightedLoss, build
from rechpc.rank.optim import fuse_sparse
from rechpc.rules import COLUMN_CUT, load, validate
from rechpc.rundir import write_json

logger = logging.getLogger(__name__)

# A larger table is not worth an all-reduce of its gradient in every step.
_REPLICABLE_BYTES = 64 << 20
# Tables x ranks up to which TorchRec's own exhaustive search takes a second or two.
_SMALL = 500


class Sharder(EmbeddingBagCollectionSharder):
    """Cuts tables by rows on the CPU too, and compresses what ranks send.

    TorchRec leaves the row-wise types out there because gloo once had no reduce-scatter (meta-pytorch/torchrec#1252);
    it has one now, and the results equal those of the unsharded module. Delete when the CPU list has row_wise.
    """

    def __init__(self, config: RunConfig) -> None:
        precisions = (config.sharding.forward_precision, config.sharding.backward_precision)
        registry = None
        if set(precisions) != {Precision.fp32}:
            forward, backward = (CommType(str(p)) for p in precisions)
            registry = get_qcomm_codecs_registry(
                QCommsConfig(forward_precision=forward, backward_precision=backward),
                device=torch.device(str(config.cluster.device)),
            )
        super().__init__(qcomm_codecs_registry=registry)

    def sharding_types(self, compute_device_type: str) -> list[str]:  # noqa: ARG002
        return [str(t) for t in ShardingType if t is not ShardingType.auto]


def make_plan(model: WeightedLoss, config: RunConfig) -> Plan:
    """A plan for a model whose tables know their optimizer, on the hardware of the configuration.

    Raises ConfigError when none fits.
    """
    memory.check_known(config.cluster)
    tables = config.data.tables()
    dense_params = sum(p.numel() for name, p in model.named_parameters() if ".embedding_bags." not in name)
    dense_bytes = memory.dense_bytes(config, dense_params)
    table_bytes = max(0, (memory.capacity_bytes(config) or topology.of(config).host_memory_bytes) - dense_bytes)
    place = torchrec_topology(config, table_bytes)
    pooling = pooling_factors(config)
    constraints = {t.name: _constraint(t, config, pooling, table_bytes) for t in tables.values()}
    local_batch = config.trainer.global_batch // config.world_size
    seen = _Seen()
    small = len(tables) * config.world_size <= _SMALL
    with _quiet_planner():
        planner = EmbeddingShardingPlanner(
            topology=place,
            batch_size=local_batch,
            enumerator=EmbeddingEnumerator(
                topology=place, batch_size=local_batch, constraints=constraints,
                estimator=_OncePerSize(place, constraints, config),
            ),
            # The reserve is out of the capacity already, and so is the dense part, which TorchRec does not know.
            storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
            proposer=[_Priced(), UniformProposer()]
            + ([GreedyProposer(), GreedyProposer(use_depth=False)] if small else []),
            stats=seen,
            constraints=constraints,
        )  # fmt: skip
        try:
            plan = planner.plan(model, [Sharder(config)])
        except (PlannerError, RuntimeError, ValueError) as error:
            raise ConfigError(_why_none(config, table_bytes, dense_bytes, error)) from error
    (module, parameters), *others = plan.plan.items()
    assert not others, "one EmbeddingBagCollection holds all tables"
    return {
        "format": FORMAT,
        "made_for": made_for(config),
        "module": module,
        "table_bytes_per_rank": table_bytes,
        "dense_bytes": dense_bytes,
        "dense_params": dense_params,
        "tables": {name: _to_json(tables[name], parameters[name], config) for name in tables},
        "ranks": _by_rank(seen.best, config),
    }


def torchrec_topology(config: RunConfig, table_bytes: int) -> Topology:
    """The hardware in TorchRec's words, nothing left to its defaults; `table_bytes` are free for tables on a rank."""
    hardware = topology.of(config)
    on_gpu = hardware.device is Device.cuda
    # TorchRec counts in bytes per millisecond.
    bandwidths = {
        "hbm_mem_bw": hardware.hbm_bytes_per_s / 1000,
        "ddr_mem_bw": hardware.host_memory_bytes_per_s / 1000,
        "hbm_to_ddr_mem_bw": hardware.host_to_gpu_bytes_per_s / 1000,
        "intra_host_bw": hardware.intra_node_bytes_per_s / 1000,
        "inter_host_bw": hardware.inter_node_bytes_per_s / 1000,
    }
    memory_caps = {"hbm": table_bytes if on_gpu else 0, "ddr": hardware.host_memory_bytes if on_gpu else table_bytes}
    ranks = {"world_size": hardware.world_size, "local_world_size": hardware.local_world_size}
    with _quiet_planner():
        try:
            from torchrec.distributed.planner.types import (  # noqa: PLC0415 - not in every TorchRec
                HardwareConfig,
                KernelConfig,
                TopologyFactory,
                TrainerConfig,
            )
        except ImportError:
            caps = {f"{name}_cap": size for name, size in memory_caps.items()}
            return Topology(compute_device=str(hardware.device), **ranks, **caps, **bandwidths)
        return TopologyFactory.create_topology(
            trainer_config=TrainerConfig(**ranks),
            hardware_config=HardwareConfig(**{f"{n}_cap_bytes": s for n, s in memory_caps.items()}, **bandwidths),
            # Without this the bandwidths are dropped, and those of another machine taken.
            kernel_config=KernelConfig(compute_device=str(hardware.device), use_hardware_based_bandwidth=True),
        )


def _constraint(table: Table, config: RunConfig, pooling: dict[str, float], table_bytes: int) -> ParameterConstraints:
    chosen = config.sharding.of(table.name)
    types = _types(table, chosen.types, config, table_bytes)
    dim, width = config.model.embedding_dim, chosen.column_width
    caches = Kernel.fused_uvm_caching in chosen.kernels
    if width is None and ShardingType.grid_shard in types:
        # TorchRec's grid drops what is left over of an uneven split.
        width = next(w for w in range(4, dim + 1, 4) if dim % w == 0 and w * config.job.nodes >= dim)
    elif width is None:
        # An even split into whole groups of 4 columns, but no narrower than a look-up is efficient (of a wide table).
        width = max(-(-dim // (4 * config.world_size)) * 4, 32 if dim >= 64 else 4)
    return ParameterConstraints(
        sharding_types=[str(t) for t in types],
        compute_kernels=[*(str(k) for k in chosen.kernels), "dense"],  # dense: the kernel of data_parallel alone
        min_partition=width if COLUMN_CUT & set(types) else None,
        pooling_factors=[pooling[f.name] for f in table.features],
        output_dtype=DataType.FP32,  # whatever the precision of the table
        cache_params=CacheParams(load_factor=chosen.cache_load_factor) if caches else None,
    )


def _types(table: Table, asked: list[ShardingType], config: RunConfig, table_bytes: int) -> list[ShardingType]:
    """The sharding types that the planner may choose from: those asked for, less what cannot work for this table."""
    size = memory.table(table, config).total_bytes
    if ShardingType.auto in asked:
        asked = [ShardingType.table_wise]
        if size <= _REPLICABLE_BYTES and config.model.table_precision is TablePrecision.fp32:
            asked.append(ShardingType.data_parallel)
        if config.optimizer.sparse is not SparseOptimizer.rowwise_adagrad:
            asked.append(ShardingType.column_wise)  # else a state per column shard: another model, see rules.py
        if config.job.nodes > 1:
            asked.append(ShardingType.table_row_wise)
        # All rows over all nodes is slow, and costs the planner a shard a rank: for what a node can hardly hold.
        if config.job.nodes == 1 or 2 * size > table_bytes * config.ranks_per_node:
            asked.append(ShardingType.row_wise)
    # FBGEMM's CPU kernel fails on a shard without rows ("weights[0] must be a GPU or MTIA tensor").
    ranks = {ShardingType.row_wise: config.world_size, ShardingType.table_row_wise: config.ranks_per_node}
    ranks[ShardingType.grid_shard] = config.ranks_per_node
    types = [t for t in asked if not _has_empty_shard(table.rows, ranks.get(t, 1))]
    if table.features[0].pooling is Pooling.mean:
        # TorchRec 1.8 divides by the number of ids for row_wise and table_row_wise alone: a grid would give the sum.
        types = [t for t in types if t is not ShardingType.grid_shard]
    if types:
        return types
    logger.warning(
        "table=%s rows=%d pooling=%s ranks=%d %s cannot be, without a rank without rows or a wrong mean: "
        "table_wise instead",
        table.name, table.rows, table.features[0].pooling, config.world_size, "/".join(asked),
    )  # fmt: skip
    return [ShardingType.table_wise]


def _has_empty_shard(rows: int, ranks: int) -> bool:
    block = -(-rows // ranks)
    return block * (ranks - 1) >= rows


class _Shard(Shard):
    """A shard that is quick to copy and to hash.

    TorchRec copies every shard, and all that it holds, each time that a proposal is better than the best: for 1,000
    tables on 512 ranks that took two thirds of the time. Of a shard it changes the rank alone.
    """

    def __deepcopy__(self, memo: Any) -> "_Shard":
        return _Shard(self.size, self.offset, self.storage, self.perf, self.rank)

    def __hash__(self) -> int:
        return id(self.storage)


class _OncePerSize(ShardEstimator):
    """TorchRec's estimates, made once for all shards of one size: of a table's 512 equal shards it would do each.

    Adds what TorchRec forgets for tables in half precision: their optimizer state is in single precision.
    """

    def __init__(self, place: Topology, constraints: dict[str, ParameterConstraints], config: RunConfig) -> None:
        self._config = config
        self._estimators = [
            EmbeddingPerfEstimator(topology=place, constraints=constraints),
            EmbeddingStorageEstimator(topology=place, constraints=constraints),
        ]

    def estimate(self, sharding_options: list[ShardingOption], *rest: Any, **more: Any) -> None:
        """Set perf and storage of every shard; what follows the options is named differently in every TorchRec."""
        half = self._config.model.table_precision is TablePrecision.fp16
        for option in sharding_options:
            shards = option.shards
            by_size = {tuple(shard.size): shard for shard in shards}
            option.shards = list(by_size.values())
            for estimator in self._estimators:
                estimator.estimate([option], *rest, **more)
            for shard in by_size.values() if half else ():
                missing = memory.state_bytes(self._config, *shard.size) // 2
                in_hbm = shard.storage.hbm > 0 and option.compute_kernel == Kernel.fused
                shard.storage += Storage(hbm=missing * in_hbm, ddr=missing * (not in_hbm))
            firsts = [by_size[tuple(shard.size)] for shard in shards]
            option.shards = [_Shard(s.size, s.offset, f.storage, f.perf) for s, f in zip(shards, firsts, strict=True)]


class _Priced(Proposer):
    """For a series of prices of memory: every table's option of least time plus price times bytes.

    These are the best trades of time for memory (the convex hull of what dynamic programming would find), in at most
    50 proposals, where TorchRec's greedy search makes one for every option of every table: thousands, of a second each,
    for 1,000 tables on 512 ranks. On the MLPerf model the two ended within 15 % of each other, either way.
    """

    _NUM_PRICES = 24

    def load(self, search_space: list[ShardingOption], enumerator: Any = None) -> None:
        """Make all proposals."""
        del enumerator
        tables: dict[str, list[ShardingOption]] = {}
        for option in search_space:
            tables.setdefault(option.fqn, []).append(option)
        self._proposals: list[list[ShardingOption]] = []
        aggregates: list[Callable[[Iterator[float]], float]] = [sum, max]
        for of_shards in aggregates:  # the work of all ranks, and that of the busiest
            rated = [
                [
                    (of_shards(s.perf.total for s in o.shards), sum(s.storage.hbm + s.storage.ddr for s in o.shards), o)
                    for o in options
                ]
                for options in tables.values()
            ]
            trades = sorted(
                (a[0] - b[0]) / (b[1] - a[1]) for r in rated for a in r for b in r if a[0] > b[0] and a[1] < b[1]
            )
            steps = [int(i * (len(trades) - 1) / (self._NUM_PRICES - 1)) for i in range(self._NUM_PRICES)]
            prices = [0.0, *(trades[i] * (1 + 1e-9) for i in steps if trades)]
            for price in prices:
                self._proposals.append([min(r, key=lambda x: x[0] + price * x[1])[2] for r in rated])

    def propose(self) -> list[ShardingOption] | None:
        """The next proposal; TorchRec skips one that it has seen."""
        return self._proposals[0] if self._proposals else None

    def feedback(self, *_: Any, **__: Any) -> None:
        """Go on, whatever became of the last one."""
        self._proposals.pop(0)


class _Seen(Stats):
    """Keeps the estimates of the plan that won."""

    def log(self, **said: Any) -> None:
        """Called once by the planner."""
        self.best: list[ShardingOption] = said["best_plan"]


def _by_rank(options: list[ShardingOption], config: RunConfig) -> list[dict[str, Any]]:
    """What the planner expects of every rank: bytes (weights and state exact), and milliseconds of a step."""
    ranks = [
        dict.fromkeys(("weight_bytes", "optimizer_bytes", "hbm_bytes", "host_bytes"), 0)
        | dict.fromkeys(("forward_compute_ms", "forward_comms_ms", "backward_compute_ms", "backward_comms_ms"), 0.0)
        for _ in range(config.world_size)
    ]
    for option in options:
        for shard in option.shards:
            rank, (rows, columns) = ranks[shard.rank], shard.size
            rank["weight_bytes"] += memory.weight_bytes(config, rows, columns)
            rank["optimizer_bytes"] += memory.state_bytes(config, rows, columns)
            rank["hbm_bytes"] += shard.storage.hbm
            rank["host_bytes"] += shard.storage.ddr
            rank["forward_compute_ms"] += shard.perf.fwd_compute + shard.perf.prefetch_compute
            rank["forward_comms_ms"] += shard.perf.fwd_comms
            rank["backward_compute_ms"] += shard.perf.bwd_compute
            rank["backward_comms_ms"] += shard.perf.bwd_comms
    return [{k: round(v, 6) for k, v in rank.items()} for rank in ranks]


def _to_json(table: Table, parameter: ParameterSharding, config: RunConfig) -> dict[str, Any]:
    shards = parameter.sharding_spec.shards if parameter.sharding_spec else []
    caches = parameter.compute_kernel == Kernel.fused_uvm_caching
    return {
        "rows": table.rows,
        "dim": config.model.embedding_dim,
        "type": parameter.sharding_type,
        "kernel": parameter.compute_kernel,
        "cache_load_factor": config.sharding.of(table.name).cache_load_factor if caches else None,
        "ranks": parameter.ranks,
        "shards": [
            {"rank": s.placement.rank(), "offset": list(s.shard_offsets), "shape": list(s.shard_sizes)} for s in shards
        ],
    }


def _why_none(config: RunConfig, table_bytes: int, dense_bytes: int, error: Exception) -> str:
    """One line: how much is needed, how much there is, the largest tables."""
    begin = f"sharding.type={config.sharding.type}: no plan fits {config.world_size} ranks: "
    if not isinstance(error, PlannerError):
        return begin + " ".join(str(error).split())
    found = sorted(memory.tables(config), key=lambda t: -t.total_bytes)
    total = memory.size(sum(t.total_bytes for t in found))
    largest = ", ".join(f"{t.name} {memory.size(t.total_bytes)}" for t in found[:3])
    ids = sum(pooling_factors(config).values())
    width = len(config.data.sparse) * config.model.embedding_dim * 4
    buffers = memory.size(int(config.trainer.global_batch // config.world_size * (8 * ids + width)))
    return (
        f"{begin}weights and optimizer state take {total} in all, and buffers about {buffers} a rank; a rank has "
        f"{memory.size(table_bytes)} for them beside {memory.size(dense_bytes)} for the dense part; the largest "
        f"tables: {largest}; `python -m rechpc.plan` with the same arguments tries what would fit"
    )


def _changes(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """What a user could change, cheapest first: nothing learned differently, then fewer bits, then slower, then more.

    Not tried here whether it fits.
    """

    def changed(section: str, **values: Any) -> RunConfig:
        return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})

    without = " without sharding.tables" if config.sharding.tables else ""
    for kind in (ShardingType.auto, ShardingType.row_wise):
        if config.sharding.type is not kind or without:
            yield f"sharding={kind}{without}", changed("sharding", type=kind, tables={})
    rowwise, half = {"sparse": SparseOptimizer.rowwise_adagrad}, {"table_precision": TablePrecision.fp16}
    if config.optimizer.sparse is SparseOptimizer.adagrad:
        yield "optimizer.sparse=rowwise_adagrad", changed("optimizer", **rowwise)
    if config.model.table_precision is TablePrecision.fp32:
        yield "model.table_precision=fp16", changed("model", **half)
        if config.optimizer.sparse is SparseOptimizer.adagrad:
            both = dataclasses.replace(changed("model", **half), optimizer=changed("optimizer", **rowwise).optimizer)
            yield "optimizer.sparse=rowwise_adagrad model.table_precision=fp16", both
    if config.cluster.device is Device.cuda and config.sharding.kernel is Kernel.fused:
        yield (
            "sharding.kernel=fused_uvm_caching (tables in host memory: much slower, and experimental on ROCm)",
            changed("sharding", kernel=Kernel.fused_uvm_caching),
        )
    for nodes in (config.job.nodes * 2**n for n in range(1, 7)):
        yield f"job.nodes={nodes}", changed("job", nodes=nodes)


def advise(config: RunConfig) -> list[str]:
    """The changes with which the planner finds a plan, cheapest first; of the numbers of nodes the smallest."""
    fitting = []
    for words, candidate in _changes(config):
        with contextlib.suppress(ConfigError):
            validate(candidate)
            plan_of(candidate)
            fitting.append(words)
            if words.startswith("job.nodes="):
                break
    return fitting


def plan_of(config: RunConfig) -> Plan:
    """The plan of a run, from its configuration alone."""
    model = build(config.model, config.data, seed=config.seed, device=torch.device("cpu"))
    fuse_sparse(model, config.optimizer)
    return make_plan(model, config)


@contextlib.contextmanager
def _quiet_planner() -> Iterator[None]:
    """Silence a log line for every proposal, and advice about parts of the planner that rechpc does not use."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def main(directory: Path) -> None:
    """Answer every configuration in the directory: {"plan": ...}, or {"error": one line, "advice": [...]}."""
    for path in sorted(directory.glob("*.yaml")):
        answer: dict[str, Any]
        try:
            config = load(path)
            answer = {"plan": plan_of(config)}
        except RechpcError as error:
            answer = {"error": str(error), "advice": advise(config) if isinstance(error, ConfigError) else []}
        write_json(path.with_suffix(".json"), answer)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
