"""Ranks that stay alive between tests, because importing torch and TorchRec takes longer than most tests."""

import logging
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed import collective_utils, comm

from rechpc.topology import RankEnv

_START_S = 120.0
_LAST_WORDS_S = 5.0


class RankError(Exception):
    """A rank raised, died or did not come back; the message has its traceback."""


class Ranks:
    """Calls functions on several ranks at once, each in a process of its own."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def __call__(self, world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """The results of `function(env, *args)` by rank; the function joins a process group itself.

        Raises RankError for the first rank that raises, or when time is up; ranks that are stuck are killed.
        """
        if not self._workers:
            self._start()
        # As torchrun does it: the store is in this process, on a port that nobody else can take.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        try:
            for rank, (_, connection) in enumerate(self._workers[:world_size]):
                connection.send((environment(rank, world_size, store.port), function, args))
            return self._results(world_size, time.monotonic() + timeout_s)
        except BaseException as error:
            if not isinstance(error, RankError) or not self._at_rest(world_size):
                self.close()
            raise

    def close(self) -> None:
        """Kill all ranks; the next call starts new ones."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []

    def _at_rest(self, world_size: int) -> bool:
        """Whether all ranks have answered, and left their process group."""
        if not self._workers:
            return False
        try:
            for _, connection in self._workers[:world_size]:
                connection.send(({}, _nothing, ()))
            self._results(world_size, time.monotonic() + _LAST_WORDS_S)
        except (RankError, OSError):
            return False
        return True

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for _ in range(self._size):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there,), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))
        self._results(self._size, time.monotonic() + _START_S)

    def _results(self, world_size: int, deadline_s: float) -> list[Any]:
        answers: dict[int, _Answer] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers[:world_size])}
        while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline_s - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    answers[rank] = _Answer(failure="died", time_s=0.0)
                if answers[rank].failure:
                    # The others will soon say that they lost their peer, or that they failed before.
                    deadline_s = min(deadline_s, time.monotonic() + _LAST_WORDS_S)
        if waiting:
            self.close()
        failures = {rank: a for rank, a in answers.items() if a.failure}
        if failures:
            first = min(failures, key=lambda rank: failures[rank].time_s)
            raise RankError(f"rank {first}: {failures[first].failure}")
        if waiting:
            raise RankError(f"ranks {sorted(waiting.values())} did not come back in time")
        return [answers[rank].result for rank in range(world_size)]


@dataclass
class _Answer:
    result: Any = None
    failure: str | None = None
    time_s: float = field(default_factory=time.monotonic)


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in {**values, "GLOO_SOCKET_IFNAME": "lo"}.items()}


def _nothing(env: RankEnv) -> None:
    pass


def _work(connection: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("rechpc").setLevel(logging.INFO)
    for library in ("torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(library).setLevel(logging.ERROR)
    # TorchRec agrees on this once in the life of a process, and ranks that have and have not would wait for each other.
    collective_utils._INITIALIZED = True
    connection.send(_Answer())
    while True:
        try:
            environment, function, args = connection.recv()
        except EOFError:
            return
        os.environ.update(environment)
        # TorchRec keeps the process groups of a node for the life of a process; here they end with a call.
        comm._INTRA_PG = comm._CROSS_PG = None
        try:
            answer = _Answer(function(RankEnv.from_environment(), *args))
        except BaseException:
            answer = _Answer(failure=traceback.format_exc())
        connection.send(answer)
        if dist.is_initialized():  # a function that expects an exception leaves its group behind
            dist.destroy_process_group()
