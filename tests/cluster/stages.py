"""What the cluster is made of, built once and cached: file trees, Python packages and the image.

A stage is a function of its inputs, and its name in the cache carries their hash: what did not change is not built
again, checkouts of different versions share a cache, and a build that was killed leaves nothing that looks finished.
Registries are those of this machine: apt's mirror and pip's configuration are read from it.
"""

import ast
import fcntl
import hashlib
import inspect
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import machine
from tests.cluster.machine import Machine

CHECKOUT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("RECHPC_CACHE") or Path.home() / ".cache/rechpc/cluster").resolve()
VENV = "/srv/venv"  # in the cluster; a virtual environment cannot be moved

_HERE = Path(__file__).parent
_CONTAINERS = CHECKOUT / "containers"
_HOST_PACKAGES = (
    "apptainer ca-certificates iproute2 mariadb-server munge procps python3 python3-venv slurm-client slurmctld slurmd "
    "slurmdbd squashfuse tini"
)
_IMAGE_PACKAGES = "ca-certificates libgomp1 python3 python3-venv"
_PIP_STATE, _IMAGE_STATE = CACHE / "machines/rechpc-pip", CACHE / "machines/rechpc-image"
_USER = "hpc"
_KEEP_UNUSED_S = 14 * 24 * 3600.0
_NEED_GIB = 8
_TIMEOUT_S = 1800.0


class BuildError(Exception):
    """A stage could not be built."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The finished stages."""

    host: Path  # root file system of login node and compute nodes
    venv: Path  # their Python: what the launcher needs, no torch
    base: Path  # file tree that the image starts from
    images: Path  # a directory with the image for the ranks, on CPUs


def build() -> Parts:
    """Build what is missing; a second call takes milliseconds. Waits for another build on this machine."""
    with lock("build"):
        host = _stage("host", _key(_HOST_PACKAGES, _HERE / "apt-preferences", _make_host, _debian), _make_host)
        pins = (_CONTAINERS / "pins.txt").read_text()
        launcher = re.findall(r"^(?:hydra-core|omegaconf|submitit)==.*$", pins, re.MULTILINE)
        venv = _stage("venv", _key(host.name, *launcher, _make_venv), lambda path: _make_venv(path, host, launcher))
        base = _stage("base", _key(_IMAGE_PACKAGES, _make_base, _debian), _make_base)
        lists = [_CONTAINERS / "pins.txt", _CONTAINERS / "torchrec.txt"]
        wheels = _stage("wheels", _key(base.name, *lists, _make_wheels), lambda path: _make_wheels(path, base))
        recipe = [_CONTAINERS / name for name in ("rechpc.def", "build.sh", "install.py")]
        project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
        ranges = [*project["dependencies"], str(project["optional-dependencies"])]
        key = _key(base.name, wheels.name, *recipe, *ranges, _make_image)
        images = _stage("image", key, lambda path: _make_image(path, host, base, wheels))
        _remove_unused()
    return Parts(host=host, venv=venv, base=base, images=images)


@contextmanager
def lock(name: str) -> Iterator[None]:
    """One at a time: waits for another process; the kernel releases the lock of one that was killed."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"test cluster: waiting for another process to release {file.name}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(*inputs: str | Path | Callable[..., None]) -> str:
    """The hash of texts, of files, and of the source of functions."""
    digest = hashlib.sha256(platform.machine().encode())
    for item in inputs:
        if isinstance(item, Path):
            text = item.read_text()
        else:
            text = item if isinstance(item, str) else inspect.getsource(item)
        digest.update(f"{text}\0".encode())
    return digest.hexdigest()[:12]


def _stage(name: str, key: str, make: Callable[[Path], None]) -> Path:
    """The directory of a stage, which `make` fills where it is not there yet."""
    done = CACHE / f"{name}-{key}"
    if not done.exists():
        if left_overs := list(CACHE.glob(f"{name}-*.partial")):
            for state in (_PIP_STATE, _IMAGE_STATE):
                machine.stop(Machine(state=state))  # of a build that was killed; it may write there still
            for left_over in left_overs:
                shutil.rmtree(left_over)
        free_gib = shutil.disk_usage(CACHE).free >> 30
        if free_gib < _NEED_GIB:
            raise BuildError(f"{CACHE}: {free_gib} GiB free, expected {_NEED_GIB}; set RECHPC_CACHE to another place")
        print(f"test cluster: building {done.name}", flush=True)
        began = time.monotonic()
        partial = CACHE / f"{done.name}.{os.getpid()}.partial"
        partial.mkdir()
        make(partial)
        partial.rename(done)
        print(f"test cluster: built {done.name} in {time.monotonic() - began:.0f} s", flush=True)
    os.utime(done)
    return done


def _remove_unused() -> None:
    for path in CACHE.glob("*-????????????"):
        if time.time() - path.stat().st_mtime > _KEEP_UNUSED_S:
            shutil.rmtree(path)


def _make_host(path: Path) -> None:
    """Debian 13, whose glibc Debian's Apptainer needs, with Slurm and an ordinary user."""
    preferences = shlex.quote(str(_HERE / "apt-preferences"))
    hooks = [
        f'--setup-hook=mkdir -p "$1/etc/apt/preferences.d" && cp {preferences} "$1/etc/apt/preferences.d/sid"',
        f'--customize-hook=chroot "$1" useradd --create-home --uid 1000 --shell /bin/bash {_USER}',
    ]
    _debian(path, "trixie", _HOST_PACKAGES, sources=("trixie", "sid"), options=hooks)


def _make_base(path: Path) -> None:
    """Debian 12, for its Python 3.11, as a tree that `Bootstrap: localimage` takes."""
    _debian(path, "bookworm", _IMAGE_PACKAGES, sources=("bookworm",))
    # The user who builds the image must be able to read all of it, and to copy devices nobody may.
    for device in (path / "dev").iterdir():
        shutil.rmtree(device) if device.is_dir() and not device.is_symlink() else device.unlink()
    _call("chown", "--recursive", "1000:1000", path)


def _debian(path: Path, suite: str, packages: str, *, sources: tuple[str, ...], options: Iterable[str] = ()) -> None:
    mirror, keyring = debian_mirror(), Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    signed_by = f"[signed-by={keyring}] " if keyring.exists() else ""
    if shutil.which("mmdebstrap") is None:
        _call("apt-get", "install", "--yes", "--no-install-recommends", "mmdebstrap")
    # A mirror of frozen snapshots has expired lists; a proxy has an address.
    wanted = re.compile(r"Acquire::(https?|Check|Retries|ForceIPv)")
    configured = [line for line in _call("apt-config", "dump").splitlines() if wanted.match(line)]
    lines = [f"deb {signed_by}{mirror} {name} main" for name in sources]
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as settings:
        more = ['APT::Install-Recommends "false";', 'Acquire::Languages "none";']
        settings.write("".join(f"{line}\n" for line in [*configured, *more]))
        settings.flush()
        chosen = [f"--aptopt={settings.name}", f"--include={packages.replace(' ', ',')}", *options]
        # It mounts this machine's devices in the tree, and a build that is killed must leave neither them nor it.
        alone = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
        bound = ["setpriv", "--pdeathsig", "KILL", "--", *alone, "--"]
        _call(*bound, "mmdebstrap", "--mode=root", "--variant=minbase", *chosen, suite, path, *lines)


def debian_mirror() -> str:
    """The address of the Debian archive in this machine's apt configuration; raises BuildError where it has none."""
    if address := os.environ.get("RECHPC_DEBIAN_MIRROR"):
        return address
    for attempt in range(2):
        form = "$(REPO_URI) $(ORIGIN) $(LABEL)"
        for line in _call("apt-get", "indextargets", "--format", form, "Created-By: Packages").splitlines():
            address, *names = line.split(" ")
            if names == ["Debian", "Debian"]:
                return address
        if attempt == 0:
            _call("apt-get", "update")
    raise BuildError("apt's configuration has no Debian mirror; set RECHPC_DEBIAN_MIRROR to the address of one")


def _make_venv(path: Path, host: Path, requirements: list[str]) -> None:
    pip = [f"{VENV}/bin/python", "-m", "pip", "install", "--quiet", *requirements]
    _run_pip(host, path, VENV, [["python3", "-m", "venv", VENV], pip])


def _make_wheels(path: Path, base: Path) -> None:
    """What the image installs, built and downloaded by the Python that it will have."""
    pip = ["/tmp/venv/bin/python", "-m", "pip", "wheel", "--quiet", "--use-pep517", "--wheel-dir", "/srv/wheels"]
    commands = [
        ["python3", "-m", "venv", "/tmp/venv"],
        [*pip, "--requirement", "/srv/containers/pins.txt"],
        [*pip, "--no-deps", "--requirement", "/srv/containers/torchrec.txt"],
    ]
    _run_pip(base, path, "/srv/wheels", commands)


def _run_pip(tree: Path, output: Path, target: str, commands: list[list[str]]) -> None:
    """Run commands in `tree` with this machine's network and pip configuration, `output` bound to `target`.

    All of this machine is bound to /host, for the configuration may name directories of it.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as configuration:
        configuration.write(_pip_configuration("/host"))
        configuration.flush()
        binds = [
            *(f"{output}:{target}", f"{configuration.name}:/etc/pip.conf:ro"),
            *("/:/host:ro", f"{_CONTAINERS}:/srv/containers:ro"),
        ]
        here = Machine(state=_PIP_STATE)
        with machine.running(here, tree=tree, binds=binds, has_network=True):
            for argv in commands:
                machine.run(here, argv, user="root", timeout_s=_TIMEOUT_S)


def _pip_configuration(host: str) -> str:
    """This machine's pip configuration as a file, for a place where its root directory is at `host`."""
    settings: dict[str, str] = {"disable-pip-version-check": "1", "no-cache-dir": "1"}
    bundle = Path("/etc/ssl/certs/ca-certificates.crt")
    if bundle.exists():
        settings["cert"] = str(bundle)  # what apt on this machine trusts
    for scope in ("global", ":env:"):  # the later wins
        for line in _call(sys.executable, "-m", "pip", "config", "list").splitlines():
            name, _, value = line.partition("=")
            if name.startswith(f"{scope}."):
                settings[name.removeprefix(f"{scope}.")] = ast.literal_eval(value)

    def move(match: re.Match[str]) -> str:
        local = Path(match[2])
        return f"{match[1] or ''}{host}{local.resolve()}" if local.exists() else match[0]

    moved = {name: re.sub(r"(?<!\S)(file://)?(/\S+)", move, value) for name, value in settings.items()}
    return "[global]\n" + "".join(f"{name} = {' '.join(value.split())}\n" for name, value in moved.items())


def _make_image(path: Path, host: Path, base: Path, wheels: Path) -> None:
    """Build the image as a user of a cluster would: with the project's own script, as an ordinary user."""
    output, temporary = path / "output", path / "tmp"
    for directory in (output, temporary):
        directory.mkdir()
        directory.chmod(0o1777)
    binds = [
        *(f"{CHECKOUT}:/checkout:ro", f"{base}:/srv/base:ro", f"{wheels}:/srv/wheels:ro"),
        *(f"{output}:/srv/output", f"{temporary}:/tmp"),
    ]
    variables = {
        **{"BOOTSTRAP": "localimage", "BASE": "/srv/base", "WHEELS": "/srv/wheels"},
        "APPTAINER_CACHEDIR": "/tmp/cache",  # on the disk
    }
    script = ["/checkout/containers/build.sh", "cpu", "/srv/output/rechpc-cpu.sif"]
    here = Machine(state=_IMAGE_STATE)
    with machine.running(here, tree=host, binds=binds):
        text = machine.run(here, script, user=_USER, env=variables, timeout_s=_TIMEOUT_S)
    print("\n".join(text.splitlines()[-2:]), flush=True)  # size and sha256
    for file in output.iterdir():
        file.rename(path / file.name)
    output.rmdir()
    shutil.rmtree(temporary)


def _call(*argv: str | Path) -> str:
    """The output of a command on this machine; raises BuildError with its last lines."""
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        last = "\n".join(done.stderr.splitlines()[-20:])
        raise BuildError(f"{shlex.join(map(str, argv))}: ended with status {done.returncode}:\n{last}")
    return done.stdout
