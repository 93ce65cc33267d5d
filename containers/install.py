"""Bring an image to the pinned versions; `rechpc.def` runs it with the Python of the image's base.

    python install.py install ARCH [pip's options]     what the base lacks, and never its torch
    python install.py check ARCH                       ends with status 1 where something is wrong
    python install.py record ARCH BASE                 writes image.json: versions, and GPUs that there is code for

ARCH is cpu, or the GPUs that torch and FBGEMM must bring code for, as gfx942,gfx950. The pins and `pyproject.toml`,
whose ranges say which versions of a base are good enough, lie beside this file. Standard library and pip only.
"""

import importlib
import importlib.util
import json
import mmap
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

# The base need not have `packaging` itself; seen in pip 23.0 to 26.
from pip._vendor.packaging.specifiers import SpecifierSet
from pip._vendor.packaging.version import InvalidVersion, Version

HERE = Path(__file__).parent
CPU = "cpu"
TORCH, TORCHREC = "torch", "torchrec"
FBGEMM_CPU, FBGEMM_GPU = "fbgemm-gpu-cpu", "fbgemm-gpu"


def main() -> None:
    """The two commands of the docstring above."""
    action, arch, options = sys.argv[1], sys.argv[2], sys.argv[3:]
    if action == "record":
        text = json.dumps(facts(arch, base=options[0]), indent=2)
        (HERE / "image.json").write_text(text + "\n")
        print(text)
        return
    pins = {**read_pins(HERE / "pins.txt"), **read_pins(HERE / "torchrec.txt")}
    ranges = read_ranges(HERE / "pyproject.toml", pins)
    if action == "install":
        has_fbgemm = importlib.util.find_spec("fbgemm_gpu") is not None
        install(lacking(pins, ranges, installed(), arch=arch, has_fbgemm=has_fbgemm), options)
    problems = check(pins, ranges, installed(), arch=arch)
    sys.exit("\n".join(f"install.py: {problem}" for problem in problems) or None)


def canonical(name: str) -> str:
    """A distribution's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(path: Path) -> dict[str, str]:
    """Name to version of a list of `name==version`."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonical(name): version for name, version in pairs}


def read_ranges(path: Path, pins: Mapping[str, str]) -> dict[str, str]:
    """Name to range: what rechpc asks for, a torch no older than the tested one, and the one TorchRec of the list.

    A base may bring any TorchRec: it is installed there without a version (AMD-AGI/Primus, docker-release).
    """
    project = tomllib.loads(path.read_text())["project"]
    extras = project["optional-dependencies"]
    ranges = {TORCH: f">={pins[TORCH]}", TORCHREC: f"=={pins[TORCHREC]}"}
    for requirement in [*project["dependencies"], *extras["train"], *extras["prepare"]]:
        name, specifiers = re.fullmatch(r"([\w.-]+)(.*)", requirement).groups()
        ranges[canonical(name)] = specifiers
    return ranges


def installed() -> dict[str, str]:
    """Name to version of everything that this Python can import."""
    return {canonical(found.name): found.version for found in metadata.distributions() if found.name}


def good_enough(version: str | None, specifiers: str) -> bool:
    """Whether a version is there and in the range; a build from source may call itself a pre-release."""
    try:
        return version is not None and SpecifierSet(specifiers).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def lacking(
    pins: Mapping[str, str], ranges: Mapping[str, str], found: Mapping[str, str], *, arch: str, has_fbgemm: bool
) -> dict[str, str]:
    """The pins that are not there in a good enough version; raises SystemExit where a GPU's base brings no torch."""
    if arch == CPU:
        return {name: version for name, version in pins.items() if not good_enough(found.get(name), f"=={version}")}
    if TORCH not in found:
        sys.exit(f"install.py: the base brings no torch for {sys.executable}; choose one that does, built for {arch}")
    wanted = {}
    for name, version in pins.items():
        if name == FBGEMM_CPU:
            if not has_fbgemm:  # a build from source has names of its own
                wanted[FBGEMM_GPU] = version
        elif name != TORCH and not good_enough(found.get(name), ranges.get(name, "")):
            wanted[name] = version
    return wanted


def install(wanted: Mapping[str, str], options: list[str]) -> None:
    """Install `wanted`; pip fails where that would change anything else, and torch is looked at again."""
    before = installed()
    # An old pip builds the one source distribution, antlr4-python3-runtime, with a `wheel` that a base need not have.
    pip = [sys.executable, "-m", "pip", "install", "--use-pep517", "--no-cache-dir", *options]
    lines = {name: f"{name}=={version}" for name, version in wanted.items()}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as kept:
        kept.writelines(f"{name}=={v}\n" for name, v in before.items() if name not in wanted and good_enough(v, ""))
        kept.flush()
        others = [line for name, line in lines.items() if name != TORCHREC]
        if others:
            subprocess.run([*pip, "--constraint", kept.name, *others], check=True)
    if TORCHREC in lines:  # without its dependencies: see torchrec.txt
        subprocess.run([*pip, "--no-deps", lines[TORCHREC]], check=True)
    after = installed()
    if before.get(TORCH) not in (None, after[TORCH]):
        sys.exit(f"install.py: torch {before[TORCH]} of the base became {after[TORCH]}; nothing may replace it")


def check(pins: Mapping[str, str], ranges: Mapping[str, str], found: Mapping[str, str], *, arch: str) -> list[str]:
    """What is wrong with this Python, a line each; prints the versions."""
    problems = []
    for name, pin in pins.items():
        version, accepted = found.get(name), f"=={pin}" if arch == CPU else ranges.get(name, "")
        if name == FBGEMM_CPU and arch != CPU:
            continue  # it has another name there, and is imported below
        print(f"{name:20} {version or 'missing':24} {'' if version == pin else f'pinned: {pin}'}")
        if not good_enough(version, accepted):
            problems.append(f"{name}: {version or 'missing'}, expected {accepted or 'any version'}")
    try:
        problems += check_imports(arch)
    except Exception as error:  # whatever a broken binary raises is what the reader of a failed build needs
        problems.append(f"import torch, fbgemm_gpu, torchrec: {type(error).__name__}: {error}")
    return problems


def facts(arch: str, *, base: str) -> dict[str, object]:
    """What this image is, for those who choose it and for checks before a run; imports torch."""
    torch = importlib.import_module("torch")
    fbgemm = [name for name in installed() if name.startswith("fbgemm")]
    names = [TORCH, *fbgemm, TORCHREC, "numpy", "pyarrow", "tensordict"]
    return {
        "base": base,
        "archs": [] if arch == CPU else arch.split(","),
        "python": sys.version.split()[0],
        "versions": {name: installed()[name] for name in names if name in installed()},
        "fbgemm": installed()[fbgemm[0]] if fbgemm else None,
        "rocm": torch.version.hip,
        "torch_archs": [flag for flag in torch._C._cuda_getArchFlags().split() if torch.version.hip]
        if arch != CPU
        else [],
        "fbgemm_archs": fbgemm_archs(),
    }


def fbgemm_archs() -> list[str]:
    """The GPUs that FBGEMM's libraries hold code for; none on a CPU, or where the code is compressed.

    A wheel may hold less than its table says (1.5.0+rocm7.1 had gfx942 only), and a kernel that is not there is a
    segmentation fault.
    """
    spec = importlib.util.find_spec("fbgemm_gpu")
    folders = spec.submodule_search_locations if spec else None
    found: set[bytes] = set()
    for library in [path for folder in folders or [] for path in Path(folder).rglob("*.so")]:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as code:
            found.update(re.findall(rb"amdgcn-amd-amdhsa--(gfx[0-9a-f]+)", code))
    return sorted(name.decode() for name in found)


def check_imports(arch: str) -> list[str]:
    """Import the three that must have been built for each other, and let them do one thing together."""
    torch = importlib.import_module("torch")
    importlib.import_module("fbgemm_gpu")
    torchrec = importlib.import_module("torchrec")
    bags = torchrec.KeyedJaggedTensor(keys=["a"], values=torch.arange(3), lengths=torch.tensor([1, 2]))
    assert bags.offsets().tolist() == [0, 1, 3]  # computed by fbgemm
    variant = torch.version.hip or torch.version.cuda
    if arch == CPU:
        return [f"torch {torch.__version__} is for GPUs; give pip an index of CPU wheels"] if variant else []
    if torch.version.hip is None:
        return [f"torch {torch.__version__} was not built for ROCm"]
    held = {f"torch {torch.__version__}": set(torch._C._cuda_getArchFlags().split())}
    if archs := fbgemm_archs():
        held["fbgemm_gpu"] = set(archs)
    missing = {name: sorted(set(arch.split(",")) - archs) for name, archs in held.items()}
    return [f"{name} brings no code for {', '.join(archs)}" for name, archs in missing.items() if archs]


if __name__ == "__main__":
    main()
