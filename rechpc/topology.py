"""Where a process stands and what hardware a rank has: the one place that reads torchrun's variables.

Everything that TorchRec would guess (ranks a node, memory, bandwidth) is stated here from the configuration or
read from this machine. Must not know torch.
"""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from rechpc.choices import Device
from rechpc.config import ClusterConfig, RunConfig
from rechpc.errors import LaunchError

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """World size and the hardware of one rank; memory in bytes, bandwidth in bytes per second."""

    num_nodes: int
    local_world_size: int
    device: Device
    hbm_bytes: int
    host_memory_bytes: int
    hbm_bytes_per_s: float
    host_memory_bytes_per_s: float
    intra_node_bytes_per_s: float
    inter_node_bytes_per_s: float
    host_to_gpu_bytes_per_s: float

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.local_world_size


def of(config: RunConfig) -> Topology:
    """The topology that a run asks for; unset host memory is that of this machine, shared by a node's ranks."""
    cluster = config.cluster
    node_bytes = int(cluster.host_memory_gib * GIB) if cluster.host_memory_gib else _host_memory_bytes()
    return Topology(
        num_nodes=config.job.nodes,
        local_world_size=config.ranks_per_node,
        device=cluster.device,
        hbm_bytes=int(cluster.hbm_gib * GIB),
        host_memory_bytes=node_bytes * config.machines // config.world_size,
        hbm_bytes_per_s=cluster.hbm_gb_per_s * 1e9,
        host_memory_bytes_per_s=cluster.host_memory_gb_per_s * 1e9,
        intra_node_bytes_per_s=cluster.intra_node_gb_per_s * 1e9,
        inter_node_bytes_per_s=cluster.inter_node_gb_per_s * 1e9,
        host_to_gpu_bytes_per_s=cluster.host_to_gpu_gb_per_s * 1e9,
    )


def check_gpu(cluster: ClusterConfig, *, arch: str, memory_bytes: int) -> None:
    """Raise LaunchError for a GPU other than the one that was planned for.

    The name of an architecture is not enough: MI300X and MI325X are both gfx942, H100 and H200 both sm_90.
    """
    found = f"this GPU is {arch} with {memory_bytes / GIB:.1f} GiB"
    keys = f"cluster.gpu_arch={arch} cluster.hbm_gib={memory_bytes / GIB:.1f} and the bandwidths in cluster.*_gb_per_s"
    if not cluster.hbm_gib:
        raise LaunchError(f"cluster.hbm_gib=0: {found}; choose one of conf/cluster, or set {keys}")
    # Drivers keep a little for themselves.
    if cluster.gpu_arch not in (None, arch) or abs(memory_bytes / GIB / cluster.hbm_gib - 1) > 0.05:
        raise LaunchError(
            f"cluster.gpu_arch={cluster.gpu_arch} cluster.hbm_gib={cluster.hbm_gib:g}: {found}, and the plan was made "
            f"for another; ask for the right nodes, choose its file of conf/cluster, or set {keys}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnv:
    """What torchrun tells a rank about itself."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> "RankEnv":
        """Read torchrun's variables. Raises LaunchError when one is unset: nothing is guessed."""
        values = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        unset = [name for name, value in values.items() if value is None]
        if unset:
            raise LaunchError(
                f"{', '.join(unset)} unset: a rank is started by torchrun, as in "
                "torchrun --nproc-per-node 2 -m rechpc.train RUN_DIR"
            )
        return cls(**{name.lower(): int(value or 0) for name, value in values.items()})


def bound_cpus(config: RunConfig, local_rank: int) -> set[int]:
    """The CPUs of a rank by `cluster.rank_cpus`; none where the job has not the whole node, or nothing is said."""
    if not config.cluster.rank_cpus or config.ranks_per_node != config.cluster.ranks_per_node:
        return set()
    parts = (part.partition("-") for part in config.cluster.rank_cpus[local_rank].split(","))
    return {cpu for first, _, last in parts for cpu in range(int(first), int(last or first) + 1)}


def bind(config: RunConfig, local_rank: int) -> None:
    """Bind this process, before it has threads. Raises LaunchError for CPUs that the job does not have."""
    cpus = bound_cpus(config, local_rank)
    if missing := sorted(cpus - os.sched_getaffinity(0)):
        raise LaunchError(
            f"cluster.rank_cpus[{local_rank}]={config.cluster.rank_cpus[local_rank]}: CPU "
            f"{', '.join(map(str, missing))} is not among those of this job on {socket.gethostname()}; ask for whole "
            "nodes (job.exclusive=true), correct it, or set cluster.rank_cpus=[]"
        )
    if cpus:
        os.sched_setaffinity(0, cpus)


def num_cpus() -> int:
    """CPUs that this process may use: its affinity mask, cut by the cgroup's quota where there is one."""
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cpus
    return cpus if quota == "max" else max(1, min(cpus, int(quota) // int(period)))


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
