"""The last stage of preflight: all ranks of a run meet, send each other what the run will send, and compare.

It uses the process group that training goes on with, so that what was checked is what runs. A collective that never
ends is left by a timer, for nothing else leaves it. Bandwidths are judged on GPUs; not run on AMD hardware.
"""

import contextlib
import itertools
import logging
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rechpc.choices import Device
from rechpc.config import RunConfig
from rechpc.errors import LaunchError
from rechpc.findings import TOGETHER, Finding, Level, Report, Verdict, finding, has_preflight, read_verdict
from rechpc.rank import process, transport
from rechpc.rundir import AttemptDir, read_json, write_json
from rechpc.topology import RankEnv

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_DEFAULT_SHARE = 0.3
_REPEATS = 3
_SLOW_LINK = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one rank found; times in seconds, sizes in bytes."""

    node: str
    clock_s: float  # its clock right after a barrier
    compute_s: float  # a matrix product, alone
    reduce_bytes: int
    reduce_s: float
    exchange_bytes: int
    exchange_s: float
    large_bytes: int
    large_s: float
    ring_s: float  # to receive as much from the node before, while all do the same
    transport: transport.Transport | None  # None where the device is a CPU


@contextlib.contextmanager
def start(config: RunConfig, attempt: AttemptDir, env: RankEnv) -> Iterator[process.Process]:
    """As `process.start`, and the checks after it where the run has them. Raises LaunchError where one fails.

    Collective: every rank.
    """
    if not has_preflight(config):
        with process.start(config, env) as here:
            yield here
        return
    with _Limit(config, attempt, env) as limit:
        stack = contextlib.ExitStack()
        here = stack.enter_context(process.start(config, env))
        with stack:
            limit.phase = "the exchange between all ranks"
            _check(config, attempt, here)
            limit.stop()
            yield here


class _Limit:
    """Ends this process with a word when its time is over: it may be stuck in a collective, which cannot be left."""

    def __init__(self, config: RunConfig, attempt: AttemptDir, env: RankEnv) -> None:
        self.phase = "the meeting of all ranks"
        self._config, self._attempt, self._env = config, attempt, env
        self._timer = threading.Timer(config.preflight.timeout_s, self._give_up)
        self._timer.daemon = True

    def __enter__(self) -> "_Limit":
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._timer.cancel()

    def _give_up(self) -> None:
        line = f"preflight: {self.phase} did not end within preflight.timeout_s={self._config.preflight.timeout_s:g}; "
        line += missing(self._config, self._attempt)
        logger.error(line)
        record = {"rank": self._env.rank, "time_s": time.time(), "error": line, "traceback": ""}
        write_json(self._attempt.error_path(self._env.rank), record)
        os._exit(1)


def missing(config: RunConfig, attempt: AttemptDir) -> str:
    """Who is not there, as far as the run directory tells: a rank that started has a log."""
    silent = [rank for rank in range(config.world_size) if not attempt.rank_log_path(rank).exists()]
    if not silent:
        return (
            "all ranks have started, so the network between them does not carry them: see rank-*.log, and name the "
            "interfaces in container.env.NCCL_SOCKET_IFNAME and container.env.GLOO_SOCKET_IFNAME"
        )
    nodes = sorted({_node_name(attempt, rank // config.ranks_per_node) for rank in silent})
    return f"ranks {', '.join(map(str, silent[:8]))} (node {', '.join(nodes)}) have not started: see their node-*.log"


def _check(config: RunConfig, attempt: AttemptDir, here: process.Process) -> None:
    began = time.monotonic()
    measured = here.gather(_measure(config, attempt, here))
    reason = None
    if measured is not None:
        before = read_verdict(attempt)
        found = judge(config, measured)
        reports = [*(before.reports if before else []), *found]
        seconds = (before.seconds if before else 0.0) + time.monotonic() - began
        verdict = Verdict.of(reports, num_nodes=config.job.nodes, seconds=seconds)
        verdict.write(attempt)
        logger.info("preflight %s", verdict.line)
        reason = verdict.line if verdict.bad else None
    reason = here.agree(reason)
    if reason is not None:
        raise LaunchError(reason)


def _measure(config: RunConfig, attempt: AttemptDir, here: process.Process) -> Measured:
    """This rank's part; each time is the best of some, for the first one sets connections up.

    Collective: every rank.
    """
    world, device = here.env.world_size, here.device
    is_gpu = device.type == "cuda"
    dist.barrier(group=here.host_group)
    clock_s = time.time()
    side = 4096 if is_gpu else 256
    square = torch.ones(side, side, device=device)
    compute_s = _best(lambda: torch.mm(square, square), device)
    dense = torch.ones(dense_params(config), device=device)
    samples = config.trainer.global_batch // world
    wanted = samples * len(config.data.sparse) * config.model.embedding_dim
    exchange, large = _even(min(wanted, (256 if is_gpu else 4) * _MIB), world, device), None
    if exchange.nbytes < (64 if is_gpu else 1) * _MIB:
        large = _even((64 if is_gpu else 1) * _MIB // 4, world, device)

    def all_to_all(sent: torch.Tensor) -> Callable[[], Any]:
        received = torch.empty_like(sent)
        return lambda: dist.all_to_all_single(received, sent)

    reduce_s = _best(lambda: dist.all_reduce(dense), device)
    exchange_s = _best(all_to_all(exchange), device)
    large_s = exchange_s if large is None else _best(all_to_all(large), device)
    around = exchange if large is None else large
    ring_s = _best(lambda: _shift(around, here.env.rank, by=config.ranks_per_node), device)
    return Measured(
        node=_node_name(attempt, here.env.rank // config.ranks_per_node),
        clock_s=clock_s,
        compute_s=compute_s,
        reduce_bytes=dense.nbytes,
        reduce_s=reduce_s,
        exchange_bytes=exchange.nbytes,
        exchange_s=exchange_s,
        large_bytes=(exchange if large is None else large).nbytes,
        large_s=large_s,
        ring_s=ring_s,
        transport=transport.read(_debug_output(attempt)) if is_gpu else None,
    )


def _even(count: int, world_size: int, device: torch.device) -> torch.Tensor:
    """So many floats, rounded up to a share for every rank."""
    return torch.ones(-(-count // world_size) * world_size, device=device)


def _shift(sent: torch.Tensor, rank: int, *, by: int) -> None:
    """Send to the rank at the same place on the next node, and receive from the one before.

    Collective: every rank.
    """
    world, received = dist.get_world_size(), torch.empty_like(sent)
    ways = [(dist.isend, sent, (rank + by) % world), (dist.irecv, received, (rank - by) % world)]
    if by % world:  # one node has no other
        for request in dist.batch_isend_irecv([dist.P2POp(*way) for way in ways]):
            request.wait()


def _best(action: Callable[[], Any], device: torch.device) -> float:
    times = []
    for _ in range(1 + _REPEATS):
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def dense_params(config: RunConfig) -> int:
    """About the parameters that are summed over all ranks in every step: those of the MLPs, without the interaction."""
    m, features = config.model, len(config.data.sparse) + 1
    bottom = [len(config.data.dense), *m.dense_layers]
    over = [features * m.embedding_dim, *m.over_layers]
    return sum(a * b + b for widths in (bottom, over) for a, b in itertools.pairwise(widths))


def judge(config: RunConfig, measured: list[Measured]) -> list[Report]:
    """What follows from the measurements of all ranks: a report for each node that fails, and one of all together."""
    by_node: dict[str, list[Finding]] = {}
    for node, text in _wrong_clocks(config, measured).items():
        by_node.setdefault(node, []).append(Finding(check="clock", level=Level.failed, text=text))
    for node, text in _slow_ways(config, measured).items():
        by_node.setdefault(node, []).append(Finding(check="transport", level=Level.failed, text=text))
    for node, text in _stragglers(config, measured).items():
        by_node.setdefault(node, []).append(Finding(check="straggler", level=Level.warning, text=text))
    bandwidth = _bandwidth(config, measured)
    slow = _slow_links(config, measured) if bandwidth.level is Level.failed else {}
    for node, text in slow.items():
        by_node.setdefault(node, []).append(Finding(check="link", level=Level.failed, text=text))
    together = [bandwidth, _sizes(measured), _transports(config, measured)]
    reports = [Report(node=node, findings=found) for node, found in by_node.items()]
    return [*reports, Report(node=TOGETHER, findings=together)]


def _wrong_clocks(config: RunConfig, measured: list[Measured]) -> dict[str, str]:
    """Nodes by what is wrong with their clock, from the first rank of each."""
    clocks = {m.node: m.clock_s for m in reversed(measured)}
    middle = statistics.median_low(clocks.values())
    limit = config.preflight.max_clock_skew_s
    return {
        node: f"{clock - middle:+.1f} s from the median of all nodes, expected within preflight.max_clock_skew_s="
        f"{limit:g}: its time service (chrony, ntpd) does not run; tell the site"
        for node, clock in clocks.items()
        if abs(clock - middle) > limit
    }


def _slow_ways(config: RunConfig, measured: list[Measured]) -> dict[str, str]:
    found: dict[str, str] = {}
    for m in measured:
        if m.transport and (text := transport.problem(m.transport, allow_sockets=config.preflight.allow_sockets)):
            found.setdefault(m.node, text)
    return found


def _stragglers(config: RunConfig, measured: list[Measured]) -> dict[str, str]:
    """Nodes with ranks that compute slower than the others; in every collective all wait for them."""
    median = statistics.median(m.compute_s for m in measured)
    found: dict[str, str] = {}
    for rank, m in enumerate(measured):
        if m.compute_s > config.preflight.straggler_factor * median:
            text = f"rank {rank} computes {m.compute_s / median:.1f} times slower than the median of all ranks"
            found.setdefault(m.node, f"{text}; in every step all wait for it")
    return found


def _bandwidth(config: RunConfig, measured: list[Measured]) -> Finding:
    """The all-to-all against what the cluster's file promises, at a size where latency does not count."""
    world, local = config.world_size, config.ranks_per_node
    size, seconds = measured[0].large_bytes, max(m.large_s for m in measured)
    beyond = size * (world - local) / world
    within = size * (local - 1) / world
    cluster = config.cluster
    key = "inter_node_gb_per_s" if beyond else "intra_node_gb_per_s"
    promised_s = max(beyond / cluster.inter_node_gb_per_s, within / cluster.intra_node_gb_per_s) / 1e9
    share = promised_s / seconds
    asked = config.preflight.min_bandwidth_share
    least = (0.0 if cluster.device is Device.cpu else _DEFAULT_SHARE) if asked is None else asked
    reached = (beyond or within) / seconds / 1e9
    text = f"all-to-all of {size / _MIB:.1f} MiB a rank: {reached:.3g} GB/s, {share:.0%} of what the profile promises"
    problem = (
        f"{text}, cluster.{key}={getattr(cluster, key):g}; expected preflight.min_bandwidth_share={least:g}: "
        "see which transport RCCL took, correct the profile, or lower the share"
    )
    not_judged = " (not judged: cluster.device=cpu)" * (least == 0)
    return finding("bandwidth", problem if share < least else None, good=f"{text}{not_judged}")


def _slow_links(config: RunConfig, measured: list[Measured]) -> dict[str, str]:
    """Nodes that are slow both to receive and to be received from; of two nodes none can be told from the other."""
    local = config.ranks_per_node
    received_s = [max(m.ring_s for m in measured[i : i + local]) for i in range(0, len(measured), local)]
    best_s, count = min(received_s), len(received_s)
    rates = [measured[0].large_bytes / seconds / 1e9 for seconds in received_s]
    return {
        measured[i * local].node: f"{rates[i]:.3g} GB/s in and {rates[(i + 1) % count]:.3g} GB/s out, where the best "
        f"of the other nodes does {max(rates):.3g}: a bad cable, port or adapter; tell the site"
        for i in range(count)
        if count > 2 and min(received_s[i], received_s[(i + 1) % count]) > _SLOW_LINK * best_s
    }


def _sizes(measured: list[Measured]) -> Finding:
    """The run's own sizes, for the record."""
    reduce_s, exchange_s = max(m.reduce_s for m in measured), max(m.exchange_s for m in measured)
    text = (
        f"all-reduce of {measured[0].reduce_bytes / _MIB:.2f} MiB in {1e3 * reduce_s:.2f} ms, "
        f"all-to-all of {measured[0].exchange_bytes / _MIB:.2f} MiB a rank in {1e3 * exchange_s:.2f} ms"
    )
    return Finding(check="a step's exchange", level=Level.ok, text=text)


def _transports(config: RunConfig, measured: list[Measured]) -> Finding:
    found = sorted({m.transport.name or "not known" for m in measured if m.transport})
    if not found or config.job.nodes == 1:
        why = "one node" if found else "CPU ranks use gloo, which has sockets only"
        return Finding(check="transport", level=Level.skipped, text=f"does not apply: {why}")
    direct = all(m.transport.with_rdma_to_gpu for m in measured if m.transport)
    if "not known" in found:
        text = "RCCL did not say it; container.env.NCCL_DEBUG or .NCCL_DEBUG_FILE hides it"
        return Finding(check="transport", level=Level.warning, text=text)
    level = Level.ok if direct else Level.warning
    text = ", ".join(found) + (", straight from GPU memory" if direct else ", through host memory (no GPUDirect RDMA)")
    return Finding(check="transport", level=level, text=text)


def _debug_output(attempt: AttemptDir) -> str:
    """What RCCL wrote of this process; it cuts host names at the first dot."""
    name = f"rccl-{socket.gethostname().partition('.')[0]}-{os.getpid()}.log"
    path: Path = attempt.preflight_folder / name
    return path.read_text(errors="replace") if path.exists() else ""


def _node_name(attempt: AttemptDir, node_rank: int) -> str:
    """Slurm's name of a node, from its report; a run that was started by hand has none."""
    facts = read_json(attempt.node_report_path(node_rank))
    return str(facts["node"]) if facts else f"number {node_rank}"
