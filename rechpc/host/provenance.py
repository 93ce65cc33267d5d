"""What a run was made of: a snapshot of the code, and a record of versions, place and time.

The ranks import the snapshot, so that editing the checkout cannot change a queued run. Only the variables named
here are recorded: an environment holds secrets.
"""

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import rechpc
from rechpc.config import RunConfig
from rechpc.errors import ConfigError
from rechpc.rundir import RunDir, code_sha256, write_json

_PACKAGE = Path(rechpc.__file__).resolve().parent
_DISTRIBUTIONS = ("hydra-core", "omegaconf", "submitit")
_VARIABLES = ("CONDA_PREFIX", "LANG", "LOADEDMODULES", "ROCM_PATH", "SLURM_CLUSTER_NAME", "TZ", "VIRTUAL_ENV")
_SECRET = re.compile(r"(?i)\b(\w+_)?(token|secret|passw(or)?d|(api_?|access_)?key|credentials?)(_\w+)?(?==|$)")


def check_secrets(config: RunConfig) -> None:
    """Raise ConfigError for what looks like a secret and would be written to `config.yaml` and the batch script."""
    places = [("container.env", name) for name in config.container.env]
    places += [("job.setup", word) for line in config.job.setup for word in line.split() if "=" in word]
    for key, text in places:
        if match := _SECRET.search(text):
            raise ConfigError(
                f"{key}: {match[0]} looks like a secret, and would be written to config.yaml and logs; have the "
                "program read it from a file that only you can read"
            )


def write(run: RunDir) -> None:
    """Write `provenance.json` and copy this package to `code/`."""
    shutil.copytree(_PACKAGE, run.code_path / "rechpc", ignore=shutil.ignore_patterns("__pycache__"))
    write_json(run.provenance_path, _facts())


def versions() -> dict[str, str]:
    """What the launcher is made of."""
    own = {"rechpc": rechpc.__version__, "python": platform.python_version()}
    return own | {name: metadata.version(name) for name in _DISTRIBUTIONS}


def _facts() -> dict[str, Any]:
    return {
        "rechpc": rechpc.__version__,
        "code_sha256": code_sha256(),
        **_git(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "distributions": {name: metadata.version(name) for name in _DISTRIBUTIONS},
        "user": os.environ.get("USER") or str(os.getuid()),
        "host": socket.gethostname(),
        "argv": sys.argv,
        "written_at_s": time.time(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _git() -> dict[str, Any]:
    """Commit of the checkout and whether it was edited since; nothing where this is no checkout, or git is absent."""
    try:
        # An installed package may lie inside the repository of something else, which does not track it.
        _run_git("ls-files", "--error-unmatch", "__init__.py")
        changes = _run_git("status", "--porcelain", "--", ".", "../conf")
        return {"git_commit": _run_git("rev-parse", "HEAD"), "git_dirty": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return {}


def _run_git(*arguments: str) -> str:
    command = ["git", "-C", str(_PACKAGE), *arguments]
    return subprocess.run(command, check=True, timeout=10, capture_output=True, text=True).stdout.strip()
