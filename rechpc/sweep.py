"""A sweep: the runs of one `rechpc.submit -m`, in one directory, as arrays of Slurm or in turn on this machine.

A run's directory is named by what the run computes. So the same command on the same directory finds what is there,
keeps what is finished or on its way, and starts the rest again where it was. Must not know Hydra.
"""

import dataclasses
import hashlib
import json
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rechpc import table
from rechpc.compose import Combination
from rechpc.config import CommandConfig, Launcher, RunConfig
from rechpc.errors import ConfigError, LaunchError
from rechpc.follow import Interrupts, follow
from rechpc.host import arrays, slurm, task
from rechpc.rules import dump
from rechpc.rundir import RunDir, SweepDir, new_id, read_json, write_json, write_text
from rechpc.state import entry, shown

_POLL_S = 3.0  # each asks slurmctld
# Where a run waits and how long it may take; of job.* only these are part of what it computes.
_COMPUTES = ("nodes", "ranks_per_node")


@dataclass(frozen=True, kw_only=True, slots=True)
class Element:
    """One run of a sweep."""

    run: RunDir
    config: RunConfig
    overrides: list[str]


class Sweep:
    """Takes the batches that a sweeper chooses; `check` and `write` are what submit does with a single run."""

    def __init__(
        self, *, check: Callable[[CommandConfig], RunConfig], write: Callable[[RunConfig, RunDir], RunDir]
    ) -> None:
        self.status = 0
        self._check, self._write = check, write
        self._argv = sys.argv[1:]
        self._place: SweepDir | None = None
        self._interrupts: Interrupts | None = None

    def __call__(self, batch: list[Combination]) -> list[float | None]:
        """Start what is not there yet; the objective of every run that has finished."""
        elements = self._checked(batch)
        command, place = batch[0].config, self._place
        assert isinstance(command, CommandConfig)  # or _checked would have raised
        assert place is not None
        settings = command.sweep
        unique = list({element.run.path: element for element in elements}.values())
        alive = _alive([element.run for element in unique])
        todo = [e for e in unique if not e.run.result_path.exists() and e.run.path not in alive]
        requests: dict[tuple[str, ...], list[Element]] = {}
        for element in todo:
            if element.config.cluster.launcher is Launcher.slurm:
                requests.setdefault(arrays.request(element.run, element.config), []).append(element)
        if command.dry_run:
            print(_plan(unique, todo, list(requests.values())))
            return [None] * len(batch)
        _check_sites([group[0] for group in requests.values()])
        try:
            place.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"sweep.dir={place.path}: cannot be made: {error.strerror}; set sweep.dir=") from error
        write_json(place.facts_path, {"objective": settings.objective, "command": self._argv})
        print(f"sweep       {shown(place.path)}: {len(unique)} runs, {len(todo)} to start", flush=True)
        for group in requests.values():
            self._submit(group, place, settings.max_parallel)
        print(f"status      {entry('status')} {shown(place.path)}\ncontinue    {self._again(place)}", flush=True)
        self._run_here([e for e in todo if e.config.cluster.launcher is Launcher.local])
        if settings.wait or settings.trials:
            self._wait(place, [element.run for element in unique])
        return [_objective(element.run, settings.objective) for element in elements]

    def _checked(self, batch: list[Combination]) -> list[Element]:
        """The runs of a batch. Raises one ConfigError that lists everything that cannot work."""
        pairs = [dict(_pair(o) for o in c.overrides) for c in batch]
        swept = {key for pair in pairs for key in pair if len({p.get(key) for p in pairs}) > 1}
        elements: list[Element] = []
        problems: dict[str, str] = {}
        for combination, pair in zip(batch, pairs, strict=True):
            try:
                if isinstance(combination.config, ConfigError):
                    raise combination.config
                for key in ("resume", "stage", "wait"):
                    if getattr(combination.config, key):
                        raise ConfigError(f"{key}=: not with -m; a sweep has sweep.dir= to continue, and sweep.wait=")
                place = self._place = self._place or _place(combination.config)
                config = self._check(dataclasses.replace(combination.config, runs_root=str(place.path.parent)))
                run = place.run(_run_id(config, swept))
                elements.append(Element(run=run, config=config, overrides=combination.overrides))
            except ConfigError as error:
                # What all combinations get wrong is said once.
                problems.setdefault(str(error), ", ".join(f"{key}={pair[key]}" for key in pair if key in swept))
        if problems:
            raise ConfigError("\n".join(f"{where}: {what}" if where else what for what, where in problems.items()))
        return elements

    def _directory(self, element: Element) -> None:
        """The directory of a run with its configuration, new or as a run was left."""
        if element.run.config_path.exists():
            write_text(element.run.config_path, dump(element.config))  # job.* may have changed
            return
        shutil.rmtree(element.run.path, ignore_errors=True)  # of a command that was killed
        place = element.run.path.parent
        self._write(element.config, RunDir.create(place.parent, place.name, element.run.path.name))

    def _submit(self, group: list[Element], place: SweepDir, max_parallel: int | None) -> None:
        for element in group:
            self._directory(element)
        left = {element.run.path: element for element in group}
        pairs = [(element.run, element.config) for element in group]
        try:
            for run, job in arrays.submit(pairs, folder=place.arrays_path, max_parallel=max_parallel):
                slurm.record(run, job, left.pop(run.path).overrides)
                if job.job_id.endswith("_0"):
                    print(f"job         {job.job_id.removesuffix('_0')} (an array in slurm, from {job.host})")
        except LaunchError:
            for element in left.values():
                if not element.run.job_path.exists():
                    shutil.rmtree(element.run.path)
            raise

    def _run_here(self, elements: list[Element]) -> None:
        """Run one after the other; Ctrl-C saves the one that runs, and starts no other."""
        for number, element in enumerate(elements, 1):
            interrupts = self._interrupts = self._interrupts or Interrupts()
            self._directory(element)
            chosen = [o for o in element.overrides if o not in self._argv]
            print(f"[{number}/{len(elements)}] {' '.join(chosen)}", flush=True)
            try:
                job = slurm.submit(task.HostTask(str(element.run.path)), run=element.run, config=element.config)
                slurm.record(element.run, job, element.overrides)
                follow(element.run, job, interrupts)
            except LaunchError as error:
                print(error, file=sys.stderr, flush=True)
            if interrupts.count:
                raise KeyboardInterrupt
            if not element.run.result_path.exists():
                self.status = LaunchError.exit_status

    def _wait(self, place: SweepDir, runs: list[RunDir]) -> None:
        """Wait until no run is on its way, saying what changes; Ctrl-C ends the waiting and not the jobs."""
        interrupts = self._interrupts = self._interrupts or Interrupts()
        said, idle = "", 0
        while idle < 2:  # once may be a slurmctld that did not answer
            idle = 0 if _alive(runs) else idle + 1
            if (text := table.read(place.path).summary()) != said:
                print(said := text, flush=True)
            if idle < 2 and not all(run.result_path.exists() for run in runs):
                interrupts.wait(_POLL_S)
            if interrupts.count:
                print(f"no longer waiting; the jobs go on, {entry('status')} {shown(place.path)} shows them")
                raise KeyboardInterrupt
        if not all(run.result_path.exists() for run in runs):
            self.status = LaunchError.exit_status

    def _again(self, place: SweepDir) -> str:
        arguments = [a for a in self._argv if not a.startswith("sweep.dir=")]
        return f"{entry('submit')} {shlex.join([*arguments, f'sweep.dir={shown(place.path)}'])}"


def _place(command: CommandConfig) -> SweepDir:
    if command.sweep.dir is not None:
        path = Path(command.sweep.dir).expanduser().absolute()
        if (path / "config.yaml").exists():
            raise ConfigError(f"sweep.dir={path}: is a run; expected a sweep, or a directory to be made")
        return SweepDir(path)
    name = "SWEEP_ID" if command.dry_run else f"sweep-{new_id()}"
    return SweepDir(Path(command.runs_root).expanduser().absolute() / command.name / name)


def _run_id(config: RunConfig, swept: set[str]) -> str:
    """The same for two runs that compute the same, wherever they wait and however long they may take."""
    names = [
        f.name
        for f in dataclasses.fields(RunConfig)
        if f.name not in ("runs_root", "name", "preflight") or f.name in swept
    ]
    values = {name: value for name, value in dataclasses.asdict(config).items() if name in names}
    job = {name: value for name, value in values["job"].items() if name in _COMPUTES or f"job.{name}" in swept}
    text = json.dumps({**values, "job": job}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _pair(override: str) -> tuple[str, str]:
    key, _, value = override.lstrip("+").partition("=")
    return key, value


def _alive(runs: list[RunDir]) -> set[Path]:
    """The runs that wait or run now; Slurm is asked once for all."""
    jobs = {run: job for run in runs if not run.result_path.exists() and (job := slurm.newest_job(run))}
    known = slurm.snapshot(jobs.values())
    return {run.path for run, job in jobs.items() if slurm.is_alive(job, run, known)}


def _check_sites(firsts: list[Element]) -> None:
    """Raise ConfigError that lists what the site would refuse, for the first run of every array."""
    problems = []
    for element in firsts:
        try:
            slurm.check_site(element.run, element.config)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def _plan(elements: list[Element], todo: list[Element], groups: list[list[Element]]) -> str:
    """What would be submitted, with the node hours that the time limits allow."""
    swept = table.differing({e.run.path: dict(_pair(o) for o in e.overrides) for e in elements})
    array = {element.run.path: str(n) for n, group in enumerate(groups, 1) for element in group}
    rows, total = [], 0.0
    for element in elements:
        job, starts = element.config.job, element in todo
        hours = job.nodes * job.time_limit_min / 60 if starts else 0.0
        total += hours
        does = "new" if not element.run.config_path.exists() else "again" if starts else "kept"
        row = {"run": element.run.path.name, "does": does, **swept[element.run.path]}
        row |= {"array": array.get(element.run.path, "here" if starts else ""), "nodes": str(job.nodes)}
        rows.append({**row, "limit": f"{job.time_limit_min} min", "node hours": f"{hours:.1f}" if starts else ""})
    end = f"{len(todo)} of {len(elements)} runs to start, in {len(groups)} arrays; at most {total:.1f} node hours"
    return f"{table.aligned(rows)}\n{end} for one attempt each"


def _objective(run: RunDir, name: str) -> float | None:
    """What a finished run has reached. Raises ConfigError where its result has no such number."""
    result = read_json(run.result_path)
    if result is None:
        return None
    value = result.get(name)
    if name in result and value is None:  # AUC is undefined where there is one class
        return None
    if isinstance(value, int | float):
        return float(value)
    numbers = ", ".join(sorted(key for key, v in result.items() if isinstance(v, int | float)))
    raise ConfigError(f"sweep.objective={name}: no number in {run.result_path}; expected one of {numbers}")
