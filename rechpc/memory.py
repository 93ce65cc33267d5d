"""How much memory the tables and their optimizer state take, by arithmetic on the configuration alone.

The planner's answer (`plan.json`) also knows buffers and needs torch; this one is instant and runs anywhere.
"""

from dataclasses import dataclass

from rechpc import topology
from rechpc.config import Device, Launcher, RunConfig, ShardingType, SparseOptimizer

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


def tables(config: RunConfig) -> list[TableMemory]:
    """Every table of the model, in the order of the configuration."""
    dim = config.model.embedding_dim
    # Floats of optimizer state for one row.
    state = {SparseOptimizer.sgd: 0, SparseOptimizer.adagrad: dim, SparseOptimizer.rowwise_adagrad: 1}
    return [
        TableMemory(
            name=table.name,
            rows=table.rows,
            dim=dim,
            weight_bytes=table.rows * dim * _FLOAT_BYTES,
            optimizer_bytes=table.rows * state[config.optimizer.sparse] * _FLOAT_BYTES,
        )
        for table in config.data.tables().values()
    ]


def largest_rank_bytes(found: list[TableMemory], sharding: ShardingType, *, world_size: int) -> int:
    """Bytes of tables and optimizer state on the rank that holds most.

    Exact for data_parallel and row_wise; for table_wise what a greedy balance by size reaches; for column_wise and
    auto an even share, which the planner may miss.
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
        f"{table.name:{width}} {table.rows:>15,} {table.dim:>5} {_size(table.weight_bytes):>12} "
        f"{_size(table.optimizer_bytes):>16}"
        for table in [*found, total]
    ]
    needed, capacity = largest_rank_bytes(found, sharding, world_size=world_size), capacity_bytes(config)
    estimate = {
        ShardingType.table_wise: " if tables are balanced by size",
        ShardingType.column_wise: " if shared evenly",
        ShardingType.auto: " if shared evenly",
    }.get(sharding, "")
    lines.append(f"largest of {world_size} ranks, sharding {sharding}: {_size(needed)}{estimate}")
    if capacity is not None:
        lines.append(f"a rank has {_size(capacity)} for tables" + _verdict(config, needed, capacity))
    return "\n".join(lines)


def _verdict(config: RunConfig, needed: int, capacity: int) -> str:
    if needed <= capacity:
        return f", {needed / capacity:.1%} of it used"
    # Rows shared evenly, which every plan but data_parallel may approach.
    even = sum(table.total_bytes for table in tables(config))
    ranks = -(-even // capacity)
    return f": TOO LITTLE; all tables together need at least {ranks} ranks, or smaller data.sparse rows"


def _size(size_bytes: int) -> str:
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:,.1f} {unit}"
    return f"{size_bytes / 1024:,.1f} KiB"
