"""`python -m rechpc.preflight`: would a run work on this cluster? Three stages, and a verdict on every node.

The login node is checked here, the nodes and the way between them by a job of its own, which is a run that ends
before its first step. Exit status: 0 fit, 1 not, 2 a mistake on the command line or found on the login node.
"""

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rechpc import compose, submit
from rechpc.choices import ContainerRuntime, Launcher
from rechpc.config import CommandConfig, RunConfig
from rechpc.errors import ConfigError, LaunchError
from rechpc.findings import Finding, Level, Report, problems, read_verdict, render
from rechpc.follow import Interrupts, follow
from rechpc.host import container, provenance, slurm
from rechpc.host.discover import discover
from rechpc.host.preflight import line_for_administrators
from rechpc.rundir import RunDir
from rechpc.state import excluded_nodes, shown

HELP = """
python -m rechpc.preflight cluster=CLUSTER job.nodes=N [KEY=VALUE ...]

Check the login node, then every node of a job of N nodes, then the network between them; takes a minute, trains
nothing. Give it the overrides of the run that it is for. A run of several nodes does the same by itself when it
starts; preflight.enabled=false leaves that out. discover=true, on a compute node, prints what it has as a file of
conf/cluster to start from (docs/add-your-cluster.md). All keys: preflight.* in rechpc/config.py; docs/preflight.md.
"""


def main(command: CommandConfig, overrides: list[str]) -> int:
    """Check the login node; then submit the checks of the nodes, follow them and show what they found."""
    if command.discover:
        print(discover(), end="")
        return 0
    if command.resume or command.stage:
        raise ConfigError("resume, stage: preflight is a run of its own; leave them out")
    named = any(override.startswith("name=") for override in overrides)
    config = submit.with_absolute_paths(command)
    only = dataclasses.replace(config.preflight, enabled=True, only=True)
    config = dataclasses.replace(config, preflight=only, name=config.name if named else "preflight")
    found = login(config)
    print(render([Report(node="login", findings=found)]), flush=True)
    if failed := problems(found):
        raise ConfigError(f"preflight: the login node fails: {', '.join(name.split(':')[0] for name in failed)}")
    if command.dry_run:
        return 0
    interrupts = Interrupts()
    run, job = submit.launch(None, config, None, overrides)
    print(f"run          {shown(run.path)}\njob          {job.job_id} ({job.launcher})", flush=True)
    try:
        status = follow(run, job, interrupts)
    except LaunchError as error:
        return _show(run, str(error))
    return _show(run, None) or status


def login(config: RunConfig) -> list[Finding]:
    """Everything that can be told where one types, all of it, and nothing of it queued or written."""
    planned = RunDir(Path(config.runs_root).expanduser().absolute() / config.name / "RUN_ID")
    checks: dict[str, Callable[[], None]] = {
        "batch script": lambda: slurm.check(planned, config),
        "image and binds": lambda: container.check(config.container),
        "secrets": lambda: provenance.check_secrets(config),
        "data": lambda: submit.check_data(config),
    }
    if config.cluster.launcher is Launcher.slurm:
        checks["run directory"] = lambda: submit.check_shared(Path(config.runs_root))
        checks["Slurm"] = lambda: slurm.check_site(planned, config)
    found = [Finding(check="versions", level=Level.ok, text=_versions(config))]
    if line := container.warning(config.container):
        found.append(Finding(check="versions in the image", level=Level.warning, text=line))
    for name, check in checks.items():
        try:
            check()
            found.append(Finding(check=name, level=Level.ok, text=_GOOD[name]))
        except ConfigError as error:
            found.append(Finding(check=name, level=Level.failed, text=str(error)))
    if config.cluster.launcher is Launcher.slurm and "proctrack/linuxproc" in slurm.ask("scontrol", "show", "config"):
        text = (
            "proctrack/linuxproc sends signals to every process, and a time limit then breaks containers while they "
            "save; ask the site for proctrack/cgroup"
        )
        found.append(Finding(check="signals", level=Level.warning, text=text))
    return found


_GOOD = {
    "batch script": "can be written",
    "image and binds": "there and readable",
    "secrets": "none in what is written down",
    "data": "there, and fits the run",
    "run directory": "not on a file system of one node; each node looks again",
    "Slurm": "answers, and takes the job: partition, limits, account",
}


def _versions(config: RunConfig) -> str:
    tools = [["sbatch", "--version"]] if config.cluster.launcher is Launcher.slurm else []
    tools += [["apptainer", "--version"]] if config.container.runtime is ContainerRuntime.apptainer else []
    listed = [f"{name} {version}" for name, version in provenance.versions().items()]
    for tool in tools:
        if shutil.which(tool[0]):  # Apptainer is often on the nodes only
            done = subprocess.run(tool, capture_output=True, text=True, timeout=30, check=False)
            listed.append(" ".join(done.stdout.split()))
    return ", ".join(listed)


def _show(run: RunDir, error: str | None) -> int:
    """Print every finding of the job and the verdict; returns the exit status."""
    attempts = run.attempts()
    verdict = read_verdict(attempts[-1]) if attempts else None
    if verdict is None:
        raise LaunchError(error or f"{run.path}: ended without a verdict; see {run.submission_path}")
    print(render(verdict.reports))
    # Ranks that never met, or that RCCL ended, leave no finding.
    if verdict.bad or error:
        print(verdict.line if verdict.bad else error, file=sys.stderr)
        if bad := excluded_nodes(run):
            print(f"leave them out with job.exclude={','.join(bad)}", file=sys.stderr)
            print(line_for_administrators(attempts[-1].name, bad), file=sys.stderr)
        return 1
    print(f"preflight    {verdict.line}")
    return 0


if __name__ == "__main__":
    try:
        compose.run(main, HELP)
    except KeyboardInterrupt:
        sys.exit(130)
