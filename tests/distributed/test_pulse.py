"""What all ranks know of a step: every one of its own, in order, however many share an all-reduce."""

import time
from collections.abc import Iterator

import pytest
import torch

from rechpc.rank import process, pulse
from rechpc.rank.process import Process
from rechpc.rundir import StopReason
from tests.configs import tiny

STEPS = 60


def pulses_of(env, config, step_s: float) -> list[list[pulse.Pulse]]:
    """What arrives at each of some steps that take so long, and at the flush after them.

    Rank 0 asks to stop at the last step but one, rank 1 saves at step 2.
    """
    now_s = 0.0
    with process.start(config, env) as here, pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: now_s)
        arrivals = []
        for arrived in _pushed(here):
            now_s += step_s
            arrivals.append(arrived)
        return arrivals


def _pushed(here: Process) -> Iterator[list[pulse.Pulse]]:
    pulses = pulse.Pulses(here)
    yield []
    for step in range(1, STEPS + 1):
        loss = torch.tensor(float(step + here.env.rank))
        output = loss, torch.zeros(2), torch.ones(2), torch.full((2,), 0.25)
        stop = StopReason.drain if here.is_main and step == STEPS - 1 else None
        saving = here.env.rank == 1 and step == 2
        yield pulses.push(output, stop, saving=saving, step=step, samples=4, rate=0.1)
    yield pulses.flush()


def test_every_step_arrives_once_in_order_with_the_means_over_ranks(ranks):
    for arrived in ranks(2, pulses_of, tiny(world_size=2), 0.001):
        found = [p for together in arrived for p in together]
        assert [p.step for p in found] == list(range(1, STEPS + 1))
        assert [p.loss for p in found] == [step + 0.5 for step in range(1, STEPS + 1)]
        assert {p.positive_rate for p in found} == {0.5}
        assert [p.step for p in found if p.saving] == [2]
        assert [(p.step, p.stop) for p in found if p.stop] == [(STEPS - 1, StopReason.drain)]


@pytest.mark.parametrize(("step_s", "sharing"), [(0.001, 16), (0.02, 2), (0.06, 1)])
def test_steps_share_an_exchange_where_they_are_quick(ranks, step_s, sharing):
    first, second = ranks(2, pulses_of, tiny(world_size=2), step_s)
    sizes = [len(together) for together in first]
    assert sizes == [len(together) for together in second]
    assert max(sizes[:-1]) == sharing
