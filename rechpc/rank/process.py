"""One rank among the others: its device, its process groups, and how ranks come to one decision."""

import contextlib
import datetime
import logging
import os
import sys
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from rechpc.choices import Device
from rechpc.compat import Versions, warning
from rechpc.config import RunConfig
from rechpc.errors import LaunchError
from rechpc.topology import RankEnv, check_gpu

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Process:
    """This rank's device and process groups; `host_group` moves CPU tensors whatever the device is."""

    env: RankEnv
    device: torch.device
    host_group: dist.ProcessGroup

    @property
    def is_main(self) -> bool:
        return self.env.rank == 0

    def agree(self, decision: Any) -> Any:
        """What rank 0 passes, on every rank.

        Collective: every rank.
        """
        box = [decision]
        dist.broadcast_object_list(box, src=0, group=self.host_group)
        return box[0]

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all ranks by rank, on rank 0; None elsewhere.

        Collective: every rank.
        """
        box: list[Any] | None = [None] * self.env.world_size if self.is_main else None
        dist.gather_object(value, box, dst=0, group=self.host_group)
        return box


def versions(device: torch.device) -> Versions:
    """What this process imports and runs on."""

    def version(*names: str) -> str | None:
        for name in names:
            with contextlib.suppress(metadata.PackageNotFoundError):
                return metadata.version(name)
        return None

    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" and torch.version.hip else None
    return Versions(
        torch=torch.__version__,
        fbgemm=version("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-rocm"),
        torchrec=version("torchrec"),
        rocm=torch.version.hip,
        archs=(gpu.gcnArchName.partition(":")[0],) if gpu else (),
    )


def _say_versions(device: torch.device) -> None:
    found = versions(device)
    logger.info("versions=%s", asdict(found))
    if line := warning(found):
        logger.warning(line)


def seed(seed: int, rank: int, *, step: int) -> None:
    """Seed torch's generators of this process; unlike weights and samples, they may depend on the rank."""
    torch.manual_seed(zlib.crc32(f"{seed}/{rank}/{step}".encode()))


@contextlib.contextmanager
def start(config: RunConfig, env: RankEnv) -> Iterator[Process]:
    """Join the process group, with the device of this rank.

    Collective: every rank.
    """
    device = torch.device("cpu")
    if config.cluster.device is Device.cuda:
        if not torch.cuda.is_available():
            raise LaunchError("cluster.device=cuda, but torch sees no GPU in this process; see the node's log")
        # Slurm may give a task one GPU only, which is then number 0 whatever the local rank.
        device = torch.device("cuda", env.local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(device)
        gpu = torch.cuda.get_device_properties(device)
        arch = gpu.gcnArchName.partition(":")[0] if torch.version.hip else f"sm_{gpu.major}{gpu.minor}"
        check_gpu(config.cluster, arch=arch, memory_bytes=gpu.total_memory)
    if env.rank == 0:
        _say_versions(device)
    # TorchRec finds the ranks of a node by this variable, and takes a node of 8 where it is unset; torchrun sets it to
    # the processes of this machine, which in a rehearsal plays all nodes.
    os.environ["LOCAL_WORLD_SIZE"] = str(config.ranks_per_node)
    timeout = datetime.timedelta(seconds=config.trainer.collective_timeout_s)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timeout)
    try:
        # A group of its own: collectives of the reports must not queue behind those of a step.
        yield Process(env=env, device=device, host_group=dist.new_group(backend="gloo", timeout=timeout))
    finally:
        # Not on failure: peers that still wait in a collective would keep this rank waiting too.
        if sys.exc_info()[0] is None:
            dist.destroy_process_group()
