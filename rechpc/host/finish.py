"""After an attempt: is the run finished, to be started again, or given up? `python -m rechpc.host.finish RUN_DIR`.

The batch script's last line, after srun has ended: no host task can decide this, for a crash on one node kills the
host tasks of the others too. Its exit status becomes the state of the job. Slurm's words are in `rechpc.host.slurm`.
"""

import argparse
import signal
import sys
from dataclasses import asdict, dataclass, field

from rechpc.config import RunConfig
from rechpc.errors import LaunchError
from rechpc.findings import read_verdict
from rechpc.host import nodes, slurm
from rechpc.host.preflight import line_for_administrators
from rechpc.host.task import ensure_outcome
from rechpc.rules import load
from rechpc.rundir import AttemptDir, Outcome, RunDir, read_json, write_json

_NO_PROGRESS_LIMIT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What to do after an attempt, and why."""

    again: bool
    failed: bool
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """One attempt that has ended, in the terms of the decision."""

    outcome: Outcome
    step: int
    progressed: bool  # a newer checkpoint was committed since it began
    error: str | None = None
    bad_nodes: dict[str, str] = field(default_factory=dict)  # that preflight found, with why


def decide(history: list[Ended], *, max_attempts: int) -> Verdict:
    """What follows from the attempts of a run, oldest first.

    A planned stop starts again as long as there is progress. A crash starts again only if there was progress since
    its attempt began, it is not the second one at the same step, and `max_attempts` crashes are not reached; one of
    preflight, which is no work lost, as long as the last holds.
    """
    last = history[-1]
    if last.outcome is Outcome.finished:
        return Verdict(again=False, failed=False, reason="finished")
    if last.outcome is Outcome.drained:
        return Verdict(again=False, failed=False, reason="stopped on request")
    if last.outcome is Outcome.requeued:
        stuck = history[-_NO_PROGRESS_LIMIT:]
        if len(stuck) == _NO_PROGRESS_LIMIT and not any(a.progressed for a in stuck):
            reason = (
                f"{_NO_PROGRESS_LIMIT} attempts in a row committed no checkpoint before they had to stop; raise "
                "job.time_limit_min, or lower job.signal_lead_s if a save takes much less"
            )
            return Verdict(again=False, failed=True, reason=reason)
        return Verdict(again=True, failed=False, reason="stopped in time, starts again")
    crashes = [a for a in history if a.outcome is Outcome.failed]
    if last.bad_nodes and len(crashes) < max_attempts:
        reason = f"preflight: {', '.join(last.bad_nodes)} left out, starts again on other nodes"
        return Verdict(again=True, failed=False, reason=reason)
    if not last.progressed:
        reason = "no checkpoint was committed since the attempt began"
    elif len(crashes) > 1 and crashes[-2].step == last.step:
        reason = f"the second crash at step {last.step}"
    elif len(crashes) >= max_attempts:
        reason = f"{len(crashes)} crashes, job.max_attempts={max_attempts}"
    else:
        return Verdict(again=True, failed=False, reason=f"crashed at step {last.step} after progress, starts again")
    return Verdict(again=False, failed=True, reason=f"given up: {reason}; {last.error or 'no error was recorded'}")


def finish(run: RunDir, config: RunConfig, *, attempt: AttemptDir | None, launch_status: int) -> Verdict:
    """Decide, write the verdict into the attempt, and where it says so have the launcher start the job again.

    `launch_status` is that of srun: non-zero with no outcome means that a node or the launch itself failed.
    """
    if attempt is None and run.result_path.exists():
        return Verdict(again=False, failed=False, reason="had finished before")
    if attempt is None:
        reason = f"srun ended with status {launch_status} before an attempt began; see {run.submission_path}"
        return Verdict(again=False, failed=True, reason=reason)
    # Where srun was ended from outside, node 0 had no time for it.
    ensure_outcome(attempt, run, _error(attempt, f"srun ended with status {launch_status}"))
    history = _history(run, until=attempt)
    bad = history[-1].bad_nodes
    if bad:
        print(f"rechpc: {line_for_administrators(slurm.job_id(), bad)}", flush=True)
    if config.preflight.only and history[-1].outcome is Outcome.failed:
        reason = f"{history[-1].error}" + f"; leave out with job.exclude={','.join(bad)}" * bool(bad)
        verdict = Verdict(again=False, failed=True, reason=reason)
    else:
        verdict = decide(history, max_attempts=config.job.max_attempts)
    write_json(attempt.verdict_path, asdict(verdict))  # first: a requeue ends this process too
    if verdict.again:
        try:
            _again(config, sorted({name for ended in history for name in ended.bad_nodes}))
        except LaunchError as error:
            verdict = Verdict(again=False, failed=True, reason=str(error))
            write_json(attempt.verdict_path, asdict(verdict))
    return verdict


def _again(config: RunConfig, bad: list[str]) -> None:
    """Requeue the job, on nodes other than the bad ones. Raises LaunchError where Slurm refuses."""
    if not bad:
        slurm.requeue()
        return
    if config.job.nodelist:
        raise LaunchError(
            f"job.nodelist={config.job.nodelist}: asks for nodes of which {', '.join(bad)} is bad; change it"
        )
    nodes.check_enough_without(bad, num_nodes=config.job.nodes)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a requeue sends it, and Slurm excludes for waiting jobs only
    slurm.requeue()
    nodes.exclude(bad, beside=config.job.exclude)


def _error(attempt: AttemptDir, otherwise: str | None) -> str | None:
    """The first failing rank's own error: node 0, which wrote the outcome, may not have known it yet."""
    first = attempt.first_error()
    return f"rank {first['rank']}: {first['error']}" if first else otherwise


def _history(run: RunDir, *, until: AttemptDir) -> list[Ended]:
    """The attempts up to this one; one that was cut off without an outcome (a lost node) counts as a crash."""
    attempts = [a for a in run.attempts() if a.ordinal <= until.ordinal]
    ends = [_checkpoint_at_start(a) for a in attempts[1:]] + [next(iter(run.committed_steps()), -1)]
    history = []
    for attempt, end in zip(attempts, ends, strict=True):
        facts = read_json(attempt.outcome_path) or {"outcome": Outcome.failed, "step": -1, "error": "cut off"}
        history.append(
            Ended(
                outcome=Outcome(facts["outcome"]),
                step=facts["step"],
                progressed=end > _checkpoint_at_start(attempt),
                error=_error(attempt, facts["error"]),
                bad_nodes=found.to_exclude if (found := read_verdict(attempt)) else {},
            )
        )
    return history


def _checkpoint_at_start(attempt: AttemptDir) -> int:
    step = (read_json(attempt.facts_path) or {}).get("checkpoint_step")
    return -1 if step is None else int(step)


def main() -> int:
    """Exit status 0 unless the run failed."""
    parser = argparse.ArgumentParser(prog="python -m rechpc.host.finish", description=__doc__)
    parser.add_argument("run_dir", help="run directory")
    parser.add_argument("--status", type=int, default=0, help="exit status of srun")
    arguments = parser.parse_args()
    run = RunDir.open(arguments.run_dir)
    attempt = slurm.attempt_of_this_job(run)
    verdict = finish(run, load(run.config_path), attempt=attempt, launch_status=arguments.status)
    print(f"rechpc: {verdict.reason}", flush=True)
    return 1 if verdict.failed else 0


if __name__ == "__main__":
    sys.exit(main())
