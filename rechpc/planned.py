"""A plan as a file and for people: what it was made for, and the page that explains it.

`rechpc.rank.planning` makes plans; nothing here needs torch.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from rechpc import memory
from rechpc.choices import DataKind, Device, Kernel, ShardingType
from rechpc.config import RunConfig
from rechpc.dataset import read_index

Plan = dict[str, Any]
"""What plan.json holds: `made_for`, `tables` (type, kernel, shards) and `ranks` (bytes and milliseconds)."""

FORMAT = 2
_MOST_RANKS = 16  # shown one by one


def pooling_factors(config: RunConfig) -> dict[str, float]:
    """Mean ids of every feature in a sample: measured by rechpc.prepare where the data is there, else as configured.

    Raises DataError for a data set that cannot be read.
    """
    data = config.data
    measured = read_index(Path(data.path)).ids_per_sample if data.kind is not DataKind.synthetic and data.path else {}
    return {f.name: max(measured.get(f.name, f.ids_per_sample), 1e-3) for f in data.sparse}


def made_for(config: RunConfig) -> dict[str, Any]:
    """What a plan depends on; a plan made for anything else is not used."""
    cluster, pooling = config.cluster, pooling_factors(config)
    tables = config.data.tables().values()
    return {
        "world_size": config.world_size,
        "local_world_size": config.ranks_per_node,
        "device": str(cluster.device),
        "hardware": {
            name: getattr(cluster, name)
            for name in (f.name for f in dataclasses.fields(cluster))
            if name.endswith(("_gib", "_gb_per_s")) or name == "gpu_arch"
        },
        "global_batch": config.trainer.global_batch,
        "sharding": _plain(config.sharding),
        "optimizers": [str(config.optimizer.sparse), str(config.optimizer.dense)],
        "model": _plain(config.model),
        "dense_features": len(config.data.dense),
        "tables": {
            t.name: [t.rows, str(t.features[0].pooling), *(round(pooling[f.name], 4) for f in t.features)]
            for t in tables
        },
    }


def _plain(section: Any) -> Any:
    """A section of the configuration as JSON would give it back."""
    return json.loads(json.dumps(dataclasses.asdict(section)))


def step_ms(plan: Plan, config: RunConfig) -> dict[str, float]:
    """What a step takes by the planner's estimates, by the slowest rank, if nothing overlaps."""
    flops = 6 * plan["dense_params"] * (config.trainer.global_batch // config.world_size)
    return {
        "HBM bandwidth" if config.cluster.device is Device.cuda else "memory bandwidth": max(
            r["forward_compute_ms"] + r["backward_compute_ms"] for r in plan["ranks"]
        ),
        "all-to-all": max(r["forward_comms_ms"] + r["backward_comms_ms"] for r in plan["ranks"]),
        "dense compute": flops / config.cluster.dense_tflops / 1e9,
    }


def roofline_samples_per_s(plan: Plan, config: RunConfig) -> dict[str, float]:
    """What the hardware allows at most, with all work spread evenly and all bandwidth used.

    A look-up reads a row forward; backward reads and writes it and its optimizer state. A pooled embedding crosses
    to another rank forward, and its gradient comes back.
    """
    c, ranks = config.cluster, config.world_size
    ids, dim = sum(pooling_factors(config).values()), config.model.embedding_dim
    row, state = memory.weight_bytes(config, 1, dim), memory.state_bytes(config, 1, dim)
    bandwidth = c.hbm_gb_per_s if c.device is Device.cuda else c.host_memory_gb_per_s
    pooled = 2 * 4 * dim * len(config.data.sparse)
    links = {"intra-node": (c.intra_node_gb_per_s, config.ranks_per_node - 1)}
    if config.job.nodes > 1:
        links["inter-node"] = (c.inter_node_gb_per_s, ranks - config.ranks_per_node)
    return {
        "memory bandwidth": ranks * bandwidth * 1e9 / (ids * (3 * row + 2 * state)),
        **{
            f"{name} links": ranks * gb_per_s * 1e9 / (pooled * peers / ranks)
            for name, (gb_per_s, peers) in links.items()
            if peers
        },
        "dense compute": ranks * c.dense_tflops * 1e12 / (6 * plan["dense_params"]),
    }


def summary(plan: Plan, config: RunConfig) -> str:
    """One line: does it fit, how fast, what limits."""
    times = step_ms(plan, config)
    total, slowest = sum(times.values()), max(times, key=lambda name: times[name])
    used = max(rank[_device_key(config)] for rank in plan["ranks"]) + plan["dense_bytes"]
    share = used / (plan["table_bytes_per_rank"] + plan["dense_bytes"])
    return (
        f"{config.job.nodes:>4} nodes {config.world_size:>5} ranks  fits, fullest at {share:4.0%} of its budget  "
        f"step {total:8.2f} ms  {config.trainer.global_batch / total / 1e3:8.2f} M samples/s estimated, "
        f"limited by {slowest}"
    )


def render(plan: Plan, config: RunConfig) -> str:
    """The page for people: the verdict, the ranks, the step, the tables."""
    cluster = config.cluster
    hardware = f"{cluster.gpu_arch or 'GPU'} with {cluster.hbm_gib:g} GiB" if cluster.device is Device.cuda else "CPU"
    times, ceiling = step_ms(plan, config), roofline_samples_per_s(plan, config)
    sizes = {t.name: t.total_bytes for t in memory.tables(config)}
    saved = sum(sizes.values()) + 4 * plan["dense_params"] * (1 + memory.dense_state_floats(config))
    save_s = saved / config.job.nodes / cluster.storage_gb_per_s / 1e9
    limit = min(ceiling, key=lambda name: ceiling[name])
    lines = [
        summary(plan, config).strip(),
        f"plan of {len(plan['tables'])} tables for {config.job.nodes} x {config.ranks_per_node} {hardware}, sharding "
        f"{config.sharding.type}, global batch {config.trainer.global_batch:,}",
        *_rank_lines(plan, config),
        "",
        "a step, if nothing overlaps: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items()),
        "roofline: " + ", ".join(f"{name} {value / 1e6:.1f}" for name, value in ceiling.items())
        + f" M samples/s; {limit} is the lowest",
        f"checkpoint {memory.size(saved)}, about {save_s:.0f} s to save at {cluster.storage_gb_per_s:g} GB/s a node",
    ]  # fmt: skip
    kernels = {table["kernel"] for table in plan["tables"].values()}
    if kernels & {Kernel.fused_uvm, Kernel.fused_uvm_caching}:
        lines.append(
            "note: tables in host memory (UVM) are experimental on ROCm: FBGEMM tests them on NVIDIA GPUs only, and "
            "every miss of the cache crosses the link to the host"
        )
    asked = {name: config.sharding.of(name).types for name in plan["tables"]}
    whole = [n for n, t in plan["tables"].items() if t["type"] not in asked[n] and ShardingType.auto not in asked[n]]
    if whole:
        lines.append(
            f"note: {len(whole)} tables are table_wise, for some rank would get no row, or TorchRec would not pool "
            f"them by mean: {', '.join(whole[:9])}"
        )
    lines += ["", f"{'table':24} {'rows':>13} {'dim':>4} {'bytes':>10}  {'sharding':14} {'kernel':17} ranks"]
    for name, table in plan["tables"].items():
        ranks = [s["rank"] for s in table["shards"]] or ["all"]
        lines.append(
            f"{name:24} {table['rows']:>13,} {table['dim']:>4} {memory.size(sizes[name]):>10}  {table['type']:14} "
            f"{table['kernel']:17} {_ranges(ranks)}"
        )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _device_key(config: RunConfig) -> str:
    """Where the plan says what a rank takes of the memory of its device."""
    return "hbm_bytes" if config.cluster.device is Device.cuda else "host_bytes"


def _rank_lines(plan: Plan, config: RunConfig) -> list[str]:
    """Memory and time of every rank, or of the extremes and the mean where there are many."""
    ranks, key = plan["ranks"], _device_key(config)
    capacity = plan["table_bytes_per_rank"] + plan["dense_bytes"]
    reserve = int(config.cluster.hbm_gib * (1 << 30)) - capacity if config.cluster.device is Device.cuda else 0
    mean = {k: sum(r[k] for r in ranks) / len(ranks) for k in ranks[0]}
    rows = {str(i): r for i, r in enumerate(ranks)}
    if len(ranks) > _MOST_RANKS:
        order = sorted(range(len(ranks)), key=lambda i: -ranks[i][key])
        rows = {str(i): ranks[i] for i in (*order[:3], order[-1])}
    lines = ["", f"{'rank':>5} {'weights':>10} {'optimizer':>10} {'buffers':>10} {'dense':>10} {'reserve':>10} "
             f"{'of memory':>9}  {'forward':>9} {'backward':>9} {'comms':>9}"]  # fmt: skip
    for name, r in {**rows, "mean": mean}.items():
        buffers = max(0, r["hbm_bytes"] + r["host_bytes"] - r["weight_bytes"] - r["optimizer_bytes"])
        columns = (r["weight_bytes"], r["optimizer_bytes"], buffers, plan["dense_bytes"], reserve)
        share = (r[key] + plan["dense_bytes"] + reserve) / (capacity + reserve)
        lines.append(
            f"{name:>5} {' '.join(f'{memory.size(int(c)):>10}' for c in columns)} {share:>9.1%} "
            f"{r['forward_compute_ms']:>7.2f}ms {r['backward_compute_ms']:>7.2f}ms "
            f"{r['forward_comms_ms'] + r['backward_comms_ms']:>7.2f}ms"
        )
    times = [sum(v for k, v in r.items() if k.endswith("_ms")) for r in ranks]
    used = [r[key] for r in ranks]
    balance = [max(v) * len(v) / sum(v) if sum(v) else 1.0 for v in (times, used)]
    return [*lines, f"imbalance, maximum over mean: time {balance[0]:.2f}, memory {balance[1]:.2f}"]


def _ranges(ranks: list[Any]) -> str:
    """0,1,2,3,8 as 0-3,8."""
    parts: list[list[Any]] = []
    for rank in ranks:
        if parts and rank != "all" and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
