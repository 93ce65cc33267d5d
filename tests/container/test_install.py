"""install.py: a base keeps what it brings, above all its torch, and lacks nothing in the end."""

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

CONTAINERS = Path(__file__).resolve().parents[2] / "containers"
PINS = {"torch": "2.13.0", "fbgemm-gpu-cpu": "1.8.0", "hydra-core": "1.3.8", "numpy": "2.4.6", "torchrec": "1.8.0"}
RANGES = {"torch": ">=2.13.0", "torchrec": "==1.8.0", "hydra-core": ">=1.3.8,<1.4", "numpy": ""}


@pytest.fixture(scope="module")
def product() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", CONTAINERS / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_cpu_image_gets_every_pin(product: ModuleType) -> None:
    found = {"setuptools": "66.1.1", "numpy": "2.4.6"}

    lacking = product.lacking(PINS, RANGES, found, arch="cpu", has_fbgemm=False)

    assert lacking == {name: version for name, version in PINS.items() if name != "numpy"}


def test_a_rocm_base_keeps_what_is_good_enough_but_a_torchrec_of_no_version_in_particular(product: ModuleType) -> None:
    found = {"torch": "2.14.0+rocm10.1.0", "numpy": "2.2.6", "hydra-core": "1.3.2", "torchrec": "1.9.0a0"}

    lacking = product.lacking(PINS, RANGES, found, arch="gfx942", has_fbgemm=True)

    assert lacking == {"hydra-core": "1.3.8", "torchrec": "1.8.0"}


def test_the_gpus_that_fbgemm_holds_code_for_are_read_from_its_libraries(
    product: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The libraries are made up; those of a ROCm build name their code objects like this."""
    package = tmp_path / "fbgemm_gpu"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.so").write_bytes(
        b"\x7fELF..hipv4-amdgcn-amd-amdhsa--gfx942\0..hipv4-amdgcn-amd-amdhsa--gfx90a:xnack-\0"
    )
    (package / "b.so").write_bytes(b"\x7fELF..hipv4-amdgcn-amd-amdhsa--gfx942\0")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "fbgemm_gpu", raising=False)
    importlib.invalidate_caches()

    assert product.fbgemm_archs() == ["gfx90a", "gfx942"]


def test_a_rocm_base_without_fbgemm_gets_the_build_for_gpus(product: ModuleType) -> None:
    found = {"torch": "2.13.0+rocm10.0", "numpy": "2.2.6", "hydra-core": "1.3.8"}

    lacking = product.lacking(PINS, RANGES, found, arch="gfx90a", has_fbgemm=False)

    assert lacking == {"fbgemm-gpu": "1.8.0", "torchrec": "1.8.0"}


def test_a_rocm_base_without_torch_is_refused(product: ModuleType) -> None:
    with pytest.raises(SystemExit, match="the base brings no torch"):
        product.lacking(PINS, RANGES, {}, arch="gfx942", has_fbgemm=False)


def test_the_lists_have_ranges_for_what_rechpc_imports(product: ModuleType) -> None:
    pins = product.read_pins(CONTAINERS / "pins.txt") | product.read_pins(CONTAINERS / "torchrec.txt")
    ranges = product.read_ranges(CONTAINERS.parent / "pyproject.toml", pins)

    assert ranges.keys() <= pins.keys()
    assert all(product.good_enough(pins[name], ranges[name]) for name in ranges)


class Base:
    """A Python that brings a torch of its own, and an index of two packages."""

    def __init__(self, path: Path) -> None:
        self.wheels = path / "wheels"
        self.wheels.mkdir()
        subprocess.run([sys.executable, "-m", "venv", path / "venv"], check=True, timeout=120)
        self.python = path / "venv/bin/python"
        (site,) = (path / "venv").glob("lib/python*/site-packages")
        info = site / "torch-2.14.0+rocm10.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.14.0+rocm10.1.0\n")
        self.info = info
        self.script = path / "install.py"
        shutil.copy(CONTAINERS / "install.py", self.script)

    def add_wheel(self, name: str, version: str, *requirements: str) -> None:
        stem = f"{name.replace('-', '_')}-{version}"
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requirements)]
        with zipfile.ZipFile(self.wheels / f"{stem}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(["Metadata-Version: 2.1", *lines, ""]))
            wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{stem}.dist-info/RECORD", "")

    def install(self, **wanted: str) -> "subprocess.CompletedProcess[str]":
        options = ["--no-index", f"--find-links={self.wheels}"]
        program = f"import install; install.install({wanted!r}, {options!r}); print(install.installed())"
        # Not -I, which would leave out the directory of install.py.
        argv = [self.python, "-c", program]
        return subprocess.run(argv, cwd=self.script.parent, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def base(tmp_path: Path) -> Base:
    return Base(tmp_path)


def test_what_is_lacking_is_installed_beside_the_torch_of_the_base(base: Base) -> None:
    base.add_wheel("polars", "2.1.0", "torch>=2")
    base.add_wheel("torchrec", "1.8.0", "fbgemm-gpu")  # which is not there, and not asked for

    done = base.install(polars="2.1.0", torchrec="1.8.0")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "'torch': '2.14.0+rocm10.1.0'" in done.stdout
    assert "'polars': '2.1.0'" in done.stdout
    assert "'torchrec': '1.8.0'" in done.stdout


def test_a_package_that_would_replace_the_torch_of_the_base_ends_the_build(base: Base) -> None:
    base.add_wheel("torch", "2.13.0")
    base.add_wheel("polars", "2.1.0", "torch==2.13.0")

    done = base.install(polars="2.1.0")

    assert done.returncode != 0
    assert "conflicting dependencies" in done.stdout + done.stderr
    assert base.info.exists()
