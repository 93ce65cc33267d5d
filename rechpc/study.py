"""Which value of an objective is better, and what to try next; only this file knows Optuna.

A study keeps nothing on disk: from the same seed and the same results it asks for the same values again, so the same
command on the same sweep directory finds the runs that are there and goes on behind them.
"""

from dataclasses import dataclass
from typing import Any

from rechpc.errors import ConfigError

_SEED = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """The values between two, both included."""

    low: float
    high: float
    is_log: bool  # to be searched by orders of magnitude
    is_whole: bool


def is_minimized(objective: str) -> bool:
    """Whether less is better: normalized entropy, losses and times."""
    return objective.endswith(("ne", "loss", "_s", "_ms")) and not objective.endswith("per_s")


class Study:
    """Values for the keys of `space`, in batches, each chosen by what the ones before have reached."""

    def __init__(self, space: dict[str, Interval | list[str]], *, minimize: bool) -> None:
        try:
            import optuna  # noqa: PLC0415 - optional, and slow to import
        except ImportError as error:
            raise ConfigError("sweep.trials: Optuna is not installed; pip install 'rechpc[study]'") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)

        def distribution(domain: Interval | list[str]) -> Any:
            if isinstance(domain, list):
                return optuna.distributions.CategoricalDistribution(domain)
            kind = optuna.distributions.IntDistribution if domain.is_whole else optuna.distributions.FloatDistribution
            return kind(domain.low, domain.high, log=domain.is_log)

        try:
            self._space = {key: distribution(domain) for key, domain in space.items()}
        except ValueError as error:
            raise ConfigError(f"{', '.join(space)}: {error}") from error
        # constant_liar: trials that run side by side do not all ask for the same.
        sampler = optuna.samplers.TPESampler(seed=_SEED, n_startup_trials=5, constant_liar=True)
        self._study = optuna.create_study(direction="minimize" if minimize else "maximize", sampler=sampler)
        self._failed = optuna.trial.TrialState.FAIL
        self._open: list[Any] = []

    def ask(self, count: int) -> list[dict[str, Any]]:
        """So many choices of a value for every key."""
        self._open = [self._study.ask(self._space) for _ in range(count)]
        return [trial.params for trial in self._open]

    def tell(self, values: list[float | None]) -> None:
        """What the choices of the last `ask` have reached; None for one that failed."""
        for trial, value in zip(self._open, values, strict=True):
            self._study.tell(trial, value, state=self._failed if value is None else None)
