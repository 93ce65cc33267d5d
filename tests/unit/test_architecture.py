"""Who may know what: each decision has one file. The layers themselves are import-linter's (`make lint`)."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rechpc"

PREPARE = {f"prepare/{name}.py" for name in ("convert", "criteo", "features", "rows", "shards", "sources")}
ONLY = {
    "hydra": {"compose.py", "plugins/hydra_plugins/rechpc_sweep.py"},
    "submitit": {"host/slurm.py"},
    "optuna": {"study.py"},
    "plotly": {"report.py"},
    "torchrec.distributed.planner": {"rank/planning.py"},
    "polars": PREPARE,
    "pyarrow": {"rank/data.py", *PREPARE} - {"prepare/criteo.py"},
}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("module", ONLY)
def test_one_file_knows_a_library(module: str) -> None:
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(name == module or name.startswith(f"{module}.") for name in imports(path))
    }

    assert users == ONLY[module]


def test_files_stay_readable() -> None:
    too_long = {str(p.relative_to(ROOT)) for p in PACKAGE.rglob("*.py") if len(p.read_text().splitlines()) > 450}

    assert not too_long


def test_functions_stay_readable() -> None:
    too_long = {
        f"{path.relative_to(ROOT)}:{node.name}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 60
    }

    assert not too_long


def test_every_file_of_the_package_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    files = {p.name for p in PACKAGE.rglob("*.py")} - {"__init__.py"}

    assert {name for name in files if name not in readme} == set()


def test_every_link_in_the_documentation_leads_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    broken = {
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    }

    assert not broken
