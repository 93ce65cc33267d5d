"""Traces of torch's profiler for the steps of `trainer.profile_steps`, one file a rank, for https://ui.perfetto.dev."""

import logging
import os

import torch
from torch.profiler import ProfilerActivity, profile

from rechpc.config import TrainerConfig
from rechpc.rundir import RunDir

logger = logging.getLogger(__name__)


class Profiler:
    """Traces a range of steps; nothing where there is none."""

    def __init__(self, config: TrainerConfig, run: RunDir, *, rank: int) -> None:
        self._steps = range(config.profile_steps[0], config.profile_steps[-1] + 1) if config.profile_steps else range(0)
        self._run, self._rank = run, rank
        self._profile: profile | None = None
        self._first = 0

    def slows(self, step: int) -> bool:
        """Whether the time of this step, or of the one after it, is not that of a step that is not traced."""
        return step in self._steps or step + 1 in self._steps

    def begin(self, step: int) -> None:
        """Trace from here, if this step is the first of the range that the attempt makes."""
        if step in self._steps and self._profile is None:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profile, self._first = profile(activities=kinds), step
            self._profile.start()

    def is_due(self, step: int, *, last: bool) -> bool:
        """Whether `write` is to come after this step; with `last`, the attempt makes no other."""
        return self._profile is not None and (last or step + 1 not in self._steps)

    def write(self, step: int) -> None:
        """Write the trace up to this step; one that cannot be written ends nothing."""
        assert self._profile is not None
        self._profile.stop()
        path = self._run.profile_path(self._first, step, self._rank)
        temporary = path.with_name(f".{path.name}")  # it must end with .gz to be compressed
        try:
            path.parent.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(str(temporary))
            os.rename(temporary, path)
            logger.info("step=%d profile=%s", step, path)
        except OSError as error:
            logger.warning("path=%s cannot be written: %s; training goes on", path, error.strerror)
        self._profile = None
