"""One node seen from inside the container, without rendezvous: `python -m rechpc.rank.probe RUN_DIR OUT`.

The host task starts it once a node, as a child: a kernel that FBGEMM lacks ends it with a segmentation fault instead
of an error. The last `phase=` line of its log says where that was. Not run on AMD hardware.
"""

import argparse
import ctypes
import mmap
import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from rechpc.choices import Device
from rechpc.compat import Versions, warning
from rechpc.config import RunConfig
from rechpc.errors import LaunchError
from rechpc.findings import Finding, Level, finding
from rechpc.rules import load
from rechpc.rundir import RunDir, write_json
from rechpc.sight import look
from rechpc.topology import check_gpu

# Names of the targets in the bundles of device code that hipcc writes, and of compressed bundles, which hide them.
_TARGET = re.compile(rb"amdgcn-amd-amdhsa--(gfx[0-9a-f]+)")
_COMPRESSED = b"CCOB"


def main() -> int:
    """Write what is found to OUT; a failed check is no failure of this process."""
    parser = argparse.ArgumentParser(prog="python -m rechpc.rank.probe", description=__doc__)
    parser.add_argument("run_dir", help="run directory")
    parser.add_argument("out", help="file to write")
    arguments = parser.parse_args()
    config = load(RunDir.open(arguments.run_dir).config_path)
    sight = look(config.preflight.devices)
    found = [*_libraries(config.preflight.libraries), _verbs(sight.rdma), _caches()]
    found += _kernels(config)
    write_json(Path(arguments.out), {"sight": sight.as_dict(), "findings": [asdict(f) for f in found]})
    return 0


def phase(name: str) -> None:
    """Say what comes now, in case that it never ends."""
    print(f"phase={name}", flush=True)


def _libraries(names: Iterable[str]) -> Iterator[Finding]:
    for name in names:
        phase(f"loading {name}")
        try:
            ctypes.CDLL(name)
            problem = None
        except OSError as error:
            problem = f"{error}; bind it with container.binds, or correct preflight.libraries"
        yield finding(f"library {name}", problem, good="loads")


def _verbs(adapters: list[str]) -> Finding:
    """Whether the user-space half of every RDMA driver is in the container; if not, RCCL takes sockets."""
    if not adapters:
        return Finding(check="RDMA providers", level=Level.skipped, text="does not apply: no adapter in /sys")
    phase("loading libibverbs.so.1")
    advice = "bind the host's libibverbs and providers (/etc/libibverbs.d, lib*-rdmav*.so) with container.binds"
    try:
        verbs = ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        return Finding(check="RDMA providers", level=Level.failed, text=f"{error}; {advice}")
    count = ctypes.c_int()
    verbs.ibv_get_device_list.restype = ctypes.c_void_p
    verbs.ibv_get_device_list(ctypes.byref(count))
    problem = (
        f"libibverbs drives {count.value} of {len(adapters)} adapters ({', '.join(adapters)}): a provider is missing "
        f"or not of the version of the kernel's; {advice}"
    )
    good = f"libibverbs drives {count.value} adapters"
    return finding("RDMA providers", problem if count.value < len(adapters) else None, good=good)


def _caches() -> Finding:
    """Whether compiled kernels can be kept; without, each rank compiles them again and again, or fails."""
    names = ("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    problem = None
    places = {name: Path(os.environ[name]) for name in names if name in os.environ}
    for name, place in places.items():
        try:
            place.mkdir(parents=True, exist_ok=True)
            (place / ".probe").write_bytes(b"x")
            (place / ".probe").unlink()
        except OSError as error:
            problem = f"{name}={place}: {error.strerror}; set container.env.{name} to a directory of the node"
    return finding("kernel caches", problem, good=f"{len(places)} directories writable")


def _kernels(config: RunConfig) -> Iterator[Finding]:
    """What needs torch: versions, GPUs as torch sees them, FBGEMM's code for them, and its answers."""
    phase("import torch")
    import fbgemm_gpu  # noqa: PLC0415 - what is above must be said where this fails
    import torch  # noqa: PLC0415

    from rechpc.rank import process, tbe  # noqa: PLC0415

    yield _together(process.versions(torch.device("cpu")))  # GPUs are looked at below
    if config.cluster.device is Device.cpu:
        for name in ("GPUs of torch", "code for the GPU"):
            yield Finding(check=name, level=Level.skipped, text="does not apply: cluster.device=cpu")
        phase("TBE on the CPU")
        yield finding("TBE", tbe.difference("cpu", batch=64, features=3, dim=config.model.embedding_dim), good=tbe.GOOD)
        return
    phase("torch counts GPUs")
    count = torch.cuda.device_count()
    problem = (
        f"torch sees {count}, job.ranks_per_node={config.ranks_per_node}; a mask (container.env), no access to "
        "/dev/kfd, or a torch that was built for another vendor"
    )
    yield finding("GPUs of torch", problem if count < config.ranks_per_node else None, good=str(count))
    if count < config.ranks_per_node:
        return
    gpu = torch.cuda.get_device_properties(0)
    arch = gpu.gcnArchName.partition(":")[0] if torch.version.hip else f"sm_{gpu.major}{gpu.minor}"
    try:
        check_gpu(config.cluster, arch=arch, memory_bytes=gpu.total_memory)
        yield Finding(check="planned GPU", level=Level.ok, text=arch)
    except LaunchError as error:
        yield Finding(check="planned GPU", level=Level.failed, text=str(error))
    if torch.version.hip:
        yield code_for(arch, Path(fbgemm_gpu.__file__).parent)
    for index in range(config.ranks_per_node):
        phase(f"small TBE on GPU {index} ({arch})")
        off = tbe.difference(f"cuda:{index}", batch=64, features=3, dim=config.model.embedding_dim)
        yield finding(f"TBE on GPU {index}", off, good=tbe.GOOD)
    phase(f"TBE of the run's size on GPU 0 ({arch})")
    size = tbe.largest(config)
    off = tbe.difference("cuda:0", batch=size.batch, features=size.features, dim=config.model.embedding_dim)
    yield finding("TBE of the run", off, good=f"{tbe.GOOD} at {size}")


def code_for(arch: str, folder: Path) -> Finding:
    """Whether the libraries in `folder` hold device code for an architecture, by the names in their bundles."""
    phase(f"looking for code for {arch} in {folder}")
    found: set[str] = set()
    compressed = False
    for path in folder.rglob("*.so"):
        if path.stat().st_size:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                found |= {match.decode() for match in _TARGET.findall(data)}
                compressed |= data.find(_COMPRESSED) >= 0
    if not found and compressed:
        return Finding(check="code for the GPU", level=Level.warning, text="compressed, so TBE alone tells")
    problem = (
        f"FBGEMM has code for {', '.join(sorted(found)) or 'no AMD GPU'} and this is {arch}: every kernel would "
        "end in a segmentation fault; build the image for it (containers/build.sh)"
    )
    return finding("code for the GPU", None if arch in found else problem, good=", ".join(sorted(found)))


def _together(found: Versions) -> Finding:
    """The versions, and a warning where they do not belong together: it may work all the same."""
    listed = [f"{name} {version}" for name, version in asdict(found).items() if isinstance(version, str)]
    problem, here = warning(found), f"{socket.gethostname()}: {', '.join(listed)}"
    return Finding(
        check="versions",
        level=Level.warning if problem else Level.ok,
        text=f"{here}; {problem}" if problem else here,
    )


if __name__ == "__main__":
    sys.exit(main())
