"""The wheel works where there is no checkout: it carries conf/ and finds it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with nothing in it but the wheel and what it asks for."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)
    (wheel,) = folder.glob("rechpc-*.whl")
    run(sys.executable, "-m", "venv", folder / "venv")
    run(folder / "venv/bin/python", "-m", "pip", "install", "-q", wheel)
    return folder / "venv/bin/python"


def run(*command: str | Path, cwd: Path | None = None) -> str:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_composes_from_another_directory(python: Path, tmp_path: Path) -> None:
    text = run(python, "-m", "rechpc.submit", "model=dlrm_dcnv2", "--cfg", "job", cwd=tmp_path)

    assert "interaction: dcn" in text
    assert list(tmp_path.iterdir()) == []


def test_dry_run_needs_no_torch(python: Path, tmp_path: Path) -> None:
    text = run(python, "-m", "rechpc.submit", "dry_run=true", "cluster=slurm", "job.nodes=2", cwd=tmp_path)

    assert "#SBATCH --nodes=2" in text
    assert "torch" not in run(python, "-m", "pip", "list").lower()


def test_a_sweep_finds_its_plug_in(python: Path, tmp_path: Path) -> None:
    text = run(python, "-m", "rechpc.submit", "-m", "seed=1,2", "dry_run=true", cwd=tmp_path)

    assert "2 of 2 runs to start" in text
    assert list(tmp_path.iterdir()) == []
