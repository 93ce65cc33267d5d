import os
import shutil
from pathlib import Path

import hydra
import pytest
from hydra.core.config_store import ConfigStore

from rechpc import compose
from rechpc.config import CommandConfig
from rechpc.host import provenance
from rechpc.rules import dump
from rechpc.rundir import RunDir, write_text

STAND_IN = Path(__file__).with_name("stand_in")  # laid over the code of a run: its ranks, and a quick torchrun


@pytest.fixture
def make_config():
    """A configuration from overrides, as the command line would compose it."""

    def make(*overrides):
        ConfigStore.instance().store(name="schema", node=CommandConfig)
        with hydra.initialize_config_dir(str(compose.CONF_PATH), version_base="1.3"):
            return compose.typed(hydra.compose("config", list(overrides)))

    return make


@pytest.fixture
def make_run(make_config, tmp_path):
    """A run directory that is ready to be launched, with stand-ins for torchrun and the ranks."""

    def make(*overrides):
        config = make_config(f"runs_root={tmp_path}/runs", *overrides)
        run = RunDir.create(Path(config.runs_root), config.name)
        provenance.write(run)
        shutil.copytree(STAND_IN, run.code_path, dirs_exist_ok=True)
        write_text(run.config_path, dump(config))
        return run

    return make


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Put commands that stand in for Slurm's on the PATH, in front of the others or alone."""

    def put(*, alone=False, **bodies):
        folder = tmp_path / "bin"
        folder.mkdir()
        for name, body in bodies.items():
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=None if alone else os.pathsep)

    return put
