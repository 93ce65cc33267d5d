"""`cluster=rehearsal`: the job of another cluster, made small enough for the CPUs of this machine.

Nodes, ranks, rows and batches shrink; every table keeps the sharding type that the plan for the real hardware gave
it, so the same collectives move the same features. Must not know how plans are made.
"""

import glob
from dataclasses import replace
from typing import TypeVar

from rechpc.choices import Device, Kernel, Launcher, Precision, ShardingType
from rechpc.config import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    RehearsalConfig,
    RunConfig,
    ShardingConfig,
    TableSharding,
    TrainerConfig,
)
from rechpc.planned import Plan
from rechpc.rules import validate

Run = TypeVar("Run", bound=RunConfig)

_FEWEST_ROWS = 3  # of a vocabulary


def scaled(job: Run, plan: Plan) -> Run:
    """The run here that rehearses a job with this plan; `job.cluster.rehearsal` says how small it is.

    Raises ConfigError for a size that is out of range.
    """
    small = job.cluster.rehearsal
    nodes, ranks = min(small.nodes, job.job.nodes), min(small.ranks_per_node, job.ranks_per_node)
    run = replace(
        job,
        name=f"rehearsal-{job.name}"[:64],
        cluster=ClusterConfig(launcher=Launcher.local, device=Device.cpu, rehearsal=small),
        job=replace(job.job, nodes=nodes, ranks_per_node=ranks),
        sharding=_sharding(job, plan),
        data=_data(job.data, small, world_size=nodes * ranks),
        trainer=_trainer(job.trainer, small, global_batch=small.local_batch * nodes * ranks),
        # Weights of the real tables do not fit the small ones.
        checkpoint=replace(
            job.checkpoint, every=small.steps // 2, init_from=None, init_optimizer=False,
            **{f: getattr(CheckpointConfig(), f) for f in ("init_include", "init_exclude")},
        ),
    )  # fmt: skip
    validate(run)
    return run


def describe(job: RunConfig, run: RunConfig) -> str:
    """One line: what is played, and what this machine cannot do like the real one."""
    small = job.cluster.rehearsal
    parts = [
        f"of {job.job.nodes} x {job.ranks_per_node} ranks of {small.of} as {run.job.nodes} x {run.ranks_per_node} CPU "
        f"ranks: {small.row_share:g} of the rows, {small.steps} steps of {run.trainer.global_batch} samples, every "
        "table with the sharding type of that plan"
    ]
    for key in ("forward_precision", "backward_precision"):
        if (there := getattr(job.sharding, key)) != (here := getattr(run.sharding, key)):
            parts.append(f"{key}={here} for {there}, which gloo cannot")
    if {job.sharding.kernel, *(k for t in job.sharding.tables.values() for k in t.kernels)} != {Kernel.fused}:
        parts.append("all tables with the kernel fused, the only one of a CPU")
    return "; ".join(parts)


def _sharding(job: RunConfig, plan: Plan) -> ShardingConfig:
    fine = (Precision.fp32, Precision.fp16)
    forward, backward = (p if p in fine else Precision.fp16 for p in _precisions(job))
    tables = {}
    for name, table in plan["tables"].items():
        chosen = TableSharding(types=[ShardingType(table["type"])])
        if chosen.types == [ShardingType.column_wise] and table["dim"] % (width := table["shards"][0]["shape"][1]) == 0:
            chosen.column_width = width
        tables[glob.escape(name)] = chosen
    return replace(
        job.sharding, type=ShardingType.auto, kernel=Kernel.fused, column_width=None, tables=tables,
        forward_precision=forward, backward_precision=backward,
    )  # fmt: skip


def _precisions(job: RunConfig) -> tuple[Precision, Precision]:
    return job.sharding.forward_precision, job.sharding.backward_precision


def _data(data: DataConfig, small: RehearsalConfig, *, world_size: int) -> DataConfig:
    def rows(real: int) -> int:
        # A multiple of the ranks: then no rank's part of a row-wise table is empty, which FBGEMM's CPU kernel cannot.
        kept = max(_FEWEST_ROWS, round(real * small.row_share))
        return -(-kept // world_size) * world_size

    samples = small.steps * small.local_batch * world_size
    made = data.synthetic
    return replace(
        data,
        sparse=[replace(f, rows=rows(f.rows)) for f in data.sparse],
        rehearsal_rows=samples,
        verify_checksums=False,  # it would read all of a data set of which a few blocks are used
        synthetic=replace(
            made,
            train_rows=min(made.train_rows, samples),
            val_rows=min(made.val_rows, samples),
            test_rows=min(made.test_rows, samples),
        ),
    )


def _trainer(trainer: TrainerConfig, small: RehearsalConfig, *, global_batch: int) -> TrainerConfig:
    return replace(
        trainer,
        global_batch=global_batch,
        eval_global_batch=None,
        epochs=1,
        max_steps=small.steps,
        log_every=min(trainer.log_every, small.steps // 2),
        eval_every=small.steps // 2 if trainer.eval_every else 0,
    )
