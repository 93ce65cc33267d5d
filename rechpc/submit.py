"""`python -m rechpc.submit`: check a run, write its directory, hand it to the launcher, follow it where it is local.

Nothing is on disk before every check has passed, and nothing stays when the launcher refuses.
"""

import dataclasses
import re
import shlex
import shutil
import sys
from pathlib import Path

from rechpc import compose, manifest, memory, rehearsal
from rechpc.choices import DataKind, Device, Launcher
from rechpc.config import CommandConfig, RunConfig
from rechpc.dataset import check_index, read_index
from rechpc.errors import CheckpointError, ConfigError, DataError
from rechpc.follow import Interrupts, follow
from rechpc.host import container, planner, provenance, slurm, task
from rechpc.planned import Plan, render, summary
from rechpc.rules import dump, load, validate
from rechpc.rundir import RunDir, write_json, write_text
from rechpc.state import entry, read_status, result_line, shown
from rechpc.sweep import Sweep

HELP = """
python -m rechpc.submit [GROUP=OPTION ...] [KEY=VALUE ...]

Train a sharded DLRM. With no arguments: on this machine, 2 ranks, a synthetic click log.
Ctrl-C saves the run and stops it; a second Ctrl-C kills it.

Common overrides
  cluster=slurm                   submit to Slurm instead of running here
  cluster=rehearsal cluster.rehearsal.of=mi300x   play the job of that cluster here, small; docs/sharding.md
  job.ranks_per_node=3            ranks (GPUs) on each node; job.nodes=4 for more nodes
  model=dlrm_dcnv2                another model
  sharding=row_wise               how tables are spread over ranks
  trainer.global_batch=4096       samples in one step, over all ranks
  trainer.max_steps=200           stop early
  experiment=criteo_8k data.path=DATA   real data, prepared with python -m rechpc.prepare
  runs_root=DIR name=NAME         the run directory is DIR/NAME/RUN_ID

  dry_run=true                    print what would be submitted, and the memory that tables take
  -m optimizer.learning_rate=0.01,0.03 seed=1,2   a sweep; docs/sweeps.md
  force=true                      submit although no plan fits; python -m rechpc.plan says what would
  resume=RUN_DIR                  continue a run, with job.*, checkpoint.*, sharding.* changed if need be
  --cfg job                       print the composed configuration; all keys: rechpc/config.py

See how a run stands with python -m rechpc.status RUN_DIR; README.md has a first real run.
"""

# What a resumed run may change: nothing that decides which samples it sees, or what it has learned from them.
_RESUMABLE = re.compile(
    r"(job|preflight|checkpoint|sharding)\.\w+|trainer\.(max_steps|epochs|log_every|eval_every|profile_steps)|"
    r"data\.verify_checksums"
)


def main(command: CommandConfig, overrides: list[str]) -> int:
    """Submit, resume or dry-run what the command line says; returns the exit status."""
    if command.resume is None:
        run = None
        config: RunConfig = _run_of(command)
    else:
        run = RunDir.open(command.resume)
        config = _resumed(run, command, overrides)
    check_data(config)
    planned = run or RunDir(Path(config.runs_root).expanduser().absolute() / config.name / "RUN_ID")
    slurm.check(planned, config)
    if command.dry_run:
        print(_dry_run(planned, config))
        return 0
    _check_here(config, command)
    if line := container.warning(config.container):
        print(f"warning     {line}")
    if config.cluster.launcher is Launcher.slurm and not command.stage:
        slurm.check_site(planned, config)
    plan = _check_fits(config, force=command.force)
    if command.stage:
        run = run or _write(config, RunDir.create(Path(config.runs_root), config.name), plan)
        write_text(run.config_path, dump(config))
        template = "single_node" if config.job.nodes == 1 else "multi_node"
        print(f"run         {shown(run.path)}\nnext        sbatch slurm/{template}.sbatch {run.path}")
        return 0
    interrupts = Interrupts()
    run, job = launch(run, config, plan, overrides)
    print(f"run         {shown(run.path)}")
    print(f"job         {job.job_id} ({job.launcher}, from {job.host})")
    print(f"status      {entry('status')} {shown(run.path)}", flush=True)
    return follow(run, job, interrupts) if job.launcher is Launcher.local or command.wait else 0


def sweep() -> Sweep:
    """What is done with the combinations of a sweeper."""
    return Sweep(check=_checked, write=_write)


def _checked(commands: list[CommandConfig | ConfigError]) -> list[RunConfig | ConfigError]:
    """The runs of the combinations of a sweep, or why they cannot work, but for what the site refuses."""
    found: list[CommandConfig | ConfigError] = []
    for command in commands:
        try:
            found.append(command if isinstance(command, ConfigError) else _unplanned(command))
        except ConfigError as error:
            found.append(error)
    # One child process plans all, and each finds its answer in the cache below.
    planner.answers([run for run in found if isinstance(run, CommandConfig) and _asks_planner(run)])
    checked: list[RunConfig | ConfigError] = []
    for run in found:
        try:
            if isinstance(run, CommandConfig) and not run.dry_run:
                _check_fits(run, force=run.force)
            checked.append(run)
        except ConfigError as error:
            checked.append(error)
    return checked


def _unplanned(command: CommandConfig) -> CommandConfig:
    """The run of one combination, checked but for its plan."""
    run = _run_of(command)
    check_data(run)
    slurm.check(RunDir(Path(run.runs_root).absolute()), run)
    if not run.dry_run:
        _check_here(run, command)
    return run


def _asks_planner(config: CommandConfig) -> bool:
    """Whether `_check_fits` will."""
    try:
        memory.check(config)
    except ConfigError:
        return False
    return config.cluster.device is not Device.cpu and not config.dry_run and planner.has_torch(config)


def _run_of(command: CommandConfig) -> CommandConfig:
    """The run that a command line means: itself, or one that rehearses it here, once it is known to fit there."""
    job = with_absolute_paths(command)
    _check_warm_start(job)
    if job.cluster.rehearsal.of is None:
        return job
    check_data(job)
    (answer,) = planner.answers([job])
    if "error" in answer:
        raise ConfigError("; ".join([answer["error"], *(f"{change} fits" for change in answer["advice"])]))
    print(f"plan        {summary(answer['plan'], job)}")
    run = rehearsal.scaled(job, answer["plan"])
    print(f"rehearsal   {rehearsal.describe(job, run)}")
    return run


def _check_here(config: RunConfig, command: CommandConfig) -> None:
    """Raise ConfigError for what is not there, or in a place that other nodes do not see."""
    container.check(config.container)
    provenance.check_secrets(config)
    if config.cluster.launcher is Launcher.slurm and not command.stage:
        check_shared(Path(config.runs_root))


def _check_fits(config: RunConfig, *, force: bool) -> Plan | None:
    """The plan that the ranks of a GPU run will use, where it can be made here. Raises ConfigError if nothing fits.

    On CPUs the arithmetic is all: their ranks plan within seconds, and before anybody waits in a queue for memory.
    """
    try:
        memory.check(config)
        if config.cluster.device is Device.cpu:
            return None
        if not planner.has_torch(config):
            print("plan        not made here, without torch or an image; memory was checked by arithmetic alone")
            return None
        (answer,) = planner.answers([config])
        if "error" in answer:
            raise ConfigError("; ".join([answer["error"], *(f"{change} fits" for change in answer["advice"])]))
    except ConfigError as error:
        if not force:
            raise ConfigError(f"{error}; force=true submits all the same") from error
        print(f"force=true  {error}")
        return None
    print(f"plan        {summary(answer['plan'], config)}")
    plan: Plan = answer["plan"]
    return plan


def _write(config: RunConfig, run: RunDir, plan: Plan | None = None) -> RunDir:
    """Fill a new run directory with everything that an attempt needs."""
    try:
        provenance.write(run)
        write_text(run.config_path, dump(config))
        if plan:
            write_json(run.plan_path, plan)
            write_text(run.plan_text_path, render(plan, config))
    except BaseException:
        shutil.rmtree(run.path)
        raise
    return run


def launch(run: RunDir | None, config: RunConfig, plan: Plan | None, overrides: list[str]) -> tuple[RunDir, slurm.Job]:
    """Write the run directory (or the new configuration of a resumed run) and submit it; undone if that fails."""
    before = run.config_path.read_text() if run else None
    run = run or _write(config, RunDir.create(Path(config.runs_root), config.name), plan)
    try:
        write_text(run.config_path, dump(config))
        job = slurm.submit(task.HostTask(str(run.path)), run=run, config=config)
    except BaseException:
        if before is None:
            shutil.rmtree(run.path)
        else:
            write_text(run.config_path, before)
        raise
    slurm.record(run, job, overrides)
    return run, job


def check_shared(root: Path) -> None:
    """Raise ConfigError for a place that other nodes certainly do not see."""
    place = root.expanduser().absolute()
    for local in (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), Path("/run")):
        if place.is_relative_to(local):
            raise ConfigError(
                f"runs_root={root}: {local} is a node's own; set runs_root= to a file system that all nodes share"
            )


def with_absolute_paths(config: CommandConfig) -> CommandConfig:
    """The same run from any working directory: ranks start elsewhere, and a resume may come from elsewhere."""
    data, image = config.data, config.container.image
    return dataclasses.replace(
        config,
        data=dataclasses.replace(data, path=_absolute(data.path), source=_absolute(data.source)),
        container=dataclasses.replace(config.container, image=_absolute(image)),
        checkpoint=dataclasses.replace(config.checkpoint, init_from=_absolute(config.checkpoint.init_from)),
    )


def _absolute(path: str | None) -> str | None:
    return path and str(Path(path).expanduser().absolute())


def _check_warm_start(config: RunConfig) -> None:
    source = config.checkpoint.init_from
    try:
        if source:
            manifest.locate(Path(source))
    except CheckpointError as error:
        raise ConfigError(f"checkpoint.init_from={error}") from error


def check_data(config: RunConfig) -> None:
    """Raise ConfigError unless the prepared data set is there and fits; synthetic data was checked by validate."""
    data, batch = config.data, config.trainer.global_batch
    if data.kind is DataKind.synthetic:
        return
    if data.path is None:
        raise ConfigError(
            f"data.path=null: data.kind={data.kind} needs a prepared data set; make one with "
            "python -m rechpc.prepare data.source=DIR data.path=DATA and set data.path=DATA"
        )
    try:
        index = read_index(Path(data.path))
        check_index(index, data)
    except DataError as error:
        raise ConfigError(str(error)) from error
    rows = {name: index.splits[name].rows if name in index.splits else 0 for name in ("train", "test")}
    if rows["train"] < batch:
        raise ConfigError(
            f"trainer.global_batch={batch}: the train split of {data.path} has {rows['train']} samples, "
            "fewer than one global batch; make it smaller"
        )
    if config.trainer.eval_every and not (index.splits["val"].rows if "val" in index.splits else 0):
        raise ConfigError(f"trainer.eval_every={config.trainer.eval_every}: {data.path} has no val split; set it to 0")
    if not rows["test"]:
        raise ConfigError(
            f"data.path={data.path}: the test split is empty, and a run ends with an evaluation; prepare one"
        )


def _resumed(run: RunDir, command: CommandConfig, overrides: list[str]) -> RunConfig:
    """The configuration of a run to continue, with the overrides on top. Raises ConfigError when it cannot be."""
    status = read_status(run)
    if status.result:
        raise ConfigError(
            f"resume={run.path}: finished ({result_line(status.result)}); to train further, start a new run "
            "with a larger trainer.epochs or trainer.max_steps"
        )
    if status.job and slurm.is_alive(status.job, run):
        if status.job.launcher is Launcher.slurm:
            raise ConfigError(
                f"resume={run.path}: job {status.job.job_id} is still there; `scancel {status.job.job_id}` ends it"
            )
        pid = status.job.pid
        raise ConfigError(
            f"resume={run.path}: still running as process {pid}; `kill {pid}` makes it save and stop, "
            f"python -m rechpc.status {run.path} shows it"
        )
    config = load(run.config_path)
    problems = []
    for override in overrides:
        key = override.partition("=")[0]
        key = key if key != "+sharding.tables" else key[1:]  # the only one that needs the plus
        if key in ("resume", "dry_run", "wait", "stage", "force"):
            continue
        if _RESUMABLE.fullmatch(key):
            # The composed configuration holds the value already, parsed and of the right type.
            section, name = key.split(".")
            setattr(getattr(config, section), name, getattr(getattr(command, section), name))
        else:
            problems.append(f"{override}: {_why_refused(key)}")
    if problems:
        raise ConfigError("\n".join(problems))
    validate(config)
    return config


def _why_refused(key: str) -> str:
    allowed = (
        "job.*, preflight.*, checkpoint.*, sharding.*, trainer.max_steps, .epochs, .log_every, .eval_every, "
        ".profile_steps and "
        "data.verify_checksums"
    )
    if re.fullmatch(r"\w+", key) and (compose.CONF_PATH / key).is_dir():
        return f"a resumed run cannot change a whole group; it can change single keys: {allowed}"
    return f"a resumed run keeps it, for it decides what is learned from which samples; it can change {allowed}"


def _dry_run(run: RunDir, config: RunConfig) -> str:
    """Everything that would be submitted, and the memory that it needs."""
    if config.cluster.launcher is Launcher.slurm:
        script = slurm.batch_script(run, config)
        rendezvous = task.Rendezvous(host="NODE_0", port=0) if config.machines > 1 else None
    else:
        script = f"none, cluster.launcher=local starts\n{slurm.local_command(run)}"
        rendezvous = None
    ranks = task.command(run, config, attempt_name="JOB_ID.0", rendezvous=rendezvous)
    parts = {
        "configuration": dump(config),
        "batch script": script,
        "ranks: started once per node by the host task, here node 0": shlex.join(ranks),
        "memory of tables and optimizer": memory.report(config),
    }
    return "\n\n".join(f"# {title}\n{text.strip()}" for title, text in parts.items())


if __name__ == "__main__":
    try:
        compose.run(main, HELP, sweep=sweep)
    except KeyboardInterrupt:
        sys.exit(130)
