"""A sweep: the runs of one `rechpc.submit -m`, in one directory, as arrays of Slurm or in turn on this machine.

A run's directory is named by what the run computes. So the same command on the same directory finds what is there,
keeps what is finished or on its way, and starts the rest again where it was. Must not know Hydra.
"""

import dataclasses
import hashlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rechpc import table
from rechpc.choices import Launcher
from rechpc.compose import Combination
from rechpc.config import CommandConfig, RunConfig
from rechpc.dataset import INDEX_NAME
from rechpc.errors import ConfigError, LaunchError
from rechpc.follow import Interrupts, follow
from rechpc.host import arrays, slurm, task
from rechpc.rules import dump
from rechpc.rundir import RunDir, SweepDir, code_sha256, new_id, read_json, write_json, write_text
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
        self,
        *,
        check: Callable[[list[CommandConfig | ConfigError]], list[RunConfig | ConfigError]],
        write: Callable[[RunConfig, RunDir], RunDir],
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
        found = _elsewhere(unique, Path(command.runs_root).absolute(), place) if settings.reuse else {}
        kept = {*alive, *found, *(e.run.path for e in unique if e.run.result_path.exists())}
        todo = [e for e in unique if e.run.path not in kept]
        requests: dict[tuple[str, ...], list[Element]] = {}
        for element in todo:
            if element.config.cluster.launcher is Launcher.slurm:
                requests.setdefault(arrays.request(element.run, element.config), []).append(element)
        if command.dry_run:
            print(_plan(unique, found, todo, list(requests.values())))
            return [None] * len(batch)
        _check_sites([group[0] for group in requests.values()])
        try:
            place.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"sweep.dir={place.path}: cannot be made: {error.strerror}; set sweep.dir=") from error
        _keep(unique, found, place)
        links = table.kept(place) | {e.run.path.name: e.overrides for e in unique if e.run.path in found}
        write_json(place.facts_path, {"objective": settings.objective, "command": self._argv, "kept": links})
        print(f"sweep       {shown(place.path)}: {len(unique)} runs, {len(todo)} to start", flush=True)
        if found:
            print(f"found       {len(found)} finished in other sweeps (sweep.reuse=false has them run again)")
        self._submit_all(list(requests.values()), place, alive, settings.max_parallel)
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
        checked = self._check([self._placed(combination.config) for combination in batch])
        for combination, pair, config in zip(batch, pairs, checked, strict=True):
            if isinstance(config, ConfigError):
                # What all combinations get wrong is said once.
                problems.setdefault(str(config), ", ".join(f"{key}={pair[key]}" for key in pair if key in swept))
                continue
            assert self._place is not None
            run = self._place.run(_run_id(config, swept))
            elements.append(Element(run=run, config=config, overrides=combination.overrides))
        if problems:
            raise ConfigError("\n".join(f"{where}: {what}" if where else what for what, where in problems.items()))
        return elements

    def _placed(self, command: CommandConfig | ConfigError) -> CommandConfig | ConfigError:
        """One combination with its runs in the directory of the sweep, or why it cannot be part of one."""
        if isinstance(command, ConfigError):
            return command
        for key in ("resume", "stage", "wait"):
            if getattr(command, key):
                return ConfigError(f"{key}=: not with -m; a sweep has sweep.dir= to continue, and sweep.wait=")
        try:
            self._place = self._place or _place(command)
        except ConfigError as error:
            return error
        return dataclasses.replace(command, runs_root=str(self._place.path.parent))

    def _directory(self, element: Element) -> None:
        """The directory of a run with its configuration, new or as a run was left."""
        if element.run.config_path.exists():
            write_text(element.run.config_path, dump(element.config))  # job.* may have changed
            return
        if element.run.path.is_symlink():  # to a run that is no longer there
            element.run.path.unlink()
        shutil.rmtree(element.run.path, ignore_errors=True)  # of a command that was killed
        place = element.run.path.parent
        self._write(element.config, RunDir.create(place.parent, place.name, element.run.path.name))

    def _submit_all(
        self, requests: list[list[Element]], place: SweepDir, alive: set[Path], max_parallel: int | None
    ) -> None:
        """An array for each set of resources, or several where the site allows no such long ones."""
        if not requests:
            return
        limit = arrays.max_array_size()
        groups = [of_one[i : i + limit] for of_one in requests for i in range(0, len(of_one), limit)]
        jobs = [job for path in sorted(alive) if (job := slurm.newest_job(RunDir(path)))]
        busy = [job.job_id.partition("_")[0] for job in jobs if job.launcher is Launcher.slurm]
        free = None if max_parallel is None else max_parallel - len(busy)
        before = sorted(set(busy)) if free is not None and free < 1 else []
        ids: list[str] = []
        for group, turn in zip(
            groups, arrays.turns([len(group) for group in groups], max_parallel if before else free), strict=True
        ):
            after = [ids[i] for i in turn.after] or before
            ids.append(self._submit(group, place, max_parallel=turn.max_parallel, after=after))

    def _submit(self, group: list[Element], place: SweepDir, *, max_parallel: int | None, after: list[str]) -> str:
        """The id of the array."""
        for element in group:
            self._directory(element)
        pairs = [(element.run, element.config) for element in group]
        try:
            jobs = arrays.submit(pairs, folder=place.arrays_path, max_parallel=max_parallel, after=after)
        except LaunchError:
            for element in group:
                if not element.run.job_path.exists():
                    shutil.rmtree(element.run.path)
            raise
        for element, job in zip(group, jobs, strict=True):
            slurm.record(element.run, job, element.overrides)
        array_id = jobs[0].job_id.removesuffix("_0")
        print(f"job         {array_id} (an array in slurm, from {jobs[0].host})")
        return array_id

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


def _elsewhere(elements: list[Element], root: Path, place: SweepDir) -> dict[Path, RunDir]:
    """For runs that are not there yet, finished ones of other sweeps that computed the same, by the path to be."""
    facts = {*root.glob("*/*/sweep.json"), *place.path.parent.glob("*/sweep.json")} - {place.facts_path}
    found = {}
    for element in elements:
        others = [RunDir(path.parent / element.run.path.name) for path in sorted(facts)]
        same = [other for other in others if _is_same(other, element.config)]
        if same and not element.run.path.exists():
            found[element.run.path] = same[0]
    return found


def _is_same(run: RunDir, config: RunConfig) -> bool:
    """Whether a run of this configuration's name has finished with today's code and data."""
    if run.path.is_symlink() or not run.result_path.exists() or config.checkpoint.init_from:
        return False
    made_of = read_json(run.provenance_path) or {}
    if made_of.get("code_sha256") != code_sha256():
        return False
    index = Path(config.data.path) / INDEX_NAME if config.data.path else None
    return index is None or not index.exists() or index.stat().st_mtime < float(made_of["written_at_s"])


def _keep(elements: list[Element], found: dict[Path, RunDir], place: SweepDir) -> None:
    """Links in this sweep to the runs that were found in others."""
    for path in (e.run.path for e in elements if e.run.path in found):
        path.unlink(missing_ok=True)  # a link to a run that is no longer there
        path.symlink_to(os.path.relpath(found[path].path, place.path))


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


def _plan(elements: list[Element], found: dict[Path, RunDir], todo: list[Element], groups: list[list[Element]]) -> str:
    """What would be submitted, with the node hours that the time limits allow."""
    swept = table.differing({e.run.path: dict(_pair(o) for o in e.overrides) for e in elements})
    array = {element.run.path: str(n) for n, group in enumerate(groups, 1) for element in group}
    rows, total = [], 0.0
    for element in elements:
        job, starts = element.config.job, element in todo
        hours = job.nodes * job.time_limit_min / 60 if starts else 0.0
        total += hours
        does = "new" if not element.run.config_path.exists() else "again" if starts else "kept"
        if other := found.get(element.run.path):
            does = f"kept, of {other.path.parent.name}"
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
