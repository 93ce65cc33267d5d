"""The nodes of this process's job, in Slurm's words: which they are, and how to leave some out next time."""

import os

from rechpc.errors import LaunchError
from rechpc.host import slurm


def names() -> list[str]:
    """The nodes of this job by node rank; empty where Slurm does not say."""
    return slurm.ask("scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")).split()


def check_enough_without(bad: list[str], *, num_nodes: int) -> None:
    """Raise LaunchError where the partition is too small without these nodes, for the job would wait for ever."""
    partition = os.environ.get("SLURM_JOB_PARTITION", "")
    known = set(slurm.ask("sinfo", "--noheader", "--Node", "--format=%N", f"--partition={partition}").split())
    left = known - set(bad)
    if known and len(left) < num_nodes:
        raise LaunchError(
            f"partition {partition} has {len(left)} nodes without {', '.join(bad)}, and job.nodes={num_nodes}; wait "
            "for the repair, or set fewer nodes"
        )


def exclude(bad: list[str], *, beside: str | None) -> None:
    """Keep this job, which was just requeued, from these nodes; `beside` is what job.exclude says already.

    Slurm takes this for pending jobs only, so the batch script has the moments between a requeue and its own end.
    Raises LaunchError where Slurm refuses.
    """
    listed = ",".join([*([beside] if beside else []), *bad])
    slurm.tell("scontrol", "update", f"JobId={slurm.job_id()}", f"ExcNodeList={listed}")
