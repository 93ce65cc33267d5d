"""The typed configuration: every key, its unit, its range and its default.

Hydra composes `conf/` against these classes on the login node; `rechpc.rules` says what must hold between the keys.
Must not know anything else.
"""

from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import MISSING

from rechpc.choices import (
    BadRows,
    ContainerRuntime,
    DataKind,
    DenseOptimizer,
    DenseTransform,
    Device,
    GpuRequest,
    IdMapping,
    Interaction,
    KeepBest,
    Kernel,
    Launcher,
    NumaBinding,
    Pooling,
    Precision,
    ShardingType,
    SparseOptimizer,
    TablePrecision,
)

AUTO = "auto"
"""A value of `checkpoint.every`."""


def option(default: Any, doc: str, *, low: float | None = None, high: float | None = None) -> Any:
    """A documented configuration key; `low` and `high` are inclusive bounds, also for list elements."""
    metadata = {"doc": doc, "low": low, "high": high}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True, slots=True)
class RehearsalConfig:
    """How small the job of another cluster is made for the CPUs of this machine (see rechpc.rehearsal)."""

    of: str | None = option(None, "option of cluster= that the job will have; null: no rehearsal")
    nodes: int = option(2, "nodes that are played, or as many as the job has if that is fewer", low=1)
    ranks_per_node: int = option(2, "ranks on each, or as many as the job has if that is fewer", low=1)
    row_share: float = option(0.001, "share of its rows that a table keeps", low=1e-9, high=1)
    local_batch: int = option(16, "samples of one rank in one step", low=1)
    steps: int = option(20, "steps; half-way a checkpoint", low=2)


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """What exists: the launcher and the hardware of one node."""

    launcher: Launcher = option(MISSING, "local (this machine) or slurm")
    device: Device = option(MISSING, "cpu, or cuda (also the name of a ROCm GPU in torch)")
    ranks_per_node: int | None = option(None, "ranks a node always has (its GPUs); null: the job decides", low=1)
    gpu_request: GpuRequest = option(GpuRequest.none, "option of sbatch that asks for a GPU for each rank")
    gpu_arch: str | None = option(None, "GPU to plan for, as gfx942 or sm_90; a run stops on any other; null: any")
    hbm_gib: float = option(0.0, "memory of one GPU; 0 on a CPU", low=0)
    host_memory_gib: float | None = option(None, "memory of one node; null: detected where the ranks run", low=1)
    hbm_gb_per_s: float = option(1.0, "bandwidth of one GPU's memory", low=0.001)
    host_memory_gb_per_s: float = option(16.0, "bandwidth of a rank's share of host memory", low=0.001)
    intra_node_gb_per_s: float = option(0.5, "bandwidth of a rank to the others of its node", low=0.001)
    inter_node_gb_per_s: float = option(0.5, "bandwidth of a rank to other nodes", low=0.001)
    host_to_gpu_gb_per_s: float = option(32.0, "bandwidth of a GPU to host memory, for tables kept there", low=0.001)
    dense_tflops: float = option(0.1, "peak of one rank in float32 matrix products, for the roofline", low=0.001)
    storage_gb_per_s: float = option(1.0, "what one node writes to runs_root, for the time of a save", low=0.001)
    rehearsal: RehearsalConfig = field(default_factory=RehearsalConfig)
    env: dict[str, str] = option({}, "environment variables that ranks need here; container.env wins")
    binds: list[str] = option([], "bind mounts that a container needs here, as source[:target[:ro]]")
    sbatch: dict[str, str] = option({}, "options of sbatch that every job needs here; job.sbatch wins")
    rank_cpus: list[str] = option([], "CPUs of each rank of a whole node, in the order of its GPUs, as 1-7,64-70")
    numa_binding: NumaBinding = option(NumaBinding.none, "CPUs by torchrun (torch 2.9): none, node, socket, exclusive")


@dataclass(kw_only=True, slots=True)
class ContainerConfig:
    """What the ranks run in."""

    runtime: ContainerRuntime = option(ContainerRuntime.none, "none (this Python) or apptainer")
    image: str | None = option(None, "path of the .sif image")
    binds: list[str] = option([], "further bind mounts, as source[:target[:ro]]")
    env: dict[str, str] = option({}, "environment variables set for the ranks")


@dataclass(kw_only=True, slots=True)
class JobConfig:
    """What this run asks for. Keys named as in sbatch mean what sbatch says; null leaves them to the site."""

    nodes: int = option(1, "nodes", low=1)
    ranks_per_node: int | None = option(None, "ranks on each node; null: what the cluster says, else 2", low=1)
    time_limit_min: int = option(24 * 60, "time limit of one attempt", low=1)
    signal_lead_s: float = option(120.0, "how long before its time limit an attempt is asked to save and stop", low=1)
    stop_timeout_s: float = option(600.0, "how long a stopping run may take to save before it is killed", low=1)
    hang_timeout_s: float | None = option(None, "no progress for so long is a crash; null: from the step time", low=1)
    max_attempts: int = option(3, "crashes after which a run is given up", low=1)
    partition: str | None = option(None, "partition")
    account: str | None = option(None, "account")
    qos: str | None = option(None, "quality of service")
    constraint: str | None = option(None, "features that nodes must have")
    reservation: str | None = option(None, "reservation")
    nodelist: str | None = option(None, "nodes that must be among those of the job")
    exclude: str | None = option(None, "nodes that must not be")
    dependency: str | None = option(None, "jobs to wait for, as afterany:123")
    mail_user: str | None = option(None, "who is told of the job")
    mail_type: str | None = option(None, "what is told, as END,FAIL,REQUEUE")
    exclusive: bool | None = option(None, "whole nodes; null: if the job takes all ranks that a node has")
    cpus_per_rank: int | None = option(None, "CPUs for each rank; null: 1, or all of an exclusive node", low=1)
    memory_gib: int | None = option(None, "memory of each node; 0: all of it", low=0)
    sbatch: dict[str, str] = option({}, "further options of sbatch by name, as +job.sbatch.comment=text or .hold=true")
    srun: list[str] = option([], "further arguments of srun")
    setup: list[str] = option([], "shell lines of the batch script in front of srun, such as module load")


@dataclass(kw_only=True, slots=True)
class PreflightConfig:
    """What is checked before a run of several nodes takes its first step (docs/preflight.md)."""

    enabled: bool = option(True, "check every node and the network between them when a run of several nodes starts")
    only: bool = option(False, "end after the checks, on one node too; what python -m rechpc.preflight sets")
    timeout_s: float = option(180.0, "how long the nodes may take for a stage, the import of torch included", low=1)
    min_free_gib: float = option(1.0, "free space in the temporary directory of each node, and its /dev/shm", low=0)
    min_memory_gib: float = option(1.0, "free host memory of each node", low=0)
    devices: list[str] = option([], "device files that ranks need beside those of AMD GPUs, as /dev/infiniband/uverbs0")
    libraries: list[str] = option([], "libraries that must load in the container, as librccl-net.so")
    max_clock_skew_s: float = option(5.0, "how far the clock of a node may be from the median", low=0.001)
    min_bandwidth_share: float | None = option(None, "share of cluster.*_gb_per_s to reach; null: 0.3, CPUs 0", low=0)
    straggler_factor: float = option(2.0, "a rank that computes so many times slower than the median is named", low=1)
    allow_sockets: bool = option(False, "go on where RCCL has fallen back to sockets between nodes")


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Shape of a DLRM (https://arxiv.org/abs/1906.00091) or DLRM-DCNv2 (https://arxiv.org/abs/2008.13535)."""

    embedding_dim: int = option(MISSING, "columns of every table, a multiple of 4", low=4)
    table_precision: TablePrecision = option(TablePrecision.fp32, "of the weights of tables; optimizer state is fp32")
    dense_layers: list[int] = option([], "widths of the bottom MLP; the last is embedding_dim", low=1)
    over_layers: list[int] = option([], "widths of the top MLP; the last is 1", low=1)
    interaction: Interaction = option(MISSING, "dot (DLRM) or dcn (low-rank cross network)")
    dcn_layers: int = option(3, "cross layers, for interaction=dcn", low=1)
    dcn_rank: int = option(512, "rank of the cross matrices, for interaction=dcn", low=1)


@dataclass(kw_only=True, slots=True)
class TableSharding:
    """What the planner may do with some tables; null and [] leave it to the keys of all tables."""

    types: list[ShardingType] = option([], "sharding types to choose from")
    kernels: list[Kernel] = option([], "kernels to choose from")
    column_width: int | None = option(None, "columns of a column shard", low=4)
    cache_load_factor: float | None = option(None, "share of the rows that fused_uvm_caching caches", low=0.001, high=1)


@dataclass(kw_only=True, slots=True)
class ShardingConfig:
    """How tables are spread over ranks."""

    type: ShardingType = option(ShardingType.auto, "sharding type of every table, or auto")
    kernel: Kernel = option(Kernel.fused, "kernel of every table (data_parallel tables have one of their own)")
    column_width: int | None = option(None, "columns of a column shard; null: an even split, 32 or more", low=4)
    cache_load_factor: float = option(0.2, "share of the rows that fused_uvm_caching caches", low=0.001, high=1)
    tables: dict[str, TableSharding] = option({}, "the same for tables by pattern, as {t_cat_2*: {types: [row_wise]}}")
    forward_precision: Precision = option(Precision.fp32, "of pooled embeddings on their way between ranks")
    backward_precision: Precision = option(Precision.fp32, "of their gradients")
    reserve: float = option(0.15, "share of GPU memory kept free of tables", low=0, high=0.95)
    replicas: int = option(1, "groups of ranks with all tables each (2D); only 1, see docs/decisions/0010", low=1)

    def of(self, table: str) -> TableSharding:
        """What holds for a table: of every key the last pattern that matches the name and sets it, else that of all."""
        found = TableSharding(
            types=[self.type], kernels=[self.kernel],
            column_width=self.column_width, cache_load_factor=self.cache_load_factor,
        )  # fmt: skip
        for pattern, chosen in self.tables.items():
            if fnmatchcase(table, pattern):
                set_here = {f.name: v for f in fields(chosen) if (v := getattr(chosen, f.name))}
                found = replace(found, **set_here)
        return found


@dataclass(kw_only=True, slots=True)
class SparseFeature:
    """One categorical feature; several may share a table by naming it."""

    name: str = option(MISSING, "column of the data set")
    rows: int = option(MISSING, "rows of its table: ids are 0 to rows - 1", low=1, high=2**31 - 1)
    table: str | None = option(None, "table to share; null: a table of its own, named t_<name>")
    ids_per_sample: float = option(1.0, "mean ids in one sample (pooling factor); 1: no list, exactly one", low=0)
    pooling: Pooling = option(Pooling.sum, "sum or mean of the embeddings of a sample's ids")
    mapping: IdMapping = option(IdMapping.hash, "how prepare makes ids: hash, vocabulary or as_is")
    min_count: int = option(1, "for vocabulary: rarer values of the train split share one id", low=1)

    @property
    def table_name(self) -> str:
        return self.table or f"t_{self.name}"


@dataclass(kw_only=True, slots=True)
class SyntheticConfig:
    """Size and difficulty of the synthetic click log (data.kind=synthetic)."""

    train_rows: int = option(400_000, "samples to train on", low=1)
    val_rows: int = option(20_000, "samples for evaluation during training", low=0)
    test_rows: int = option(50_000, "samples for the final evaluation", low=1)
    id_skew: float = option(1.05, "exponent of the power law of ids", low=0, high=3)
    signal: float = option(1.8, "standard deviation of the teacher's logit", low=0)
    label_noise: float = option(0.05, "share of labels replaced by a coin toss", low=0, high=1)


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """The data set: its features and where it is."""

    kind: DataKind = option(MISSING, "synthetic (made on the fly), or what rechpc.prepare reads (docs/data.md)")
    source: str | None = option(None, "raw files, read by rechpc.prepare")
    path: str | None = option(None, "prepared data set, written by rechpc.prepare and read by the ranks")
    seed: int = option(0, "seed of the synthetic log and of the shuffle at conversion", low=0)
    verify_checksums: bool = option(True, "read all of a prepared data set once before step 1, each rank its share")
    block_rows: int = option(8192, "rows that are stored, shuffled and read together", low=1)
    dense: list[str] = option([], "names of the dense features")
    sparse: list[SparseFeature] = option([], "the sparse features")
    columns: dict[str, str] = option({}, "source column of the label or a feature, where it has another name")
    dense_transform: DenseTransform = option(DenseTransform.log1p, "log1p, standard or none")
    dense_transforms: dict[str, DenseTransform] = option({}, "the same for single features that differ")
    separator: str = option(",", "for kind=csv: what separates columns, or tab")
    list_separator: str = option("|", "for kind=csv: what separates the ids of a list")
    bad_rows: BadRows = option(BadRows.fail, "what prepare does about a bad row: fail, skip it or fix it")
    max_bad_rows: int = option(1000, "bad rows that are skipped or fixed before prepare gives up", low=0)
    rehearsal_rows: int | None = option(None, "samples of a split in a rehearsal, ids folded; null: none", low=1)
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)

    def mappings(self) -> dict[str, str]:
        """What is done to the values of each feature, in words that change when the result does."""
        dense = {name: str(self.dense_transforms.get(name, self.dense_transform)) for name in self.dense}
        counts = {f.name: f" min_count={f.min_count}" * (f.mapping is IdMapping.vocabulary) for f in self.sparse}
        return dense | {f.name: f"{f.mapping}{counts[f.name]}" for f in self.sparse}

    def tables(self) -> "dict[str, Table]":
        """Tables by name, in the order in which features first name them."""
        tables: dict[str, Table] = {}
        for feature in self.sparse:
            name = feature.table_name
            table = tables.setdefault(name, Table(name=name, rows=feature.rows, features=[]))
            table.features.append(feature)
        return tables


@dataclass(kw_only=True, slots=True)
class Table:
    """One embedding table and the features that look it up."""

    name: str
    rows: int
    features: list[SparseFeature]


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """Optimizers and the learning-rate schedule, shared by both (see rechpc.rank.optim)."""

    sparse: SparseOptimizer = option(MISSING, "optimizer of the tables, fused into the backward pass")
    dense: DenseOptimizer = option(MISSING, "optimizer of everything else")
    learning_rate: float = option(MISSING, "learning rate of the tables", low=0)
    dense_learning_rate: float | None = option(None, "learning rate of the rest; null: learning_rate", low=0)
    eps: float = option(1e-8, "added to the root of the second moment (Adagrad, Adam)", low=0)
    warmup_steps: int = option(0, "steps of linear warm-up", low=0)
    decay_start_step: int = option(0, "step at which polynomial decay begins", low=0)
    decay_steps: int = option(0, "steps of decay; 0: none", low=0)
    decay_power: float = option(2.0, "power of the decay", low=0)
    min_learning_rate: float = option(1e-7, "floor of the decayed learning rate", low=0)


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """Batches, steps and what is reported when."""

    global_batch: int = option(2048, "samples in one step, over all ranks", low=1)
    eval_global_batch: int | None = option(None, "the same in evaluation; null: global_batch", low=1)
    epochs: int = option(1, "passes over the training split", low=1)
    max_steps: int | None = option(None, "stop after this many steps; null: epochs decide", low=1)
    log_every: int = option(10, "steps between two records in metrics.jsonl", low=1)
    eval_every: int = option(0, "steps between two evaluations of the val split; 0: none", low=0)
    timing_warmup_steps: int = option(5, "first steps of an attempt that samples/s leaves out", low=0)
    profile_steps: list[int] = option([], "steps to trace for Perfetto, as [10] or first and last [10,12]", low=1)
    collective_timeout_s: float = option(600.0, "a collective that takes longer ends the attempt", low=1)


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When the run saves itself, what it keeps, and what it starts from."""

    every: int | str = option(100, "steps between two checkpoints; 0: only at the end and when stopped; auto", low=0)
    asynchronous: bool = option(True, "write beside training, from a copy in host memory")
    keep: int = option(3, "newest checkpoints that are kept", low=1)
    keep_every: int = option(0, "checkpoints of steps that this divides are kept for good; 0: none", low=0)
    keep_best: KeepBest = option(KeepBest.none, "metric of the val split by which the best is kept too, or none")
    max_failures: int = option(2, "saves in a row that fail before the run is stopped", low=1)
    node_mtbf_h: float = option(3600.0, "mean hours between failures of one node, for every=auto", low=0.01)
    init_from: str | None = option(None, "run or checkpoint directory that a new run takes its weights from")
    init_include: list[str] = option(["*"], "names of the tensors to take, with * and ?")
    init_exclude: list[str] = option([], "names of those not to take")
    init_optimizer: bool = option(False, "take the state of the optimizers too")


@dataclass(kw_only=True, slots=True)
class ExpectedConfig:
    """What others reach with this configuration; shown beside the result, and changes nothing."""

    auc: float | None = option(None, "AUC of the val or the test split; null: nothing is expected", low=0, high=1)
    source: str = option("", "who says so, of what, and when in a training")


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """One run: what `config.yaml` in the run directory holds."""

    name: str = option("dlrm", "first part of the run directory's name")
    seed: int = option(1, "seed of initial weights and of the order of samples", low=0)
    runs_root: str = option("runs", "where run directories go")
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)
    job: JobConfig = field(default_factory=JobConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    expected: ExpectedConfig = field(default_factory=ExpectedConfig)

    @property
    def ranks_per_node(self) -> int:
        return self.job.ranks_per_node or self.cluster.ranks_per_node or 2

    @property
    def world_size(self) -> int:
        return self.job.nodes * self.ranks_per_node

    @property
    def machines(self) -> int:
        """Nodes that are really there; in a rehearsal one plays them all."""
        return 1 if self.cluster.launcher is Launcher.local else self.job.nodes


@dataclass(kw_only=True, slots=True)
class SweepConfig:
    """What a command with -m does with its runs."""

    dir: str | None = option(None, "sweep directory, to continue one; null: a new one in runs_root")
    max_parallel: int | None = option(None, "runs of the sweep that Slurm starts at a time; null: all", low=1)
    reuse: bool = option(True, "take finished runs of other sweeps in runs_root that computed the same")
    wait: bool = option(False, "wait for the runs and give their objective to the sweeper; local runs always do")
    objective: str = option("test_auc", "number in result.json to compare runs by; NE, losses, times are minimized")
    trials: int | None = option(None, "let Optuna choose the values of so many runs; null: all combinations", low=1)


@dataclass(kw_only=True, slots=True)
class CommandConfig(RunConfig):
    """A run and what the command line does with it; the extra keys are not part of the run."""

    dry_run: bool = option(False, "print what would be submitted, and submit nothing")
    resume: str | None = option(None, "run directory to continue")
    stage: bool = option(False, "write the run directory and submit nothing, for slurm/*.sbatch")
    wait: bool = option(False, "follow a Slurm job to its end; a local run is always followed")
    sweep: SweepConfig = field(default_factory=SweepConfig)
    force: bool = option(False, "submit although no plan fits")
    out: str | None = option(None, "rechpc.plan: where to write plan.json too")
    discover: bool = option(False, "rechpc.preflight: print what this node has, as a file of conf/cluster")
