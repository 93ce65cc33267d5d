"""Where the time of a step goes.

At every moment one part of a step is going on, and a mark is set when that changes. So nothing is counted twice, and
the parts make up the step. On a CPU a mark is a reading of the clock. On a GPU it is an event on the stream that
trains: a part is how long that stream was busy with it or had to wait for it, and work on other streams that hides
behind it costs nothing. Events are read one step later, when they have passed anyway; nothing synchronizes.
"""

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.runtime_forwards import PipelinedForward

from rechpc.rank.data import Batch
from rechpc.rank.optim import Optimizers


class Part(StrEnum):
    """What a rank does in a step."""

    data_wait = "data_wait"  # for a batch that was not read yet
    forward = "forward"
    backward = "backward"  # with the optimizers of tables, which are fused into it, and the sum of dense gradients
    all_to_all = "all_to_all"  # ids, embeddings and their gradients: what of it, and of slower ranks, is waited for
    optimizer = "optimizer"  # of everything else
    other = "other"  # copies, sums over ranks, records


class Breakdown:
    """The parts of the steps of one rank."""

    def __init__(self, mark: Callable[[], Any], seconds: Callable[[Any, Any], float]) -> None:
        """`mark` is now, `seconds` lie between two marks that have passed."""
        self._mark, self._seconds = mark, seconds
        self._now, self._is_paused = Part.other, False
        self._marks = [(mark(), Part.other)]  # of the open step; what begins at each
        self._closed: deque[list[tuple[Any, Part]]] = deque()

    @contextlib.contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """What goes on inside is this part, but for parts inside it."""
        before = self._now
        self._switch(part)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, part: Part) -> None:
        if part is not self._now and not self._is_paused:
            self._marks.append((self._mark(), part))
        self._now = part

    def end_step(self) -> None:
        """Close the step that is open, and open the next."""
        now = self._mark()
        self._closed.append([*self._marks, (now, Part.other)])
        self._marks = [(now, self._now)]

    def take(self) -> dict[str, float]:
        """Seconds of every part of the oldest step that was closed and not taken; on a GPU it has been waited for."""
        marks = self._closed.popleft()
        seconds = {str(part): 0.0 for part in Part}
        for (start, part), (end, _) in itertools.pairwise(marks):
            seconds[part] += self._seconds(start, end)
        return seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What goes on inside, and what came before it in the open step, is no part of a step."""
        self._is_paused = True
        yield
        self._is_paused = False
        self._marks = [(self._mark(), self._now)]

    @contextlib.contextmanager
    def counting_waits(self) -> Iterator[None]:
        """Count as all-to-all what forward and backward wait for, in all ways in which TorchRec waits."""
        wait = dist.Work.wait

        def counted(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            # Threads that Python has started write checkpoints. On a GPU, backward is in a thread of autograd's.
            trains = type(threading.current_thread()) is not threading.Thread
            if not trains or self._now not in (Part.forward, Part.backward):
                return wait(work, *args, **kwargs)
            with self.part(Part.all_to_all):
                return wait(work, *args, **kwargs)

        dist.Work.wait = counted
        try:
            yield
        finally:
            dist.Work.wait = wait


def on(device: torch.device) -> Breakdown:
    """The parts of steps on this device."""
    if device.type != "cuda":
        return Breakdown(time.perf_counter, lambda start, end: float(end - start))
    stream = torch.cuda.current_stream(device)
    return Breakdown(
        lambda: stream.record_event(torch.cuda.Event(enable_timing=True)),
        lambda start, end: float(start.elapsed_time(end)) / 1000,
    )


class Pipeline(TrainPipelineSparseDist):
    """TorchRec's pipeline, which says what part of a step goes on."""

    def __init__(
        self, model: DistributedModelParallel, optimizers: Optimizers, device: torch.device, parts: Breakdown
    ) -> None:
        self._parts = parts
        forward = _as(Part.forward, model, parts)
        super().__init__(model, optimizers.combined, device, execute_all_batches=True, custom_model_fwd=forward)

    def _pipeline_model(self, batch: Batch, context: Any, pipelined_forward: type = PipelinedForward) -> None:
        parts = self._parts

        class Forward(pipelined_forward):
            """Of a sharded module: it waits for ids, then calls `compute_and_output_dist`."""

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                with parts.part(Part.all_to_all):
                    return super().__call__(*args, **kwargs)

        super()._pipeline_model(batch, context, Forward)
        for module in self._pipelined_modules:
            module.compute_and_output_dist = _as(Part.forward, module.compute_and_output_dist, parts)

    def _next_batch(self, dataloader_iter: Iterator[Batch]) -> Batch | None:
        with self._parts.part(Part.data_wait):
            return super()._next_batch(dataloader_iter)  # type: ignore[no-any-return]

    def start_sparse_data_dist(self, batch: Batch | None, context: Any) -> None:
        with self._parts.part(Part.all_to_all):
            super().start_sparse_data_dist(batch, context)

    def wait_sparse_data_dist(self, context: Any) -> None:
        with self._parts.part(Part.all_to_all):
            super().wait_sparse_data_dist(context)

    def _backward(self, losses: torch.Tensor) -> None:
        with self._parts.part(Part.backward):
            super()._backward(losses)

    def _optimizer_step(self) -> None:
        with self._parts.part(Part.optimizer):
            super()._optimizer_step()


def _as(part: Part, function: Callable[..., Any], parts: Breakdown) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        with parts.part(part):
            return function(*args, **kwargs)

    return timed
