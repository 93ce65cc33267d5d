"""Hydra's launcher and sweeper of rechpc, where Hydra looks for plug-ins: what `-m` does with its combinations.

They decide what runs there are. What is done with them is the `Launch` that `rechpc.compose` was given.
"""

from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext
from omegaconf import DictConfig, flag_override
from omegaconf.errors import OmegaConfBaseException

from rechpc.compose import Combination, explain_hydra, rehearsed, typed
from rechpc.errors import ConfigError, LaunchError
from rechpc.study import Interval, Study, is_minimized


class RechpcLauncher(Launcher):
    """Hands all combinations of a batch over together, with those that cannot be composed."""

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        self._loader, self._config, self._launch = hydra_context.config_loader, config, task_function.launch

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:  # noqa: ARG002
        values = self._launch([self._combination(list(overrides)) for overrides in job_overrides])
        waited = self._config.sweep.wait and not self._config.dry_run
        returns = [JobReturn(overrides=o, status=JobStatus.COMPLETED) for o in job_overrides]
        for returned, value in zip(returns, values, strict=True):
            returned.return_value = value
            if value is None and waited:
                returned.status = JobStatus.FAILED
                returned.return_value = LaunchError(f"{' '.join(returned.overrides or [])}: has not finished")
        return returns

    def _combination(self, overrides: list[str]) -> Combination:
        try:
            raw = self._loader.load_sweep_config(self._config, overrides)
            if job := rehearsed(raw, overrides):
                raw = self._loader.load_sweep_config(self._config, job)
            with flag_override(raw, ["struct", "readonly"], False):
                del raw["hydra"]
            return Combination(overrides=overrides, config=typed(raw))
        except (HydraException, OmegaConfBaseException) as error:
            return Combination(overrides=overrides, config=ConfigError(explain_hydra(error)))
        except ConfigError as error:
            return Combination(overrides=overrides, config=error)


class RechpcSweeper(Sweeper):
    """All combinations in one batch, or the trials of a study, batch after batch; writes nothing itself."""

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        self._loader: ConfigLoader = hydra_context.config_loader
        self._config: Any = config
        self._launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> None:
        overrides = OverridesParser.create(config_loader=self._loader).parse_overrides(arguments)
        if self._config.sweep.trials is not None:
            self._study(overrides, self._config.sweep.trials)
            return
        for override in overrides:
            if override.is_interval_sweep():
                raise ConfigError(f"{override.input_line}: an interval has no end of values; set sweep.trials=N")
        [batch] = BasicSweeper.split_arguments(overrides, None)
        self._launcher.launch(batch, initial_job_idx=0)

    def _study(self, overrides: list[Override], trials: int) -> None:
        """Batches that each depend on what the ones before have reached."""
        fixed = [str(o.input_line) for o in overrides if not o.is_sweep_override()]
        space = {o.get_key_element(): _domain(o) for o in overrides if o.is_sweep_override()}
        if not space:
            raise ConfigError(f"sweep.trials={trials}: nothing to choose; give a key several values, or interval(A,B)")
        study = Study(space, minimize=is_minimized(self._config.sweep.objective))
        size = self._config.sweep.max_parallel or 1
        for first in range(0, trials, size):
            asked = study.ask(min(size, trials - first))
            batch = [[*fixed, *(f"{key}={value}" for key, value in values.items())] for values in asked]
            done = self._launcher.launch(batch, initial_job_idx=first)
            if self._config.dry_run:
                return
            study.tell([None if job.status is JobStatus.FAILED else job.return_value for job in done])


def _domain(override: Override) -> Interval | list[str]:
    """From what a study may choose the value of a key."""
    sweep = override.value()
    if not isinstance(sweep, IntervalSweep):
        return list(override.sweep_string_iterator())
    low, high = sweep.start, sweep.end
    assert low is not None
    assert high is not None
    is_whole = "int" in sweep.tags or (isinstance(low, int) and isinstance(high, int))
    return Interval(low=low, high=high, is_log="log" in sweep.tags, is_whole=is_whole)


for _kind, _plugin in (("launcher", RechpcLauncher), ("sweeper", RechpcSweeper)):
    _target = {"_target_": f"{_plugin.__module__}.{_plugin.__name__}"}
    ConfigStore.instance().store(group=f"hydra/{_kind}", name="rechpc", node=_target, provider="rechpc")
