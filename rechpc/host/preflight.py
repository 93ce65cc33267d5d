"""The stage of preflight on the nodes: each looks at itself and into its container, and node 0 says what follows.

No node needs another for it but for the run directory, and everything is bounded by `preflight.timeout_s`.
Never imports torch: what needs it is `rechpc.rank.probe`, a child process in the container, which may crash there.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from rechpc import lifeline
from rechpc.config import RunConfig
from rechpc.errors import LaunchError
from rechpc.findings import Finding, Level, Report, Verdict, finding, problems
from rechpc.host import node, nodes, slurm
from rechpc.rundir import AttemptDir, read_json, write_json
from rechpc.sight import Sight, look

_POLL_S = 0.1
_CONNECT_S = 5.0


class NodeStage:
    """The checks of this node in an attempt."""

    def __init__(self, config: RunConfig, attempt: AttemptDir, here: slurm.Placement) -> None:
        self._config, self._attempt, self._here = config, attempt, here
        self._until = time.monotonic() + config.preflight.timeout_s
        self._began = time.monotonic()

    def run(
        self,
        probe: Callable[[Path], list[str]],
        *,
        env: Mapping[str, str],
        meet: tuple[str, int] | None,
        stopped: Callable[[], bool],
    ) -> None:
        """Look, report, and on node 0 conclude; raises LaunchError where a node fails.

        `probe` is the command that looks into the container and writes to a file, `env` what ranks get, `meet` a host
        and port of node 0. A stop that comes meanwhile ends it early, without a verdict.
        """
        self._attempt.preflight_folder.mkdir(exist_ok=True)
        sight = look(self._config.preflight.devices)
        with self._listening(meet):
            found = node.check(self._config, sight, env=env)
            if meet and self._here.node_rank:
                found.append(self._reach(*meet))
            if found[0].level is not Level.failed:  # the container is there
                found += self._probe(probe, sight, stopped)
            if stopped():
                return
            report = Report(node=self._here.node_name, findings=found)
            write_json(self._attempt.node_report_path(self._here.node_rank), asdict(report))
            if self._here.node_rank == 0:
                verdict = self._conclude(stopped)
                if stopped():
                    return
                if verdict.bad:
                    raise LaunchError(verdict.line)
        if problems(found):
            # Its end would end node 0 too (srun --kill-on-bad-exit), before that has heard of all nodes.
            self._wait(lambda: self._attempt.preflight_path.exists() or stopped())
            raise LaunchError(f"preflight: node {report.node}: {', '.join(problems(found))}")

    def _probe(self, argv: Callable[[Path], list[str]], sight: Sight, stopped: Callable[[], bool]) -> list[Finding]:
        """What a process in the container finds, and whether it sees what is seen outside."""
        rank = self._here.node_rank
        out, log = self._attempt.preflight_folder / f"probe-{rank:05d}.json", self._log
        me = os.getpid()
        with log.open("wb") as file:
            process = subprocess.Popen(
                argv(out),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: lifeline.die_with(me),
            )
        ended = self._wait(lambda: process.poll() is not None or stopped())
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        facts = read_json(out)
        if facts is None or process.returncode:
            why = f"did not end within preflight.timeout_s={self._config.preflight.timeout_s:g}" if not ended else None
            problem = crash(why or _exit(process.returncode), log.read_text(errors="replace"))
            return [Finding(check="probe", level=Level.failed, text=f"{problem}; log: {log}")]
        report = Report.read({"node": self._here.node_name, "findings": facts["findings"]})
        return [*report.findings, compare(sight, Sight.of(facts["sight"]))]

    @property
    def _log(self) -> Path:
        return self._attempt.preflight_folder / f"probe-{self._here.node_rank:05d}.log"

    def _conclude(self, stopped: Callable[[], bool]) -> Verdict:
        """Wait for the reports of all nodes, as long as there is time, and write the verdict."""
        names = nodes.names()
        reports = []
        for rank in range(self._here.num_nodes):
            path = self._attempt.node_report_path(rank)
            if self._wait(lambda path=path: path.exists() or stopped()):  # type: ignore[misc]
                if facts := read_json(path):
                    reports.append(Report.read(facts))
                continue
            name = names[rank] if rank < len(names) else f"number {rank}"
            text = f"no word within preflight.timeout_s={self._config.preflight.timeout_s:g}; it hangs, or is down"
            reports.append(Report(node=name, findings=[Finding(check="report", level=Level.failed, text=text)]))
        seconds = time.monotonic() - self._began
        verdict = Verdict.of(reports, num_nodes=self._here.num_nodes, seconds=seconds)
        if not stopped():
            verdict.write(self._attempt)
        return verdict

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Whether it holds before the time of this stage is over."""
        while not condition():
            if time.monotonic() > self._until:
                return False
            time.sleep(_POLL_S)
        return True

    @contextlib.contextmanager
    def _listening(self, meet: tuple[str, int] | None) -> Iterator[None]:
        """On node 0: let the others see whether a connection comes through. The kernel takes it, nobody accepts."""
        if meet is None or self._here.node_rank:
            yield
            return
        with socket.create_server(("", meet[1]), backlog=1024):
            yield

    def _reach(self, host: str, port: int) -> Finding:
        """Whether node 0 can be reached from here; it may not listen yet."""
        while True:
            try:
                with socket.create_connection((host, port), timeout=_CONNECT_S):
                    return Finding(check="node 0", level=Level.ok, text=f"{host} port {port} answers")
            except OSError as error:
                if time.monotonic() < min(self._until, self._began + 4 * _CONNECT_S):
                    time.sleep(_POLL_S)
                    continue
                problem = (
                    f"{host} port {port} of node 0 cannot be reached: {error.strerror or error}; a firewall, or an "
                    "address of another network: tell the site"
                )
                return finding("node 0", problem, good="")


def crash(how: str, log: str) -> str:
    """One line for a probe that did not come to its end: how, at what, and the last words."""
    phases = re.findall(r"^phase=(.*)$", log, re.MULTILINE)
    at = f" at: {phases[-1]}" if phases else ""
    lines = [line.strip() for line in log.splitlines() if line.strip() and not line.startswith("phase=")]
    words = f"; its last line: {lines[-1]}" if lines else ""
    advice = ""
    if phases and "TBE" in phases[-1] and "SIG" in how:
        advice = "; FBGEMM has no code for this GPU: build the image for its architecture (docs/container.md)"
    elif not phases:
        advice = "; the container or torch in it does not start here"
    return f"{how}{at}{advice}{words}"


def _exit(status: int) -> str:
    """Words for an exit status; shells and Apptainer say 128 and the signal."""
    number = -status if status < 0 else status - 128
    if number > 0 and number in set(signal.Signals):
        return f"killed by {signal.Signals(number).name}"
    return f"ended with status {status}"


def compare(outside: Sight, inside: Sight) -> Finding:
    """Whether the container sees what the host sees."""
    differences = []
    if len(inside.gpus) != len(outside.gpus):
        differences.append(f"{len(inside.gpus)} of {len(outside.gpus)} GPUs in /sys/class/kfd")
    if gone := [d for d, why in outside.devices.items() if not why and inside.devices.get(d, "not there")]:
        differences.append(f"{', '.join(gone)} cannot be used inside ({inside.devices.get(gone[0], 'not there')})")
    if gone := sorted(set(outside.rdma) - set(inside.rdma)):
        differences.append(f"network adapters {', '.join(gone)} are missing inside")
    if outside.memlock_bytes != inside.memlock_bytes:
        differences.append(f"ulimit -l is {inside.memlock_bytes} bytes inside, {outside.memlock_bytes} outside")
    problem = f"{'; '.join(differences)}; bind what is missing with container.binds" if differences else None
    return finding("container's view", problem, good="the same as outside")


def line_for_administrators(job_id: str, bad: Mapping[str, str]) -> str:
    """What to forward to the site: one line."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    named = "; ".join(f"node={name} reason={reason!r}" for name, reason in bad.items())
    return f"for the administrators: job={job_id} at={at} {named}"
