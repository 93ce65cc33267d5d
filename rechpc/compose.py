"""From a command line to a validated CommandConfig; of the package the one file that knows Hydra.

Every entry that takes overrides is `compose.run(main, help_text)`. A user's mistake ends with one line a
problem and exit status 2, before anything is on disk.
"""

import importlib
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rechpc.config import CommandConfig
from rechpc.errors import ConfigError, RechpcError
from rechpc.rules import explain, unknown_key, validate

_PACKAGE = Path(__file__).resolve().parent
# In a wheel conf/ is package data, in a checkout it stands beside the package.
CONF_PATH = next(p for p in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if p.is_dir())


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """One run of a sweep as the sweeper chose it: its overrides, and what they compose to or why they cannot."""

    overrides: list[str]
    config: CommandConfig | ConfigError


class Launch(Protocol):
    """What is done with the combinations of a sweep."""

    status: int  # of the command, after the last batch

    def __call__(self, batch: list[Combination]) -> list[float | None]:
        """The objective of every run of a batch; None where there is none (yet)."""
        ...


Each = list[tuple[str, CommandConfig | ConfigError]]
"""Runs by what tells them apart, each composed or refused."""


def run(
    main: Callable[[CommandConfig, list[str]], int],
    help_text: str,
    *,
    sweep: Callable[[], Launch] | None = None,
    each: Callable[[Each], int] | None = None,
) -> None:
    """Compose the configuration from sys.argv, call `main` with it and the overrides, and exit with its status.

    With -m every batch of combinations goes to what `sweep` makes, whose `status` is the exit status, or all
    combinations of the values that are separated by commas go to `each`.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"{help_text.strip()}\n\n{_groups()}")
        sys.exit(0)
    try:
        multirun = {"-m", "--multirun"}
        if multirun & set(sys.argv[1:]):
            if each is not None:
                sys.exit(each(_expanded([a for a in sys.argv[1:] if a not in multirun])))
            if sweep is None:
                raise ConfigError("--multirun: this command takes one configuration; sweeps go to rechpc.submit")
            launch = sweep()
            _register_plugins()
            for plugin in ("hydra/launcher", "hydra/sweeper"):  # another sweeper may be chosen
                if not any(argument.startswith(f"{plugin}=") for argument in sys.argv):
                    sys.argv.append(f"{plugin}=rechpc")
            _hydra_main(main, launch)
            sys.exit(launch.status)
        sys.exit(_hydra_main(main))
    except RechpcError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_status)


def _register_plugins() -> None:
    # Hydra takes plug-ins from the namespace hydra_plugins alone, and looks for them only once a process.
    sys.path.append(str(_PACKAGE / "plugins"))
    plugins = importlib.import_module("hydra_plugins.rechpc_sweep")
    for plugin in (plugins.RechpcLauncher, plugins.RechpcSweeper):
        Plugins.instance().register(plugin)


def _hydra_main(main: Callable[[CommandConfig, list[str]], int], launch: Launch | None = None) -> int:
    # Otherwise Hydra prints several lines and exits with 1 where `run` wants the exception.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    ConfigStore.instance().store(name="schema", node=CommandConfig)
    status = 0
    failure: RechpcError | None = None

    def composed(raw: DictConfig) -> None:
        nonlocal status, failure
        try:
            overrides = list(HydraConfig.get().overrides.task)
            if job := rehearsed(raw, overrides):
                raw = hydra.compose("config", job)
            status = main(typed(raw), overrides)
        except RechpcError as error:
            failure = error  # raised below: Hydra would print a line of its own first

    composed.launch = launch  # type: ignore[attr-defined] # Hydra gives a plug-in nothing else of ours
    try:
        hydra.main(version_base="1.3", config_path=str(CONF_PATH), config_name="config")(composed)()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain_hydra(error)) from error
    if failure:
        raise failure
    return status


def _expanded(arguments: list[str]) -> Each:
    ConfigStore.instance().store(name="schema", node=CommandConfig)
    try:
        with hydra.initialize_config_dir(str(CONF_PATH), version_base="1.3"):
            overrides = OverridesParser.create().parse_overrides(arguments)
            swept = [o for o in overrides if o.is_sweep_override()]
            fixed = [str(o.input_line) for o in overrides if o not in swept]
            choices = [[f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()] for o in swept]
            found: Each = []
            for combination in itertools.product(*choices):
                raw = hydra.compose("config", [*fixed, *combination])
                if job := rehearsed(raw, [*fixed, *combination]):
                    raw = hydra.compose("config", job)
                try:
                    found.append((" ".join(combination), typed(raw)))
                except ConfigError as error:
                    found.append((" ".join(combination), error))
            return found
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain_hydra(error)) from error


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


def rehearsed(raw: DictConfig, overrides: list[str]) -> list[str] | None:
    """The overrides that compose the job that is rehearsed, on its own cluster; None for what is no rehearsal."""
    of = OmegaConf.select(raw, "cluster.rehearsal.of")
    if of is None or raw.resume is not None:
        return None
    kept = [o for o in overrides if o.partition("=")[0].lstrip("+") not in ("cluster", "cluster.rehearsal.of")]
    return [*kept, f"cluster={of}", f"cluster.rehearsal.of={of}"]


def explain_hydra(error: Exception) -> str:
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
    lines = "\n".join(
        textwrap.fill(
            " | ".join(_options(group)), 120, initial_indent=f"  {group + '=':12} ", subsequent_indent=15 * " "
        )
        for group in groups
    )
    return f"Groups (files in conf/), each chosen with GROUP=OPTION:\n{lines}"
