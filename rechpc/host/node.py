"""What must hold on one node before ranks start there: judged from what the host task sees, outside the container.

Every judgement is a function of `Sight` and the configuration, so that trees and values of broken nodes can be tested
where there are none. Never imports torch.
"""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from rechpc.choices import Device
from rechpc.config import RunConfig
from rechpc.errors import ConfigError
from rechpc.findings import Finding, Level, finding
from rechpc.host import container
from rechpc.sight import Gpu, Sight
from rechpc.topology import GIB

_MASKS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
# Plans leave a tenth to torch and RCCL, and drivers keep a little for themselves.
_FREE_SHARE = 0.9
# Registered buffers of RCCL's channels; an RDMA adapter cannot use memory beyond the limit.
_MEMLOCK_BYTES = GIB


def check(config: RunConfig, sight: Sight, *, env: Mapping[str, str]) -> list[Finding]:
    """Every finding of this node that needs no torch; `env` is what ranks will get."""
    return [
        _runtime(config),
        *_devices(config, sight),
        *_gpus(config, sight),
        *_network(config, sight),
        _masks(config, env),
        *_space(config, sight),
        _data(config),
        _numa_balancing(config),
    ]


def _runtime(config: RunConfig) -> Finding:
    try:
        container.check_runtime(config.container, config.cluster.binds)
        container.check(config.container)
    except ConfigError as error:
        return Finding(check="container", level=Level.failed, text=str(error))
    return Finding(check="container", level=Level.ok, text=f"container.runtime={config.container.runtime}")


def is_amd(config: RunConfig) -> bool:
    """Whether ranks run on AMD GPUs, which alone have a driver that tells in /sys."""
    return config.cluster.device is Device.cuda and not (config.cluster.gpu_arch or "gfx").startswith("sm_")


def _devices(config: RunConfig, sight: Sight) -> Iterator[Finding]:
    """Device files: those of AMD GPUs, and those of `preflight.devices`."""
    asked = {name: why for name, why in sight.devices.items() if name in config.preflight.devices}
    of_gpus = {name: why for name, why in sight.devices.items() if name not in asked}
    if not is_amd(config):
        yield Finding(check="GPU devices", level=Level.skipped, text=_no_amd(config))
    else:
        unusable = [f"{name}: {why}" for name, why in of_gpus.items() if why]
        if len(of_gpus) == 1 and not unusable:
            unusable = ["/dev/dri/renderD*: no such file"]
        advice = "; the kernel driver (amdgpu) is not loaded, or you lack the groups render and video: tell the site"
        good = f"{', '.join(of_gpus)} readable and writable"
        yield finding("GPU devices", ", ".join(unusable) + advice if unusable else None, good=good)
    if config.preflight.devices:
        unusable = [f"{name}: {why}" for name, why in asked.items() if why]
        advice = "; preflight.devices says that every node has it: tell the site, or correct the key"
        yield finding("devices", ", ".join(unusable) + advice if unusable else None, good=", ".join(asked))


def _no_amd(config: RunConfig) -> str:
    if config.cluster.device is Device.cpu:
        return "does not apply: cluster.device=cpu"
    return f"does not apply: cluster.gpu_arch={config.cluster.gpu_arch} is not AMD's"


def _gpus(config: RunConfig, sight: Sight) -> Iterator[Finding]:
    """How many, which, and whether somebody else sits on them."""
    if not is_amd(config):
        yield Finding(check="GPUs", level=Level.skipped, text=_no_amd(config))
        return
    found, wanted, arch = len(sight.gpus), config.ranks_per_node, config.cluster.gpu_arch
    problem = None
    if found < wanted:
        problem = (
            f"{found} of the {wanted} GPUs that job.ranks_per_node={wanted} needs; the job was given fewer "
            "(cluster.gpu_request), or a GPU has dropped out (dmesg): tell the site"
        )
    yield finding("GPUs", problem, good=f"{found} of at least {wanted}")
    others = sorted({gpu.arch for gpu in sight.gpus} - {arch or gpu.arch for gpu in sight.gpus})
    problem = f"{', '.join(others)}, expected cluster.gpu_arch={arch}; ask for the right nodes (job.constraint)"
    yield finding("architecture", problem if others else None, good=", ".join({gpu.arch for gpu in sight.gpus}))
    taken = [f"GPU {i}: {_taken(gpu)}" for i, gpu in enumerate(sight.gpus) if _is_taken(gpu)]
    problem = ", ".join(taken) + "; end what is yours, and tell the site of what is left of other jobs"
    yield finding("GPU memory", problem if taken else None, good="free")


def _is_taken(gpu: Gpu) -> bool:
    return gpu.used_bytes is not None and gpu.memory_bytes - gpu.used_bytes < _FREE_SHARE * gpu.memory_bytes


def _taken(gpu: Gpu) -> str:
    free = (gpu.memory_bytes - (gpu.used_bytes or 0)) / GIB
    held = f"held by {', '.join(gpu.holders)}" if gpu.holders else "by nobody that the driver names"
    return f"{free:.1f} of {gpu.memory_bytes / GIB:.1f} GiB free, {held}"


def _network(config: RunConfig, sight: Sight) -> Iterator[Finding]:
    """Memory that an RDMA adapter may use."""
    if config.cluster.device is Device.cpu or not sight.rdma:
        why = "cluster.device=cpu" if config.cluster.device is Device.cpu else "/sys/class/infiniband is empty"
        yield Finding(check="memlock", level=Level.skipped, text=f"does not apply: {why}")
        return
    limit = sight.memlock_bytes
    problem = None
    if limit is not None and limit < _MEMLOCK_BYTES:
        problem = (
            f"ulimit -l is {limit // 1024} KiB, expected unlimited: RCCL cannot register memory with "
            f"{', '.join(sight.rdma)}; ask the site for LimitMEMLOCK=infinity in slurmd's unit"
        )
    yield finding("memlock", problem, good="unlimited" if limit is None else f"{limit / GIB:.1f} GiB")


def _masks(config: RunConfig, env: Mapping[str, str]) -> Finding:
    """One filter of GPUs at most: on ROCm the second one counts within what the first has left."""
    masks = {name: env[name] for name in _MASKS if name in env}
    problem = None
    listed = ", ".join(f"{name}={value}" for name, value in masks.items())
    if len(masks) > 1:
        problem = f"{listed}: filters twice, and may leave no GPU; keep one, see container.env"
    for value in masks.values():
        if config.cluster.device is Device.cuda and len(value.split(",")) < config.ranks_per_node:
            problem = problem or (
                f"{listed}: fewer GPUs than job.ranks_per_node={config.ranks_per_node}; unset it, or ask for more"
            )
    return finding("GPU masks", problem, good=listed or "none")


def _space(config: RunConfig, sight: Sight) -> Iterator[Finding]:
    """Disk, shared memory and host memory."""
    asked = config.preflight
    place = Path(tempfile.gettempdir())
    free = shutil.disk_usage(place).free / GIB
    problem = _why_unwritable(place)
    if free < asked.min_free_gib:
        problem = (
            f"{place} has {free:.1f} GiB free, expected preflight.min_free_gib={asked.min_free_gib:g}: kernels are "
            "compiled there; remove what is yours, tell the site, or set the key"
        )
    yield finding("temporary space", problem, good=f"{place}: {free:.1f} GiB free, writable")
    amounts = (
        ("/dev/shm", sight.shm_free_bytes, "min_free_gib", "what is left of other jobs lies there: tell the site"),
        ("host memory", sight.memory_free_bytes, "min_memory_gib", "somebody else uses it: job.exclusive=true"),
    )
    for what, free_bytes, key, advice in amounts:
        wanted = getattr(asked, key)
        problem = f"{free_bytes / GIB:.1f} GiB free, expected preflight.{key}={wanted:g}; {advice}, or set the key"
        good = f"{free_bytes / GIB:.1f} GiB free"
        yield finding(what, problem if free_bytes < wanted * GIB else None, good=good)


def _why_unwritable(place: Path) -> str | None:
    probe = place / f"rechpc-{secrets.token_hex(4)}"
    try:
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        return f"{place}: {error.strerror}; set TMPDIR in job.setup to a directory of the node that you may write to"
    return None


def _data(config: RunConfig) -> Finding:
    path = config.data.path
    if path is None:
        return Finding(check="data", level=Level.skipped, text="does not apply: data.path=null")
    problem = f"data.path={path}: not readable here; is it on a file system that all nodes share?"
    return finding("data", None if os.access(path, os.R_OK) else problem, good=path)


def _numa_balancing(config: RunConfig) -> Finding:
    """AMD's tuning guides have it off: pages that wander stall kernels."""
    path = Path("/proc/sys/kernel/numa_balancing")
    if config.cluster.device is Device.cpu or not path.exists() or path.read_text().strip() == "0":
        return Finding(check="NUMA balancing", level=Level.ok, text="off, or without GPUs of no matter")
    text = "kernel.numa_balancing is on, which slows GPUs down at times; ask the site to set it to 0"
    return Finding(check="NUMA balancing", level=Level.warning, text=text)
