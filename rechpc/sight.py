"""What a process sees of its node: GPUs, device files, network adapters, memory, limits.

Looked at twice, by the host task and inside the container, and compared. Everything comes from /sys, /proc and /dev,
as tools of ROCm are missing or different on half of the nodes; `root` is another tree in tests. Standard library only.
"""

import contextlib
import grp
import os
import re
import resource
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_KFD = "sys/class/kfd/kfd"


@dataclass(kw_only=True, slots=True)
class Gpu:
    """An AMD GPU as its kernel driver shows it; of one that belongs to another job it shows nothing."""

    arch: str
    memory_bytes: int
    used_bytes: int | None  # None where the driver does not say
    holders: list[str]  # process ids that hold memory of it, with their names


@dataclass(kw_only=True, slots=True)
class Sight:
    """One look at a node."""

    gpus: list[Gpu] = field(default_factory=list)
    devices: dict[str, str] = field(default_factory=dict)  # device file: "", or why it cannot be used
    rdma: list[str] = field(default_factory=list)
    shm_free_bytes: int = 0
    memory_free_bytes: int = 0
    memlock_bytes: int | None = None  # None: no limit

    @classmethod
    def of(cls, facts: dict[str, Any]) -> "Sight":
        """From `asdict`, through JSON."""
        return cls(**{**facts, "gpus": [Gpu(**gpu) for gpu in facts["gpus"]]})

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def look(devices: list[str], *, root: Path = Path("/")) -> Sight:
    """Look at this node; `devices` are files to look at beside those of AMD GPUs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    meminfo = _read(root / "proc/meminfo")
    available = re.search(r"MemAvailable:\s+(\d+) kB", meminfo)
    render = [f"/dev/dri/{path.name}" for path in sorted((root / "dev/dri").glob("renderD*"))]
    shm = os.statvfs(root / "dev/shm") if (root / "dev/shm").is_dir() else None
    return Sight(
        gpus=_gpus(root),
        devices={name: _why_unusable(root / name.lstrip("/")) for name in ("/dev/kfd", *render, *devices)},
        rdma=sorted(path.name for path in _entries(root / "sys/class/infiniband")),
        shm_free_bytes=shm.f_bavail * shm.f_frsize if shm else 0,
        memory_free_bytes=int(available[1]) * 1024 if available else 0,
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
    )


def _gpus(root: Path) -> list[Gpu]:
    found = []
    for node in sorted(_entries(root / _KFD / "topology/nodes"), key=lambda path: int(path.name)):
        properties = dict(re.findall(r"^(\w+) (\d+)$", _read(node / "properties"), re.MULTILINE))
        if not int(properties.get("simd_count", 0)):  # a CPU, or a GPU that this job may not see
            continue
        minor, version = properties.get("drm_render_minor", "0"), int(properties["gfx_target_version"])
        device = root / f"sys/class/drm/renderD{minor}/device"
        used = _read(device / "mem_info_vram_used").strip()
        found.append(
            Gpu(
                # 90402 is gfx942; the last digit is hexadecimal, as in gfx90a.
                arch=f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}",
                memory_bytes=int(_read(device / "mem_info_vram_total").strip() or 0),
                used_bytes=int(used) if used else None,
                holders=_holders(root, _read(node / "gpu_id").strip()),
            )
        )
    return found


def _holders(root: Path, gpu_id: str) -> list[str]:
    found = []
    for process in _entries(root / _KFD / "proc"):
        if int(_read(process / f"vram_{gpu_id}").strip() or 0):
            name = _read(root / "proc" / process.name / "comm").strip() or "of another container or user"
            found.append(f"{process.name} ({name})")
    return sorted(found)


def _why_unusable(path: Path) -> str:
    """Why this process cannot read and write a device file; nothing where it can."""
    try:
        owner = path.stat()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    if os.access(path, os.R_OK | os.W_OK):
        return ""
    groups = ", ".join(_group(gid) for gid in sorted({os.getegid(), *os.getgroups()}))
    return f"not readable and writable: it is of group {_group(owner.st_gid)}, you are in {groups}"


def _group(gid: int) -> str:
    with contextlib.suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return str(gid)


def _entries(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    """The text of a file of the kernel; nothing where it is absent or, as for GPUs of other jobs, forbidden."""
    try:
        return path.read_text()
    except OSError:
        return ""
