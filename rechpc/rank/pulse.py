"""What all ranks know of every step: its loss, and whether somebody asked to stop or still saves.

Sums over all ranks travel in one all-reduce, in flight while the next steps are computed. A step has one of its own
where it takes longer than `_BETWEEN_S`; quicker ones share: on a CPU each costs them 0.8 ms, most of it in threads
that take turns with those that train (26 tables, a global batch of 16, two ranks on two cores). How many share is
decided by rank 0 and travels in the sums, so that every rank sends at the same steps.
"""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rechpc.rank import process
from rechpc.rank.model import Output
from rechpc.rundir import StopReason

_BETWEEN_S = 0.05
_MOST = 16  # steps
_REASONS = (None, StopReason.drain, StopReason.requeue)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """What all ranks know of one step."""

    step: int
    samples: int
    rate: float
    loss: float
    positive_rate: float
    saving: bool  # some rank's thread is still at it
    stop: StopReason | None


@dataclass(frozen=True, slots=True)
class _Facts:
    step: int
    samples: int
    rate: float


class Pulses:
    """The pulses of one attempt, in the order of their steps."""

    def __init__(self, here: process.Process) -> None:
        self._here = here
        # The device's own backend on a GPU; on the CPU a group that no step uses, so that nothing queues behind it.
        self._group = dist.group.WORLD if here.device.type == "cuda" else here.host_group
        self._sharing = 1  # steps, the same on every rank
        self._open: list[tuple[torch.Tensor, _Facts]] = []
        self._sent: tuple[torch.Tensor, dist.Work, list[_Facts]] | None = None
        self._sent_at_s = time.perf_counter()

    def push(
        self, output: Output, stop: StopReason | None, *, saving: bool, step: int, samples: int, rate: float
    ) -> list[Pulse]:
        """Add a step; returns what has arrived, which is of steps before it, and mostly nothing where steps share.

        Collective: every rank.
        """
        loss, _, labels_B, weights_B = output
        # Filled where they are: a tensor of Python's numbers is copied to a GPU, and the copy is waited for.
        flags = [torch.full_like(loss, value) for value in (_REASONS.index(stop), saving)]
        sums = torch.stack([loss, (labels_B * weights_B).sum(), *flags])
        self._open.append((sums, _Facts(step, samples, rate)))
        return self._send() if len(self._open) >= self._sharing else []

    def flush(self) -> list[Pulse]:
        """All that is left, waited for.

        Collective: every rank, at the same step.
        """
        return [*(self._send() if self._open else []), *self._receive()]

    def _send(self) -> list[Pulse]:
        """Send what is open; what was sent before has arrived."""
        now_s = time.perf_counter()
        step_s = (now_s - self._sent_at_s) / len(self._open)
        self._sent_at_s = now_s
        sharing = min(max(1, int(_BETWEEN_S / max(step_s, 1e-6))), _MOST) if self._here.is_main else 0
        sums = [sums for sums, _ in self._open]
        packed = torch.stack([*sums, torch.full_like(sums[0], sharing)]).double()
        arrived = self._receive()
        work = dist.all_reduce(packed, group=self._group, async_op=True)
        self._sent = packed, work, [facts for _, facts in self._open]
        self._open = []
        return arrived

    def _receive(self) -> list[Pulse]:
        if self._sent is None:
            return []
        packed, work, facts = self._sent
        self._sent = None
        work.wait()
        *sums, (sharing, *_) = packed.tolist()
        self._sharing = int(sharing)
        return [
            Pulse(
                step=fact.step,
                samples=fact.samples,
                rate=fact.rate,
                loss=loss / self._here.env.world_size,
                positive_rate=positive_rate / self._here.env.world_size,
                saving=saving > 0,
                stop=_REASONS[int(flag)],
            )
            for (loss, positive_rate, flag, saving), fact in zip(sums, facts, strict=True)
        ]
