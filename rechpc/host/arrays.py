"""Many runs at once: what is submitted of a sweep, as arrays of Slurm.

One array holds the runs that ask Slurm for the same. An element of it runs the batch script of its run, as if that had
been submitted alone, so that requeueing, draining and giving up are the same. Must not know what a sweep is.
"""

import itertools
import re
import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rechpc.config import Launcher, RunConfig
from rechpc.host import slurm
from rechpc.rundir import RunDir, write_text


def request(run: RunDir, config: RunConfig) -> tuple[str, ...]:
    """What a run asks Slurm for: the options of its batch script, without its own paths."""
    lines = itertools.takewhile(lambda line: line != "# setup", slurm.batch_script(run, config).splitlines())
    own = ("#SBATCH --output=", "#SBATCH --error=")
    return tuple(line for line in lines if line.startswith("#SBATCH ") and not line.startswith(own))


def script(folder: Path, options: Sequence[str], *, size: int, max_parallel: int | None) -> str:
    """The batch script of an array whose runs are the lines of `folder`/runs.txt."""
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
    runs: Sequence[tuple[RunDir, RunConfig]], *, folder: Path, max_parallel: int | None
) -> Iterator[tuple[RunDir, slurm.Job]]:
    """Submit runs that have the same `request`, as one array where the site allows so many elements.

    Raises LaunchError when Slurm refuses; what was yielded before is submitted.
    """
    limit = max_array_size()
    options = request(*runs[0])
    for first in range(0, len(runs), limit):
        part = runs[first : first + limit]
        place = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{part[0][0].path.name}"
        place.mkdir(parents=True)
        for run, config in part:
            run.submission_path.mkdir(exist_ok=True)
            write_text(run.submission_path / "element.sh", slurm.batch_script(run, config, element=True))
        write_text(place / "runs.txt", "".join(f"{run.path}\n" for run, _ in part))
        text = script(place, options, size=len(part), max_parallel=max_parallel)
        write_text(place / "array.sbatch", text)
        submitted_at_s = time.time()
        with slurm.submission_environment(part[0][0]):
            array_id = slurm.tell("sbatch", "--parsable", text=text).partition(";")[0].strip()  # "id;cluster"
        for index, (run, _) in enumerate(part):
            yield (
                run,
                slurm.Job(
                    launcher=Launcher.slurm,
                    job_id=f"{array_id}_{index}",
                    host=socket.gethostname(),
                    pid=None,
                    path=str(run.path),
                    submitted_at_s=submitted_at_s,
                ),
            )


def max_array_size() -> int:
    """How many elements an array may have here."""
    match = re.search(r"MaxArraySize\s*=\s*(\d+)", slurm.ask("scontrol", "show", "config"))
    return int(match[1]) if match else 1001  # Slurm's own default
