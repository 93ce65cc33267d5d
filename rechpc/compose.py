"""From a command line to a validated CommandConfig: the one file that knows Hydra.

Every entry that takes overrides is `compose.run(main, help_text)`. A user's mistake ends with one line a
problem and exit status 2, before anything is on disk.
"""

import itertools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rechpc.config import CommandConfig
from rechpc.errors import ConfigError, RechpcError
from rechpc.rules import explain, unknown_key, validate

_PACKAGE = Path(__file__).resolve().parent
# In a wheel conf/ is package data, in a checkout it stands beside the package.
CONF_PATH = next(p for p in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if p.is_dir())


Sweep = list[tuple[str, CommandConfig | ConfigError]]
"""Runs by what tells them apart, each composed or refused."""


def run(
    main: Callable[[CommandConfig, list[str]], int], help_text: str, *, sweep: Callable[[Sweep], int] | None = None
) -> None:
    """Compose the configuration from sys.argv, call `main` with it and the overrides, and exit with its status.

    With -m, `sweep` gets a configuration for every combination of the values that are separated by commas.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"{help_text.strip()}\n\n{_groups()}")
        sys.exit(0)
    try:
        multirun = {"-m", "--multirun"}
        if multirun & set(sys.argv[1:]) and sweep:
            sys.exit(sweep(_expanded([a for a in sys.argv[1:] if a not in multirun])))
        if multirun & set(sys.argv[1:]):
            raise ConfigError("--multirun: sweeps are not supported yet; submit the runs one by one")
        sys.exit(_hydra_main(main))
    except RechpcError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_status)


def _hydra_main(main: Callable[[CommandConfig, list[str]], int]) -> int:
    # Otherwise Hydra prints several lines and exits with 1 where `run` wants the exception.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    ConfigStore.instance().store(name="schema", node=CommandConfig)
    status = 0
    failure: RechpcError | None = None

    @hydra.main(version_base="1.3", config_path=str(CONF_PATH), config_name="config")
    def composed(raw: DictConfig) -> None:
        nonlocal status, failure
        try:
            status = main(typed(raw), list(HydraConfig.get().overrides.task))
        except RechpcError as error:
            failure = error  # raised below: Hydra would print a line of its own first

    try:
        composed()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain_hydra(error)) from error
    if failure:
        raise failure
    return status


def _expanded(arguments: list[str]) -> Sweep:
    ConfigStore.instance().store(name="schema", node=CommandConfig)
    try:
        with hydra.initialize_config_dir(str(CONF_PATH), version_base="1.3"):
            overrides = OverridesParser.create().parse_overrides(arguments)
            swept = [o for o in overrides if o.is_sweep_override()]
            fixed = [str(o.input_line) for o in overrides if o not in swept]
            choices = [[f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()] for o in swept]
            found: Sweep = []
            for combination in itertools.product(*choices):
                raw = hydra.compose("config", [*fixed, *combination])
                try:
                    found.append((" ".join(combination), typed(raw)))
                except ConfigError as error:
                    found.append((" ".join(combination), error))
            return found
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain_hydra(error)) from error


def typed(raw: DictConfig) -> CommandConfig:
    """The validated configuration that Hydra composed."""
    try:
        # Merged anew because a `+key=` of the command line gets past the schema of `raw`.
        values = OmegaConf.to_container(raw)
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(CommandConfig), values))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(config, CommandConfig)
    # What a resumed run is made of is in its own config.yaml; submit validates that with the overrides on top.
    if config.resume is None:
        validate(config)
    return config


def _explain_hydra(error: Exception) -> str:
    """One line for what Hydra or OmegaConf says about an override."""
    if match := re.search(r"Could not override '([^']+)'", str(error)):
        return unknown_key(match[1])
    if isinstance(error.__cause__, OmegaConfBaseException):
        error = error.__cause__
    text = str(error)
    if match := re.search(r"Could not find '([\w/]+)/([^/']*)'", text):
        group, name = match.groups()
        return f"{group}={name}: no such option; expected one of {', '.join(_options(group))}"
    if isinstance(error, OmegaConfBaseException):
        return explain(error)
    return " ".join(line.strip() for line in text.splitlines() if line.strip() and "full stack trace" not in line)


def _options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF_PATH / group).glob("*.yaml"))


def _groups() -> str:
    """Every configuration group with its options, one line each."""
    groups = sorted(path.name for path in CONF_PATH.iterdir() if path.is_dir())
    lines = "\n".join(f"  {group + '=':12} {' | '.join(_options(group))}" for group in groups)
    return f"Groups (files in conf/), each chosen with GROUP=OPTION:\n{lines}"
