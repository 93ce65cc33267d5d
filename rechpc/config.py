"""The typed configuration: every key, its unit, its range, and the rules between keys.

Hydra composes `conf/` against these classes on the login node; everything later reads the one resolved
`config.yaml` with `load`. Must not know torch, Hydra, Slurm or the run directory.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from rechpc.errors import ConfigError


def option(default: Any, doc: str, *, low: float | None = None, high: float | None = None) -> Any:
    """A documented configuration key; `low` and `high` are inclusive bounds, also for list elements."""
    metadata = {"doc": doc, "low": low, "high": high}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class Launcher(StrEnum):
    local = "local"
    slurm = "slurm"


class Device(StrEnum):
    """As torch names them: a ROCm GPU is "cuda" there."""

    cpu = "cpu"
    cuda = "cuda"


class ContainerRuntime(StrEnum):
    none = "none"
    apptainer = "apptainer"


class Interaction(StrEnum):
    dot = "dot"
    dcn = "dcn"


class ShardingType(StrEnum):
    """TorchRec's names; `auto` lets its planner choose for every table."""

    auto = "auto"
    table_wise = "table_wise"
    column_wise = "column_wise"
    row_wise = "row_wise"
    data_parallel = "data_parallel"


class DataKind(StrEnum):
    synthetic = "synthetic"
    criteo = "criteo"


class SparseOptimizer(StrEnum):
    sgd = "sgd"
    adagrad = "adagrad"
    rowwise_adagrad = "rowwise_adagrad"


class DenseOptimizer(StrEnum):
    sgd = "sgd"
    adagrad = "adagrad"
    adam = "adam"


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """What exists: the launcher and the hardware of one node."""

    launcher: Launcher = option(MISSING, "local (this machine) or slurm")
    device: Device = option(MISSING, "cpu, or cuda (also the name of a ROCm GPU in torch)")
    ranks_per_node: int | None = option(None, "ranks a node always has (its GPUs); null: the job decides", low=1)
    hbm_gib: float = option(0.0, "memory of one GPU; 0 on a CPU", low=0)
    host_memory_gib: float | None = option(None, "memory of one node; null: detected where the ranks run", low=1)
    hbm_gb_per_s: float = option(1.0, "bandwidth of one GPU's memory", low=0.001)
    host_memory_gb_per_s: float = option(16.0, "bandwidth of a rank's share of host memory", low=0.001)
    intra_node_gb_per_s: float = option(0.5, "bandwidth of a rank to the others of its node", low=0.001)
    inter_node_gb_per_s: float = option(0.5, "bandwidth of a rank to other nodes", low=0.001)


@dataclass(kw_only=True, slots=True)
class ContainerConfig:
    """What the ranks run in."""

    runtime: ContainerRuntime = option(ContainerRuntime.none, "none (this Python) or apptainer")
    image: str | None = option(None, "path of the .sif image")
    binds: list[str] = option([], "further bind mounts, as source[:target[:ro]]")
    env: dict[str, str] = option({}, "environment variables set for the ranks")


@dataclass(kw_only=True, slots=True)
class JobConfig:
    """What this run asks for."""

    nodes: int = option(1, "nodes", low=1)
    ranks_per_node: int | None = option(None, "ranks on each node; null: what the cluster says, else 2", low=1)
    time_limit_min: int = option(24 * 60, "time limit of one attempt", low=1)
    partition: str | None = option(None, "Slurm partition; null: the site's default")
    account: str | None = option(None, "Slurm account; null: the user's default")
    signal_lead_s: float = option(120.0, "how long before the time limit the run is told to save", low=1)
    stop_timeout_s: float = option(600.0, "how long a stopping run may take to save before it is killed", low=1)


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Shape of a DLRM (https://arxiv.org/abs/1906.00091) or DLRM-DCNv2 (https://arxiv.org/abs/2008.13535)."""

    embedding_dim: int = option(MISSING, "columns of every table, a multiple of 4", low=4)
    dense_layers: list[int] = option([], "widths of the bottom MLP; the last is embedding_dim", low=1)
    over_layers: list[int] = option([], "widths of the top MLP; the last is 1", low=1)
    interaction: Interaction = option(MISSING, "dot (DLRM) or dcn (low-rank cross network)")
    dcn_layers: int = option(3, "cross layers, for interaction=dcn", low=1)
    dcn_rank: int = option(512, "rank of the cross matrices, for interaction=dcn", low=1)


@dataclass(kw_only=True, slots=True)
class ShardingConfig:
    """How tables are spread over ranks."""

    type: ShardingType = option(ShardingType.auto, "sharding type of every table, or auto")
    reserve: float = option(0.15, "share of GPU memory kept free of tables", low=0, high=0.95)


@dataclass(kw_only=True, slots=True)
class SparseFeature:
    """One categorical feature; several may share a table by naming it."""

    name: str = option(MISSING, "column of the data set")
    rows: int = option(MISSING, "rows of its table: ids are 0 to rows - 1", low=1, high=2**31 - 1)
    table: str | None = option(None, "table to share; null: a table of its own, named t_<name>")
    ids_per_sample: float = option(1.0, "mean ids in one sample (pooling factor), for the planner", low=0)


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

    kind: DataKind = option(MISSING, "synthetic (made on the fly) or criteo (40-column TSV, see rechpc.prepare)")
    source: str | None = option(None, "raw files, read by rechpc.prepare")
    path: str | None = option(None, "prepared data set, written by rechpc.prepare and read by the ranks")
    seed: int = option(0, "seed of the synthetic log and of the shuffle at conversion", low=0)
    block_rows: int = option(8192, "rows that are stored, shuffled and read together", low=1)
    dense: list[str] = option([], "names of the dense features")
    sparse: list[SparseFeature] = option([], "the sparse features")
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)

    def tables(self) -> "dict[str, Table]":
        """Tables by name, in the order in which features first name them."""
        tables: dict[str, Table] = {}
        for feature in self.sparse:
            name = feature.table or f"t_{feature.name}"
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
    collective_timeout_s: float = option(600.0, "a collective that takes longer ends the attempt", low=1)


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When the run saves itself."""

    every: int = option(100, "steps between two checkpoints; 0: only at the end and when stopped", low=0)
    keep: int = option(3, "newest checkpoints that are kept", low=1)


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """One run: what `config.yaml` in the run directory holds."""

    name: str = option("dlrm", "first part of the run directory's name")
    seed: int = option(1, "seed of initial weights and of the order of samples", low=0)
    runs_root: str = option("runs", "where run directories go")
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)
    job: JobConfig = field(default_factory=JobConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def ranks_per_node(self) -> int:
        return self.job.ranks_per_node or self.cluster.ranks_per_node or 2

    @property
    def world_size(self) -> int:
        return self.job.nodes * self.ranks_per_node

    def validate(self) -> None:
        """Raise one ConfigError that lists every value out of range and every broken rule between keys."""
        # The rules between keys assume values that are in range.
        problems = list(_out_of_range(self, "")) or list(_broken_rules(self))
        if problems:
            raise ConfigError("\n".join(problems))


@dataclass(kw_only=True, slots=True)
class CommandConfig(RunConfig):
    """A run and what the command line does with it; the extra keys are not part of the run."""

    dry_run: bool = option(False, "print what would be submitted, and submit nothing")
    resume: str | None = option(None, "run directory to continue")


def load(path: Path) -> RunConfig:
    """The validated configuration in a `config.yaml`."""
    try:
        raw = OmegaConf.load(path)
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), raw))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; expected a run directory with a config.yaml") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {explain(error)}") from error
    assert isinstance(config, RunConfig)
    config.validate()
    return config


def dump(config: RunConfig) -> str:
    """The YAML text of the run itself, without the keys that only the command line has."""
    keys = [f.name for f in dataclasses.fields(RunConfig)]
    return OmegaConf.to_yaml(OmegaConf.masked_copy(OmegaConf.structured(config), keys))


def explain(error: OmegaConfBaseException) -> str:
    """One line for a key or value that the schema refuses: the key, what was expected, a near name."""
    key = error.full_key or str(error.key or "")
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        return unknown_key(key)
    message = str(error.msg or error).splitlines()[0]
    about = _field(re.sub(r"\[\d+\]", "", key)) if key else None
    hint = f"; it is {about.metadata['doc']!r}" if about is not None and "doc" in about.metadata else ""
    if about is not None and isinstance(about.default, int | float | str) and about.default != MISSING:
        hint += f", by default {about.default}"
    return f"{key}: {message}{hint}" if key else message


def unknown_key(key: str) -> str:
    """One line for a key that the schema does not have, with the nearest one that it has."""
    parent = _field(key.rpartition(".")[0])
    if parent is not None and str(parent.type).startswith("dict"):
        return f"{key}: an entry that is not there yet; add it with +{key}=VALUE"
    if _field(key) is not None:
        return f"{key}: takes its entries one by one; add one with +{key}.NAME=VALUE"
    known = list(_keys(CommandConfig, ""))
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    same_name = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
    hint = (same_name or near)[:1]
    return f"{key}: no such key" + (f"; did you mean {hint[0]}?" if hint else "; --help lists the groups of keys")


def _keys(section: type, prefix: str) -> Iterator[str]:
    for f in dataclasses.fields(section):
        yield prefix + f.name
        if isinstance(f.type, type) and dataclasses.is_dataclass(f.type):
            yield from _keys(f.type, f"{prefix}{f.name}.")


def _field(key: str) -> "dataclasses.Field[Any] | None":
    """The declaration of a dotted key, or None where there is none."""
    section: Any = CommandConfig
    found = None
    for name in key.split("."):
        found = next((f for f in dataclasses.fields(section) if f.name == name), None)
        if found is None or not dataclasses.is_dataclass(found.type):
            break
        section = found.type
    return found


def _out_of_range(section: Any, prefix: str) -> Iterator[str]:
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        low, high = f.metadata.get("low"), f.metadata.get("high")
        if dataclasses.is_dataclass(value):
            yield from _out_of_range(value, f"{prefix}{f.name}.")
        for key, element in _elements(f"{prefix}{f.name}", value):
            if dataclasses.is_dataclass(element):
                yield from _out_of_range(element, f"{key}.")
            elif isinstance(element, int | float) and not isinstance(element, bool):
                if not math.isfinite(element):
                    yield f"{key}={element}: expected a finite number"
                elif low is not None and element < low:
                    yield f"{key}={element}: expected at least {low:g} ({f.metadata['doc']})"
                elif high is not None and element > high:
                    yield f"{key}={element}: expected at most {high:g} ({f.metadata['doc']})"


def _elements(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        yield from ((f"{key}[{i}]", element) for i, element in enumerate(value))
    elif not dataclasses.is_dataclass(value):
        yield key, value


def _broken_rules(c: RunConfig) -> Iterator[str]:
    """One line for every rule between keys that does not hold."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", c.name):
        yield f"name={c.name!r}: expected letters, digits, '.', '_' or '-', at most 64; it names a directory"
    fixed, asked = c.cluster.ranks_per_node, c.job.ranks_per_node
    if fixed and asked and asked > fixed:
        yield f"job.ranks_per_node={asked}: a node of this cluster has {fixed}; set job.ranks_per_node={fixed}"
    if c.cluster.launcher is Launcher.local and c.job.nodes != 1:
        yield f"job.nodes={c.job.nodes}: cluster=local has one node; set job.nodes=1 or choose a Slurm cluster"
    if c.job.signal_lead_s >= 60 * c.job.time_limit_min:
        yield (
            f"job.signal_lead_s={c.job.signal_lead_s:g}: the run would be told to save before it starts; "
            f"set it below the {60 * c.job.time_limit_min} s of job.time_limit_min={c.job.time_limit_min}"
        )
    if c.container.runtime is ContainerRuntime.apptainer and not c.container.image:
        yield "container.image=null: container.runtime=apptainer needs an image; set container.image=/path/image.sif"
    yield from _batch_rules(c)
    yield from _model_rules(c)
    yield from _data_rules(c.data)
    o = c.optimizer
    if o.decay_steps and o.decay_start_step < o.warmup_steps:
        yield (
            f"optimizer.decay_start_step={o.decay_start_step}: decay would begin before warm-up ends; "
            f"set it to at least optimizer.warmup_steps={o.warmup_steps}"
        )
    if o.sparse is SparseOptimizer.rowwise_adagrad and c.sharding.type is ShardingType.column_wise:
        yield (
            "optimizer.sparse=rowwise_adagrad: each column shard would keep its own row state, so the model would "
            "depend on the plan; choose sharding=row_wise or table_wise, or optimizer=adagrad"
        )


def _batch_rules(c: RunConfig) -> Iterator[str]:
    t = c.trainer
    batches = {"trainer.global_batch": t.global_batch, "trainer.eval_global_batch": t.eval_global_batch}
    for key, batch in batches.items():
        if batch and batch % c.world_size:
            below, above = batch // c.world_size * c.world_size, -(-batch // c.world_size) * c.world_size
            nearest = " or ".join(str(b) for b in (below, above) if b)
            yield (
                f"{key}={batch}: {c.world_size} ranks ({c.job.nodes} x {c.ranks_per_node}) do not divide it; "
                f"set {key}={nearest}"
            )
    if c.data.kind is DataKind.synthetic and t.eval_every and not c.data.synthetic.val_rows:
        yield f"trainer.eval_every={t.eval_every}: data.synthetic.val_rows=0 leaves nothing to evaluate; change one"
    rows = c.data.synthetic.train_rows
    if c.data.kind is DataKind.synthetic and rows < t.global_batch:
        yield (
            f"data.synthetic.train_rows={rows}: fewer samples than one global batch; "
            f"set trainer.global_batch to at most {rows}, it is {t.global_batch}"
        )


def _model_rules(c: RunConfig) -> Iterator[str]:
    m = c.model
    if m.embedding_dim % 4:
        yield f"model.embedding_dim={m.embedding_dim}: expected a multiple of 4, which FBGEMM's kernels need"
    if not m.dense_layers or m.dense_layers[-1] != m.embedding_dim:
        yield (
            f"model.dense_layers={m.dense_layers}: the last width must be "
            f"model.embedding_dim={m.embedding_dim}, for the interaction joins both"
        )
    if not m.over_layers or m.over_layers[-1] != 1:
        yield f"model.over_layers={m.over_layers}: the last width must be 1, the logit"


def _data_rules(d: DataConfig) -> Iterator[str]:
    if not d.dense:
        yield "data.dense=[]: expected at least one dense feature"
    if not d.sparse:
        yield "data.sparse=[]: expected at least one sparse feature"
    names = [*d.dense, *(f.name for f in d.sparse)]
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield f"data: feature {name!r} appears {names.count(name)} times; every feature needs a name of its own"
    for table in d.tables().values():
        for feature in table.features:
            if feature.rows != table.rows:
                yield (
                    f"data.sparse: table {table.name!r} has {table.rows} rows for feature {table.features[0].name!r} "
                    f"but {feature.rows} for {feature.name!r}; features that share a table need the same rows"
                )
