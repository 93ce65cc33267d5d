"""How much memory the tables and their optimizer state take, by arithmetic on the configuration alone.

The planner's answer (`plan.json`) also knows buffers and needs torch; this one is instant and runs anywhere.
"""

from dataclasses import dataclass

from rechpc import topology
from rechpc.choices import (
    DenseOptimizer,
    Device,
    Interaction,
    Kernel,
    Launcher,
    ShardingType,
    SparseOptimizer,
    TablePrecision,
)
from rechpc.config import ClusterConfig, RunConfig, Table
from rechpc.errors import ConfigError

_FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TableMemory:
    """One embedding table in float32 and the state that its optimizer keeps."""

    name: str
    rows: int
    dim: int
    weight_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """Weights and optimizer state."""
        return self.weight_bytes + self.optimizer_bytes


def weight_bytes(config: RunConfig, rows: int, columns: int) -> int:
    """Weights of a table or of a part of it."""
    return rows * columns * (2 if config.model.table_precision is TablePrecision.fp16 else _FLOAT_BYTES)


def state_bytes(config: RunConfig, rows: int, columns: int) -> int:
    """Optimizer state of a table or of a part of it: float32 whatever the weights are."""
    floats = {SparseOptimizer.sgd: 0, SparseOptimizer.adagrad: columns, SparseOptimizer.rowwise_adagrad: 1}
    return rows * floats[config.optimizer.sparse] * _FLOAT_BYTES


def table(table: Table, config: RunConfig) -> TableMemory:
    """One table as a whole."""
    shape = (table.rows, config.model.embedding_dim)
    weights, state = weight_bytes(config, *shape), state_bytes(config, *shape)
    return TableMemory(name=table.name, rows=shape[0], dim=shape[1], weight_bytes=weights, optimizer_bytes=state)


def tables(config: RunConfig) -> list[TableMemory]:
    """Every table of the model, in the order of the configuration."""
    return [table(t, config) for t in config.data.tables().values()]


def dense_state_floats(config: RunConfig) -> int:
    """Floats of optimizer state for a dense parameter."""
    return {DenseOptimizer.sgd: 0, DenseOptimizer.adagrad: 1, DenseOptimizer.adam: 2}[config.optimizer.dense]


def dense_bytes(config: RunConfig, params: int) -> int:
    """The dense part on a rank: weights, gradients, DDP's buckets of them, optimizer state, and activations twice."""
    m = config.model
    joined = (len(config.data.sparse) + 1) * m.embedding_dim
    widths = sum(m.dense_layers) + sum(m.over_layers) + joined
    if m.interaction is Interaction.dcn:
        widths += m.dcn_layers * (3 * joined + m.dcn_rank)
    local_batch = config.trainer.global_batch // config.world_size
    return _FLOAT_BYTES * (params * (3 + dense_state_floats(config)) + 2 * local_batch * widths)


def check_known(cluster: ClusterConfig) -> None:
    """Raise ConfigError for a GPU of which nothing is said."""
    if cluster.device is Device.cuda and not cluster.hbm_gib:
        raise ConfigError(
            "cluster.hbm_gib=0: cluster.device=cuda needs the hardware of a GPU; choose cluster=mi300x or another of "
            "conf/cluster, or set cluster.hbm_gib, .hbm_gb_per_s, .intra_node_gb_per_s and .inter_node_gb_per_s"
        )


def check(config: RunConfig) -> None:
    """Raise ConfigError for tables that cannot fit, whatever the plan; what passes may still not fit."""
    check_known(config.cluster)
    if exceeded := _exceeded(config):
        raise ConfigError(
            f"{exceeded}: a node needs at least {size(host_bytes(config))} of host memory for {_on_host(config)}; ask "
            "for more of it or for more job.nodes, or set checkpoint.asynchronous=false, which needs no copy"
        )
    sharding, capacity, found = config.sharding, capacity_bytes(config), tables(config)
    behind_gpu = {sharding.kernel, *(k for chosen in sharding.tables.values() for k in chosen.kernels)}
    if capacity is None or behind_gpu != {Kernel.fused}:
        return
    least = -(-sum(t.total_bytes for t in found) // config.world_size)
    if sharding.type is ShardingType.data_parallel and not sharding.tables:
        least *= config.world_size
    if least > capacity:
        largest = max(found, key=lambda t: t.total_bytes)
        raise ConfigError(
            f"job.nodes={config.job.nodes}: tables and optimizer state take at least {size(least)} on each of "
            f"{config.world_size} ranks, which have {size(capacity)} for them (largest: {largest.name}, "
            f"{size(largest.total_bytes)}); `python -m rechpc.plan` with the same arguments says what would fit"
        )


def host_bytes(config: RunConfig) -> int:
    """The least that a node needs of host memory: tables on CPUs, and the copy of which a save beside training writes.

    Both with the state of optimizers, shared evenly between nodes.
    """
    times = (config.cluster.device is Device.cpu) + config.checkpoint.asynchronous
    return times * -(-sum(t.total_bytes for t in tables(config)) // config.job.nodes)


def _exceeded(config: RunConfig) -> str:
    """The setting that gives a node less host memory than that; nothing where none does."""
    key, limit_gib = "job.memory_gib", float(config.job.memory_gib or 0)
    if not limit_gib:
        key, limit_gib = "cluster.host_memory_gib", config.cluster.host_memory_gib or 0.0
    return f"{key}={limit_gib:g}" if limit_gib and host_bytes(config) > limit_gib * topology.GIB else ""


def _on_host(config: RunConfig) -> str:
    held = ["tables"] * (config.cluster.device is Device.cpu)
    return " and ".join(held + ["the copy that is saved beside training"] * config.checkpoint.asynchronous)


def largest_rank_bytes(found: list[TableMemory], sharding: ShardingType, *, world_size: int) -> int:
    """Bytes of tables and optimizer state on the rank that holds most.

    Exact for data_parallel and row_wise; for table_wise what a greedy balance by size reaches; for the others an even
    share, which the planner may miss.
    """
    if sharding is ShardingType.data_parallel:
        return sum(table.total_bytes for table in found)
    if sharding is ShardingType.row_wise:
        return sum(-(-table.rows // world_size) * (table.total_bytes // table.rows) for table in found)
    if sharding is ShardingType.table_wise:
        ranks = [0] * world_size
        for table in sorted(found, key=lambda table: -table.total_bytes):
            ranks[ranks.index(min(ranks))] += table.total_bytes
        return max(ranks)
    return -(-sum(table.total_bytes for table in found) // world_size)


def capacity_bytes(config: RunConfig) -> int | None:
    """Bytes that a rank may fill with tables; None where the configuration does not say and this is another machine."""
    cluster = config.cluster
    if cluster.device is Device.cuda:
        return int(cluster.hbm_gib * topology.GIB * (1 - config.sharding.reserve)) or None
    if cluster.host_memory_gib is None and cluster.launcher is not Launcher.local:
        return None
    return topology.of(config).host_memory_bytes


def report(config: RunConfig) -> str:
    """The memory table of a dry run."""
    found, world_size, sharding = tables(config), config.world_size, config.sharding.type
    total = TableMemory(
        name="total",
        rows=sum(table.rows for table in found),
        dim=config.model.embedding_dim,
        weight_bytes=sum(table.weight_bytes for table in found),
        optimizer_bytes=sum(table.optimizer_bytes for table in found),
    )
    width = max(len("table"), *(len(table.name) for table in found))
    lines = [f"{'table':{width}} {'rows':>15} {'dim':>5} {'weights':>12} {config.optimizer.sparse:>16}"]
    lines += [
        f"{table.name:{width}} {table.rows:>15,} {table.dim:>5} {size(table.weight_bytes):>12} "
        f"{size(table.optimizer_bytes):>16}"
        for table in [*found, total]
    ]
    needed, capacity = largest_rank_bytes(found, sharding, world_size=world_size), capacity_bytes(config)
    estimate = {
        ShardingType.table_wise: " if tables are balanced by size",
        ShardingType.data_parallel: "",
        ShardingType.row_wise: "",
    }.get(sharding, " if shared evenly")
    lines.append(f"largest of {world_size} ranks, sharding {sharding}: {size(needed)}{estimate}")
    if capacity is not None:
        lines.append(f"a rank has {size(capacity)} for tables" + _verdict(config, needed, capacity))
    if host_bytes(config):
        verdict = f": TOO MUCH for {_exceeded(config)}" if _exceeded(config) else ""
        lines.append(f"a node takes {size(host_bytes(config))} of host memory for {_on_host(config)}{verdict}")
    return "\n".join(lines)


def _verdict(config: RunConfig, needed: int, capacity: int) -> str:
    if needed <= capacity:
        return f", {needed / capacity:.1%} of it used"
    # Rows shared evenly, which every plan but data_parallel may approach.
    even = sum(table.total_bytes for table in tables(config))
    ranks = -(-even // capacity)
    return f": TOO LITTLE; all tables together need at least {ranks} ranks, or smaller data.sparse rows"


def size(size_bytes: int) -> str:
    """Bytes for people."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:,.1f} {unit}"
    return f"{size_bytes / 1024:,.1f} KiB"
