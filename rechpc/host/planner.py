"""Plans for the login node: made by a child process that has torch, here or in the image, and kept.

A plan is kept in ~/.cache/rechpc under a hash of everything that it depends on: a home is shared by the login nodes
and outlives `runs_root`. Never imports torch.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rechpc.choices import ContainerRuntime
from rechpc.config import RunConfig
from rechpc.errors import ConfigError, LaunchError
from rechpc.host import container
from rechpc.planned import made_for
from rechpc.rules import dump
from rechpc.rundir import read_json, write_json

Answer = dict[str, Any]
"""{"plan": the plan}, or {"error": one line, "advice": [changes that the planner tried and that fit]}."""

_CODE = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 900.0


def _torch_here() -> bool:
    return all(importlib.util.find_spec(name) for name in ("torch", "torchrec", "fbgemm_gpu"))


def has_torch(config: RunConfig) -> bool:
    """Whether plans can be made on this machine: with this Python, or in the run's image."""
    image = config.container.runtime is ContainerRuntime.apptainer and shutil.which("apptainer") is not None
    return _torch_here() or image


def answers(configs: Sequence[RunConfig]) -> list[Answer]:
    """The planner's answer to every run, from the cache where it has been asked before.

    Raises ConfigError where there is no torch, and LaunchError when the child fails.
    """
    cache = Path.home() / ".cache/rechpc/plans"
    keys = [_key(config) for config in configs]
    found = {key: answer for key in keys if (answer := read_json(cache / f"{key}.json"))}
    asked = {key: config for key, config in zip(keys, configs, strict=True) if key not in found}
    if asked:
        for key, answer in _ask(asked).items():
            found[key] = answer
            with contextlib.suppress(OSError):  # a home that cannot be written to costs time only
                cache.mkdir(parents=True, exist_ok=True)
                write_json(cache / f"{key}.json", answer)
    return [found[key] for key in keys]


def _key(config: RunConfig) -> str:
    """A hash of what an answer depends on: the inputs, the code of the planner, and the torch that runs it."""
    image = Path(config.container.image) if config.container.image else None
    code = [(_CODE / "rechpc" / name).read_text() for name in ("rank/planning.py", "memory.py", "planned.py")]
    torch = [sys.executable, str(image), image.stat().st_mtime if image and image.exists() else 0]
    text = json.dumps([made_for(config), config.job.nodes, code, torch], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _ask(asked: dict[str, RunConfig]) -> dict[str, Answer]:
    first = next(iter(asked.values()))
    if not has_torch(first):
        raise ConfigError(
            "rechpc.plan needs torch, torchrec and fbgemm_gpu: run it with a Python that has them, or give "
            "container=apptainer container.image=IMAGE.sif on a machine with apptainer"
        )
    where = "this Python" if _torch_here() else str(first.container.image)
    print(f"planning {len(asked)} run(s) with the torch of {where} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="rechpc-plan-") as directory:
        for key, config in asked.items():
            (Path(directory) / f"{key}.yaml").write_text(dump(_absolute(config)))
        try:
            done = subprocess.run(
                _command(first, directory), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise LaunchError(f"the planner took longer than {_TIMEOUT_S:g} s; plan fewer runs at once") from error
        found = {key: answer for key in asked if (answer := read_json(Path(directory) / f"{key}.json"))}
    if done.returncode or len(found) < len(asked):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise LaunchError(f"the planner failed with exit status {done.returncode}: {last}")
    return found


def _command(config: RunConfig, directory: str) -> list[str]:
    module = ["-m", "rechpc.rank.planning", directory]
    env = {"PYTHONPATH": str(_CODE), "PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1"}
    if _torch_here():
        return ["env", *(f"{name}={value}" for name, value in env.items()), sys.executable, *module]
    binds = [str(_CODE), directory, *([str(Path(config.data.path).absolute())] if config.data.path else [])]
    return container.argv(config.container, ["python", *module], env=env, binds=binds, gpu=False)


def _absolute(config: RunConfig) -> RunConfig:
    """The same data set from the child's directory."""
    data = config.data
    return dataclasses.replace(
        config, data=dataclasses.replace(data, path=data.path and str(Path(data.path).expanduser().absolute()))
    )
