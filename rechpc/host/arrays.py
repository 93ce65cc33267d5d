"""Many runs at once: what is submitted of a sweep, as arrays of Slurm.

One array holds the runs that ask Slurm for the same. An element of it runs the batch script of its run, as if that had
been submitted alone, so that requeueing, draining and giving up are the same. Must not know what a sweep is.
"""

import itertools
import re
import shlex
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rechpc.choices import Launcher
from rechpc.config import RunConfig
from rechpc.host import slurm
from rechpc.rundir import RunDir, new_id, write_text


def request(run: RunDir, config: RunConfig) -> tuple[str, ...]:
    """What a run asks Slurm for: the options of its batch script, without its own paths."""
    lines = itertools.takewhile(lambda line: line != "# setup", slurm.batch_script(run, config).splitlines())
    own = ("#SBATCH --output=", "#SBATCH --error=")
    return tuple(line for line in lines if line.startswith("#SBATCH ") and not line.startswith(own))


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """When the runs of an array may start: so many at a time, and none before other arrays have ended."""

    max_parallel: int | None = None
    after: tuple[int, ...] = ()  # places in the list of arrays


def turns(sizes: Sequence[int], max_parallel: int | None) -> list[Turn]:
    """Turns of arrays of these sizes, so that no more than `max_parallel` runs of all of them are started at a time.

    Each array has its share for good, because Slurm limits one array only.
    """
    if max_parallel is None:
        return [Turn() for _ in sizes]
    if max_parallel < len(sizes):
        lanes = max_parallel
        return [Turn(max_parallel=1, after=(i - lanes,) if i >= lanes else ()) for i in range(len(sizes))]
    shares = [1 for _ in sizes]
    for _ in range(max_parallel - len(sizes)):
        neediest = max(range(len(sizes)), key=lambda i: sizes[i] / shares[i])
        shares[neediest] += 1
    return [Turn(max_parallel=share) for share in shares]


def script(folder: Path, options: Sequence[str], *, size: int, max_parallel: int | None, after: Sequence[str]) -> str:
    """The batch script of an array whose runs are the lines of `folder`/runs.txt; it comes after other arrays."""
    if after:
        flag = "#SBATCH --dependency="
        own = [line.removeprefix(flag) for line in options if line.startswith(flag)]
        options = [line for line in options if not line.startswith(flag)]
        options += [flag + ",".join([*own, "afterany:" + ":".join(after)])]
    lines = [
        "#!/bin/bash",
        *options,
        f"#SBATCH --array=0-{size - 1}" + (f"%{max_parallel}" if max_parallel else ""),
        f"#SBATCH --output={shlex.quote(str(folder / '%A_%a.log'))}",
        f'run=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(folder / "runs.txt"))})',
        'log="$run/submission/${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}_0_log"',
        'exec bash "$run/submission/element.sh" >>"$log.out" 2>>"$log.err"',
    ]
    return "\n".join(lines) + "\n"


def submit(
    runs: Sequence[tuple[RunDir, RunConfig]], *, folder: Path, max_parallel: int | None, after: Sequence[str]
) -> list[slurm.Job]:
    """Submit runs that have the same `request`, no more than `max_array_size`, as one array, behind those in `after`.

    Raises LaunchError when Slurm refuses.
    """
    place = folder / new_id()
    place.mkdir(parents=True)
    for run, config in runs:
        run.submission_path.mkdir(exist_ok=True)
        write_text(run.submission_path / "element.sh", slurm.batch_script(run, config, element=True))
    write_text(place / "runs.txt", "".join(f"{run.path}\n" for run, _ in runs))
    text = script(place, request(*runs[0]), size=len(runs), max_parallel=max_parallel, after=after)
    write_text(place / "array.sbatch", text)
    submitted_at_s = time.time()
    with slurm.submission_environment(runs[0][0]):
        array_id = slurm.tell("sbatch", "--parsable", text=text).partition(";")[0].strip()  # "id;cluster"
    return [
        slurm.Job(
            launcher=Launcher.slurm,
            job_id=f"{array_id}_{index}",
            host=socket.gethostname(),
            pid=None,
            path=str(run.path),
            submitted_at_s=submitted_at_s,
        )
        for index, (run, _) in enumerate(runs)
    ]


def max_array_size() -> int:
    """How many elements an array may have here."""
    match = re.search(r"MaxArraySize\s*=\s*(\d+)", slurm.ask("scontrol", "show", "config"))
    return int(match[1]) if match else 1001  # Slurm's own default
