"""From the command of the ranks to the command that starts them in their container; only this file knows Apptainer.

Must not know Slurm, submitit or torch.
"""

import hashlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rechpc import compat
from rechpc.choices import ContainerRuntime
from rechpc.config import ContainerConfig
from rechpc.errors import ConfigError
from rechpc.rundir import read_json

# Signals that reach every process of a job must not end the ranks, which are told through the stop file. They are
# ignored in here and not by the host task, for Apptainer resets what its parent ignored (tried with 1.4.5).
_IGNORE_SIGNALS = ["sh", "-c", 'trap "" USR2 TERM; exec "$@"', "sh"]


def argv(
    container: ContainerConfig, inner: list[str], *, env: dict[str, str], binds: list[str], gpu: bool
) -> list[str]:
    """The command that runs `inner` with `env` set; every step of it execs the next, so it stays one process."""
    # The variables are set by env(1): Apptainer's own --env splits a value at its commas, which lists of network
    # interfaces have, and a variable that the image sets would win over one of the host.
    command = [*_IGNORE_SIGNALS, "env", *(f"{name}={value}" for name, value in sorted(env.items())), *inner]
    if container.runtime is ContainerRuntime.none:
        return command
    assert container.image is not None  # RunConfig.validate
    mounts = [f"--bind={bind}" for bind in [*binds, *container.binds]]
    # The home directory stays mounted, for ROCm and torch keep their kernel caches there; PYTHONNOUSERSITE, set by
    # the host task, keeps the Python packages in it out.
    return ["apptainer", "exec", "--cleanenv", *(["--rocm"] if gpu else []), *mounts, container.image, *command]


def check(container: ContainerConfig) -> None:
    """Raise ConfigError for an image or a bind mount that is not there. For the login node, which shares them."""
    if container.runtime is ContainerRuntime.none:
        return
    assert container.image is not None  # rules.validate
    image = Path(container.image)
    if not os.path.exists(image):  # Path.exists raises where a directory above may not be read
        raise ConfigError(f"container.image={image}: no such file; build one with containers/build.sh")
    if not os.access(image, os.R_OK):
        raise ConfigError(f"container.image={image}: not readable by you; see its permissions")
    for bind in container.binds:
        source = Path(bind.partition(":")[0])
        if not os.path.exists(source):
            raise ConfigError(f"container.binds: {bind}: {source} does not exist; correct it or leave it out")


def check_runtime(container: ContainerConfig, cluster_binds: Sequence[str] = ()) -> None:
    """Raise ConfigError for what is not installed where the ranks run: the runtime, and what the cluster binds."""
    if container.runtime is ContainerRuntime.none:
        return
    if shutil.which("apptainer") is None:
        raise ConfigError(
            "container.runtime=apptainer: apptainer is not on the PATH of this node; job.setup can load it"
        )
    for bind in cluster_binds:
        source = bind.partition(":")[0]
        if not os.path.exists(source):
            raise ConfigError(
                f"cluster.binds: {bind}: {source} does not exist on {socket.gethostname()}; correct it in the file of "
                "conf/cluster, or leave it out there"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """Which image an attempt ran in."""

    path: str
    size_bytes: int
    sha256: str


def facts(image: Path) -> dict[str, Any] | None:
    """What containers/build.sh wrote of an image: base, versions, GPUs that there is code for.

    From `<image>.json` beside it, unless the image is newer, else from inside; None where it was built otherwise.
    """
    if (told := _facts_beside(image)) is not None:
        return told
    argv = ["apptainer", "exec", "--cleanenv", str(image), "cat", "/opt/rechpc/image.json"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
        return dict(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _facts_beside(image: Path) -> dict[str, Any] | None:
    beside = image.with_name(f"{image.name}.json")
    return read_json(beside) if beside.exists() and beside.stat().st_mtime >= image.stat().st_mtime else None


def warning(container: ContainerConfig) -> str | None:
    """One line on versions in the image that do not belong together; None too where nothing beside it tells.

    For the login node, which need not have Apptainer; ranks say it again, of what they import.
    """
    if container.runtime is ContainerRuntime.none or container.image is None:
        return None
    image = Path(container.image)
    told = _facts_beside(image)
    if told is None:
        return None
    found = compat.Versions(
        torch=told["versions"].get("torch"),
        fbgemm=told["fbgemm"],
        torchrec=told["versions"].get("torchrec"),
        rocm=told["rocm"],
        archs=tuple(told["archs"]),
    )
    line = compat.warning(found)
    return f"container.image={image}: {line}" if line else None


def identify(image: Path) -> Image:
    """Size and sha256; the latter from `<image>.sha256`, which containers/build.sh writes, unless the image is newer.

    An image has tens of GB: reading all of it takes a minute or more.
    """
    recorded = image.with_name(f"{image.name}.sha256")
    words = recorded.read_text().split() if recorded.exists() else []
    if words and recorded.stat().st_mtime >= image.stat().st_mtime:
        digest = words[0]
    else:
        with image.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Image(path=str(image), size_bytes=image.stat().st_size, sha256=digest)
