"""The image: what it brings, and what of the host stays outside."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rechpc.config import ContainerConfig, ContainerRuntime
from rechpc.host import container
from tests.cluster.cluster import BASE, IMAGE, SCRATCH, Cluster

CONTAINERS = Path(__file__).resolve().parents[2] / "containers"
# What a user's shell may hold, each of which breaks a container's Python where it gets in.
HOSTILE = {
    "PYTHONPATH": f"{SCRATCH}/hostile",
    "PYTHONHOME": "/nowhere",
    "PYTHONSTARTUP": "/nowhere",
    "PYTHONUSERBASE": "/home/hpc/.local",
    "VIRTUAL_ENV": "/srv/venv",
    "LD_LIBRARY_PATH": f"{SCRATCH}/hostile",
    "WANDB_API_KEY": "secret",
}

pytestmark = pytest.mark.timeout(900)  # whoever comes first may have to build the image


def pins() -> dict[str, str]:
    lines = [line for name in ("pins.txt", "torchrec.txt") for line in (CONTAINERS / name).read_text().splitlines()]
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def ask(cluster: Cluster, expression: str, *, env: Mapping[str, str] | None = None) -> Any:
    """The value of a Python expression in the image, started the way the host task starts the ranks."""
    config = ContainerConfig(runtime=ContainerRuntime.apptainer, image=IMAGE)
    program = f"import json, os, sys, site; from importlib import metadata; print(json.dumps({expression}))"
    argv = container.argv(config, ["python", "-c", program], env={"PYTHONNOUSERSITE": "1"}, binds=[SCRATCH], gpu=False)
    return json.loads(cluster.check(*argv, env=env, timeout_s=120).splitlines()[-1])


def test_it_brings_the_pinned_versions(cluster: Cluster) -> None:
    found = ask(cluster, f"{{name: metadata.version(name) for name in {list(pins())}}}")

    assert {name: version.partition("+")[0] for name, version in found.items()} == pins()


def test_torch_fbgemm_and_torchrec_import_and_work_together(cluster: Cluster) -> None:
    program = (
        "[__import__(m).__name__ for m in ('torch', 'fbgemm_gpu', 'torchrec')], "
        "__import__('torchrec').KeyedJaggedTensor(keys=['a'], values=__import__('torch').arange(3), "
        "lengths=__import__('torch').tensor([1, 2])).offsets().tolist()"
    )

    assert ask(cluster, f"[{program}]") == [["torch", "fbgemm_gpu", "torchrec"], [0, 1, 3]]


def test_nothing_of_the_hosts_python_gets_in(cluster: Cluster) -> None:
    for directory in ("/home/hpc/.local/lib/python3.11/site-packages", f"{SCRATCH}/hostile"):
        cluster.check("mkdir", "-p", directory)
        cluster.check("sh", "-c", f"echo 'raise SystemExit(9)' | tee {directory}/torch.py {directory}/sitecustomize.py")

    seen = ask(
        cluster,
        "dict(path=sys.path, prefix=sys.prefix, env=dict(os.environ), torch=__import__('torch').__file__)",
        env=HOSTILE,
    )

    assert seen["prefix"] == "/opt/venv"
    assert seen["torch"].startswith("/opt/venv/")
    assert all(entry.startswith(("/opt/venv/", "/usr/lib/")) for entry in seen["path"] if entry)
    assert not [name for name in HOSTILE if seen["env"].get(name) == HOSTILE[name]]


def test_it_runs_as_the_user_with_their_home_and_names(cluster: Cluster) -> None:
    seen = ask(
        cluster,
        "dict(uid=os.getuid(), home=os.path.expanduser('~'), name=__import__('getpass').getuser(), "
        "n2=__import__('socket').gethostbyname('n2'), writable=os.access('/opt/venv', os.W_OK))",
    )

    assert seen == {"uid": 1000, "home": "/home/hpc", "name": "hpc", "n2": "127.0.1.2", "writable": False}


def test_it_says_what_it_is_inside_and_beside_it(cluster: Cluster) -> None:
    inside = json.loads(cluster.check("apptainer", "exec", IMAGE, "cat", "/opt/rechpc/image.json", timeout_s=120))

    assert inside["base"] == BASE
    assert inside["python"].startswith("3.11.")
    assert inside["versions"]["torch"].partition("+")[0] == pins()["torch"]
    assert inside["versions"]["torchrec"] == pins()["torchrec"]
    assert inside["fbgemm"] == pins()["fbgemm-gpu-cpu"]
    assert (inside["rocm"], inside["archs"], inside["fbgemm_archs"]) == (None, [], [])
    assert json.loads(cluster.check("cat", f"{IMAGE}.json")) == inside


def test_its_checksum_lies_beside_it(cluster: Cluster) -> None:
    directory, name = IMAGE.rsplit("/", 1)

    assert f"{name}: OK" in cluster.check("sha256sum", "--check", f"{name}.sha256", cwd=directory)
