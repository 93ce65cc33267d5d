"""What a node has, as a file of `conf/cluster` to start from: `python -m rechpc.preflight discover=true`.

Reads /sys, /proc and /dev, and asks Slurm and Apptainer where they are at hand; changes nothing. Not run on an Instinct
GPU: the files of the amdgpu and amdkfd drivers are those that Linux documents.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rechpc.errors import ConfigError

GIB = 1 << 30
# By architecture and memory, for MI300X and MI325X are both gfx942: the file of conf/cluster, and its hbm_gib.
_HARDWARE = {
    "gfx90a": {"mi250x": 64},
    "gfx942": {"mi300a": 128, "mi300x": 192, "mi325x": 256},
    "gfx950": {"mi355x": 288},
}
# Kernel drivers of RDMA devices, and what their user-space half is called.
_NETWORKS = {"bnxt_re": "mi300x_roce_broadcom", "mlx5": "mi300x_roce_mellanox", "ionic": "mi300x_roce_ainic"}
_SHARED = ("lustre", "nfs", "nfs4", "gpfs", "beegfs", "wekafs", "ceph", "fuse.sshfs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One device of the kernel's compute driver."""

    arch: str
    memory_bytes: int
    numa_node: int
    render: str  # file in /dev/dri
    readable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Rdma:
    """One RDMA device."""

    name: str
    driver: str
    link_layer: str
    rate: str
    numa_node: int
    active: bool


def discover(root: Path = Path("/")) -> str:
    """The text of a profile, with what was found, and what was not, in comments. Raises ConfigError without any GPU."""
    gpus = list(_gpus(root))
    if not gpus:
        raise ConfigError(
            f"{root / 'sys/class/kfd/kfd/topology/nodes'}: no GPU on {socket.gethostname()}; run this on a compute "
            "node, as srun --gpus-per-node=8 python -m rechpc.preflight discover=true"
        )
    rdma = list(_rdma(root))
    base, notes = _base(gpus), [*_about_gpus(gpus, root), *_about_host(root), *_about_network(rdma, root)]
    lines = [
        "# A profile of this node to start from: read docs/add-your-cluster.md, correct it, put it into conf/cluster.",
        *(f"# {note}" for note in notes),
        "defaults:",
        f"  - {_network(rdma, base)}",
        "  - _self_",
        f"ranks_per_node: {len(gpus)}  # GPUs that were found",
        f"gpu_request: {_gpu_request()}  # what Slurm knows of GPUs here",
        f"gpu_arch: {gpus[0].arch}  # as the driver says",
        f"hbm_gib: {gpus[0].memory_bytes / GIB:.0f}  # as the driver says",
        f"host_memory_gib: {_memory_bytes(root) // GIB}  # MemTotal",
    ]
    if interfaces := _interfaces(root):
        lines += ["env:", f"  NCCL_SOCKET_IFNAME: {','.join(interfaces)}  # up, and neither virtual nor wireless"]
        if names := [r.name for r in rdma if r.active]:
            lines += [f"  NCCL_IB_HCA: ={','.join(names)}  # active; leave out those that are for storage"]
    if binds := _binds(root):
        lines += ["binds:", *(f"  - {bind}" for bind in binds)]
    return "\n".join(lines) + "\n"


def _gpus(root: Path) -> Iterator[Gpu]:
    """In the order in which ROCm numbers them. A node without `simd_count` is a CPU."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    for node in sorted(_entries(nodes), key=lambda path: int(path.name)):
        facts = _pairs(node / "properties")
        if not facts.get("simd_count"):
            continue
        version = facts["gfx_target_version"]  # 90402 is gfx942: two digits each but for the last two, in hexadecimal
        memory = sum(_pairs(bank / "properties").get("size_in_bytes", 0) for bank in _entries(node / "mem_banks"))
        render = f"renderD{facts['drm_render_minor']}"
        yield Gpu(
            arch=f"gfx{version // 10_000}{version // 100 % 100:x}{version % 100:x}",
            memory_bytes=memory,
            numa_node=_number(root / f"sys/class/drm/{render}/device/numa_node"),
            render=render,
            readable=all(os.access(root / "dev" / name, os.R_OK | os.W_OK) for name in ("kfd", f"dri/{render}")),
        )


def _rdma(root: Path) -> Iterator[Rdma]:
    for device in sorted(_entries(root / "sys/class/infiniband"), key=lambda path: _natural(path.name)):
        port = device / "ports/1"
        yield Rdma(
            name=device.name,
            driver=os.path.basename(os.path.realpath(device / "device/driver")),
            link_layer=_text(port / "link_layer"),
            rate=_text(port / "rate"),
            numa_node=_number(device / "device/numa_node"),
            active="ACTIVE" in _text(port / "state"),
        )


def _base(gpus: list[Gpu]) -> str:
    """The file of conf/cluster that is nearest in memory among those of the architecture."""
    known = _HARDWARE.get(gpus[0].arch, {})
    gib = gpus[0].memory_bytes / GIB
    return min(known, key=lambda name: abs(known[name] - gib), default="slurm")


def _network(rdma: list[Rdma], base: str) -> str:
    """The profile with this network, which are those of MI300X: of other GPUs only the hardware is known."""
    if base != "mi300x":
        return f"{base}  # the hardware; env, binds and rank_cpus of a like cluster are in the other files there"
    if any(r.link_layer == "InfiniBand" for r in rdma):
        return "mi300x_infiniband"
    names = [name for r in rdma for word, name in _NETWORKS.items() if word in (r.driver + r.name)]
    return names[0] if names else "mi300x_single_node  # no RDMA device was found"


def _about_gpus(gpus: list[Gpu], root: Path) -> Iterator[str]:
    for (arch, memory, node), count in Counter((g.arch, g.memory_bytes, g.numa_node) for g in gpus).items():
        cpus = _text(root / f"sys/devices/system/node/node{node}/cpulist")
        yield f"{count} GPUs {arch} of {memory / GIB:.0f} GiB on NUMA node {node}" + f", CPUs {cpus}" * bool(cpus)
    if locked := [g.render for g in gpus if not g.readable]:
        yield f"NOT readable and writable for you: /dev/kfd or {', '.join(locked)}; ask for groups video and render"
    if len({(g.arch, g.memory_bytes) for g in gpus}) > 1:
        yield "the GPUs are NOT alike: a run needs nodes with one kind only"


def _about_host(root: Path) -> Iterator[str]:
    model = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    kernel = _text(root / "proc/sys/kernel/osrelease")
    yield f"{socket.gethostname()}, Linux {kernel}, {model[1] if model else 'CPU unknown'}"
    yield f"Apptainer: {_ask('apptainer', '--version') or 'NOT on the PATH; job.setup may load it'}"
    yield f"Slurm: {_ask('sinfo', '--version') or 'NOT on the PATH'}"
    if _text(root / "proc/sys/kernel/numa_balancing") == "1":
        yield "kernel.numa_balancing=1: AMD advises 0 for training"
    shared = sorted({f"{place} ({kind})" for place, kind in _mounts(root) if kind in _SHARED})
    yield f"file systems for runs_root: {', '.join(shared) or 'NONE that nodes share was found'}"


def _about_network(rdma: list[Rdma], root: Path) -> Iterator[str]:
    for r in rdma:
        state = "" if r.active else ", NOT active"
        yield f"RDMA {r.name}: driver {r.driver}, {r.link_layer}, {r.rate}, NUMA node {r.numa_node}{state}"
    if _entries(root / "sys/class/cxi"):
        yield "Slingshot (cxi): take env and binds from lumi.yaml or frontier.yaml"
    elif not rdma:
        yield "no RDMA device: runs of several nodes would use sockets, 12 to 14 times slower"


def _binds(root: Path) -> Iterator[str] | list[str]:
    """What a container needs of the host for its network, where it is here."""
    places = {
        "boot": "RCCL reads the kernel's configuration before it uses DMABUF",
        "etc/libibverbs.d": "which verbs providers there are",
        "usr/lib/x86_64-linux-gnu/libibverbs": "the providers; a container looks for them in the same place on Debian",
        "usr/lib64/libibverbs": "the providers; correct the target to where the image looks for them",
        "opt/cray": "libfabric with its cxi provider",
        "var/spool/slurmd": "what Slurm's libraries read",
    }
    if not _entries(root / "sys/class/infiniband"):
        places = {place: why for place, why in places.items() if place.startswith(("opt", "var"))}
    return [f"/{place}:/{place}:ro  # {why}" for place, why in places.items() if (root / place).is_dir()]


def _interfaces(root: Path) -> list[str]:
    """Network interfaces that are up and belong to a device."""
    found = [e for e in _entries(root / "sys/class/net") if (e / "device").exists() and _text(e / "operstate") == "up"]
    return sorted((e.name for e in found), key=_natural)


def _gpu_request() -> str:
    gres = _ask("sinfo", "--noheader", "--format=%G")
    return "gpus_per_node" if "gpu" in gres or not gres else "none"


def _mounts(root: Path) -> Iterator[tuple[str, str]]:
    for line in _text(root / "proc/mounts").splitlines():
        with contextlib.suppress(ValueError):
            _, place, kind, _ = line.split(maxsplit=3)
            yield place, kind


def _memory_bytes(root: Path) -> int:
    match = re.search(r"^MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _ask(*command: str) -> str:
    """What a command prints; nothing where it is not here or fails."""
    if shutil.which(command[0]) is None:
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    return ""


def _pairs(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.lstrip("-").isdigit() else -1


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _entries(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:
        return []


def _natural(name: str) -> list[tuple[int, str]]:
    """mlx5_10 after mlx5_9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


if __name__ == "__main__":  # the same, without Hydra, for a node that has nothing but Python
    try:
        print(discover(), end="")
    except ConfigError as error:
        raise SystemExit(str(error)) from error
