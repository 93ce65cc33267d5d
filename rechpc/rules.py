"""What makes a configuration valid, and one line for every mistake in it.

Also how the resolved configuration of a run is written to `config.yaml` and read back.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from rechpc.choices import (
    ContainerRuntime,
    DataKind,
    Device,
    IdMapping,
    KeepBest,
    Kernel,
    Launcher,
    NumaBinding,
    Precision,
    ShardingType,
    SparseOptimizer,
    TablePrecision,
)
from rechpc.config import AUTO, ClusterConfig, CommandConfig, DataConfig, RunConfig, TableSharding
from rechpc.errors import ConfigError

COLUMN_CUT = {ShardingType.column_wise, ShardingType.grid_shard}
# Their partial sums are added up on the way, which TorchRec cannot in these: it sends 16 bits for fp8 without a word,
# and adds the bytes of int8 (seen in 1.8).
_REDUCED = {ShardingType.auto, ShardingType.row_wise, ShardingType.table_row_wise, ShardingType.grid_shard}
_NOT_REDUCIBLE = {Precision.fp8, Precision.int8}


def validate(config: RunConfig) -> None:
    """Raise one ConfigError that lists every value out of range, or every broken rule between keys."""
    # The rules between keys assume values that are in range.
    problems = list(_out_of_range(config, "")) or list(_broken_rules(config))
    if problems:
        raise ConfigError("\n".join(problems))


def load(path: Path) -> RunConfig:
    """The validated configuration in a `config.yaml`."""
    try:
        raw = OmegaConf.load(path)
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), raw))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; expected a run directory with a config.yaml") from error
    except YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {explain(error)}") from error
    assert isinstance(config, RunConfig)
    validate(config)
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
    if key.startswith("sharding.tables.") and key.count(".") > 2:
        return f"{key}: no such key; a pattern has {', '.join(f.name for f in dataclasses.fields(TableSharding))}"
    parent = _field(key.rpartition(".")[0])
    if parent is not None and str(parent.type).startswith("dict"):
        return f"{key}: an entry that is not there yet; add it with +{key}=VALUE"
    if _field(key) is not None:
        return f"{key}: takes its entries one by one; add them with '+{key}={{NAME: VALUE}}'"
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
            elif isinstance(element, str) and re.search(r"[\x00-\x1f\x7f]", element):
                # Most texts end up in a batch script or a command line, where a newline starts a command of its own.
                yield f"{key}={element!r}: has a control character; remove it"
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
    elif isinstance(value, dict):
        yield from ((f"{key}.{name}", element) for name, element in value.items())
    elif not dataclasses.is_dataclass(value):
        yield key, value


def _broken_rules(c: RunConfig) -> Iterator[str]:
    """One line for every rule between keys that does not hold."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", c.name):
        yield f"name={c.name!r}: expected letters, digits, '.', '_' or '-', at most 64; it names a directory"
    fixed, asked = c.cluster.ranks_per_node, c.job.ranks_per_node
    if fixed and asked and asked > fixed:
        yield f"job.ranks_per_node={asked}: a node of this cluster has {fixed}; set job.ranks_per_node={fixed}"
    if c.cluster.launcher is Launcher.local and c.job.nodes != 1 and not c.cluster.rehearsal.of:
        yield (
            f"job.nodes={c.job.nodes}: cluster=local has one node; set job.nodes=1 or choose a Slurm "
            "cluster, which cluster=rehearsal plays here"
        )
    if c.job.signal_lead_s >= 60 * c.job.time_limit_min:
        yield (
            f"job.signal_lead_s={c.job.signal_lead_s:g}: the run would be told to save before it starts; "
            f"set it below the {60 * c.job.time_limit_min} s of job.time_limit_min={c.job.time_limit_min}"
        )
    if c.container.runtime is ContainerRuntime.apptainer and not c.container.image:
        yield "container.image=null: container.runtime=apptainer needs an image; set container.image=/path/image.sif"
    for key, options in (("cluster", c.cluster.sbatch), ("job", c.job.sbatch)):
        for name in options:
            if not re.fullmatch(r"[a-z][a-z-]*", name):
                yield f"{key}.sbatch.{name}: expected the long name of an option of sbatch, without the two dashes"
    yield from _cpu_rules(c.cluster)
    yield from _batch_rules(c)
    yield from _model_rules(c)
    yield from _data_rules(c.data)
    yield from _checkpoint_rules(c)
    yield from _source_rules(c.data)
    o = c.optimizer
    if o.decay_steps and o.decay_start_step < o.warmup_steps:
        yield (
            f"optimizer.decay_start_step={o.decay_start_step}: decay would begin before warm-up ends; "
            f"set it to at least optimizer.warmup_steps={o.warmup_steps}"
        )
    yield from _sharding_rules(c)


def _cpu_rules(c: ClusterConfig) -> Iterator[str]:
    if c.rank_cpus and len(c.rank_cpus) != c.ranks_per_node:
        yield (
            f"cluster.rank_cpus: {len(c.rank_cpus)} entries, expected one for each of "
            f"cluster.ranks_per_node={c.ranks_per_node}"
        )
    for i, cpus in enumerate(c.rank_cpus):
        if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", cpus):
            yield f"cluster.rank_cpus[{i}]={cpus!r}: expected numbers and ranges of CPUs, as 1-7,64-70"
    if c.numa_binding is not NumaBinding.none:
        if c.rank_cpus:
            yield f"cluster.numa_binding={c.numa_binding}: cluster.rank_cpus binds ranks already; set one of the two"
        if c.device is Device.cpu:
            yield f"cluster.numa_binding={c.numa_binding}: it follows the GPUs, and cluster.device=cpu has none"


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
    if t.profile_steps and not (len(t.profile_steps) < 3 and 0 <= t.profile_steps[-1] - t.profile_steps[0] < 100):
        yield f"trainer.profile_steps={t.profile_steps}: expected [STEP], or [FIRST,LAST] of at most 100 steps"
    elif t.profile_steps and t.max_steps and t.profile_steps[-1] > t.max_steps:
        yield (
            f"trainer.profile_steps={t.profile_steps}: the run ends at trainer.max_steps={t.max_steps}; trace earlier "
            "steps"
        )
    if c.data.kind is DataKind.synthetic and t.eval_every and not c.data.synthetic.val_rows:
        yield f"trainer.eval_every={t.eval_every}: data.synthetic.val_rows=0 leaves nothing to evaluate; change one"
    rows = c.data.synthetic.train_rows
    if c.data.kind is DataKind.synthetic and rows < t.global_batch:
        yield (
            f"data.synthetic.train_rows={rows}: fewer samples than one global batch; "
            f"set trainer.global_batch to at most {rows}, it is {t.global_batch}"
        )


def _checkpoint_rules(c: RunConfig) -> Iterator[str]:
    k = c.checkpoint
    if isinstance(k.every, str) and k.every != AUTO:
        yield f"checkpoint.every={k.every}: expected a number of steps, 0, or {AUTO}"
    if k.keep_best is not KeepBest.none and not c.trainer.eval_every:
        yield f"checkpoint.keep_best={k.keep_best}: needs evaluations to choose by; set trainer.eval_every"
    if not k.init_from and (k.init_include != ["*"] or k.init_exclude or k.init_optimizer):
        yield "checkpoint.init_from=null: the other checkpoint.init_* keys need the run or checkpoint to take from"


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


def _source_rules(d: DataConfig) -> Iterator[str]:
    """What rechpc.prepare needs."""
    names = [*d.dense, *(f.name for f in d.sparse)]
    for key, known in (("columns", ["label", *names]), ("dense_transforms", d.dense)):
        for name in sorted(set(getattr(d, key)) - set(known)):
            yield f"data.{key}.{name}: no such feature; expected one of {', '.join(known)}"
    for f in d.sparse:
        if f.mapping is IdMapping.vocabulary and f.rows < 3:
            yield f"data.sparse: {f.name!r} has {f.rows} rows; mapping=vocabulary needs 3: missing, rare and one value"
    if d.separator != "tab" and len(d.separator.encode()) != 1:
        yield f"data.separator={d.separator!r}: expected one character, or tab"
    if not d.list_separator:
        yield "data.list_separator='': expected at least one character, which separates the ids of a list"


def _sharding_rules(c: RunConfig) -> Iterator[str]:
    """What this device cannot do, and what would make the model depend on the plan."""
    s, dim, names = c.sharding, c.model.embedding_dim, list(c.data.tables())
    for pattern in s.tables:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            yield f"sharding.tables.{pattern}: no table has such a name; there are {', '.join(near)}, ..."
    chosen = {f"sharding.tables.{pattern}.": one for pattern, one in s.tables.items()}
    chosen["sharding."] = TableSharding(types=[s.type], kernels=[s.kernel], column_width=s.column_width)
    for key, one in chosen.items():
        many = "" if key == "sharding." else "s"
        if c.cluster.device is Device.cpu and (wrong := [k for k in one.kernels if k is not Kernel.fused]):
            yield f"{key}kernel{many}={wrong[0]}: needs a GPU, and cluster.device=cpu has none; set it to fused"
        if one.column_width is not None and (dim % one.column_width or one.column_width % 4):
            fine = [w for w in range(4, dim + 1, 4) if dim % w == 0]
            yield (
                f"{key}column_width={one.column_width}: expected a divisor of model.embedding_dim={dim} that is a "
                f"multiple of 4; set it to one of {', '.join(map(str, fine))}"
            )
        if c.optimizer.sparse is SparseOptimizer.rowwise_adagrad and (cut := COLUMN_CUT & set(one.types)):
            yield (
                f"{key}type{many}={min(cut)} with optimizer.sparse=rowwise_adagrad: each column shard would keep its "
                "own row state, so the model would depend on the plan; choose row_wise, table_row_wise or "
                "table_wise, or optimizer=adagrad"
            )
        if c.model.table_precision is TablePrecision.fp16 and ShardingType.data_parallel in one.types:
            yield (
                f"{key}type{many}=data_parallel with model.table_precision=fp16: a replicated table would keep its "
                "optimizer state in fp16 too; choose another type or model.table_precision=fp32"
            )
    if s.replicas != 1:
        yield (
            f"sharding.replicas={s.replicas}: TorchRec averages the replicas of a table after a step, which is another "
            "model with Adagrad, and on GPUs only; set it to 1, and sharding=table_row_wise keeps rows inside a node"
        )
    yield from _precision_rules(c)


def _precision_rules(c: RunConfig) -> Iterator[str]:
    """What cannot be sent in so few bits."""
    chosen = {name: c.sharding.of(name) for name in c.data.tables()}
    summed = [name for name, one in chosen.items() if _REDUCED & set(one.types)]
    widths = {
        one.column_width or 4 if COLUMN_CUT & set(one.types) else c.model.embedding_dim for one in chosen.values()
    }
    for key in ("forward_precision", "backward_precision"):
        precision = getattr(c.sharding, key)
        if c.cluster.device is Device.cpu and precision not in (Precision.fp32, Precision.fp16):
            yield f"sharding.{key}={precision}: gloo, between CPU ranks, cannot; set it to fp32 or fp16"
        elif precision in _NOT_REDUCIBLE and summed:
            yield (
                f"sharding.{key}={precision}: {len(summed)} tables may be cut by rows ({', '.join(summed[:3])}), whose "
                "sums ranks add up in 16 bits or more; set it to fp16 or bf16, or sharding=table_wise or column_wise"
            )
        elif precision is Precision.int8 and any(width % 32 for width in widths):
            yield (  # whatever the batch, the last of an epoch too (FBGEMM 1.8, quantize_comm.py)
                f"sharding.{key}=int8: packs 32 columns, model.embedding_dim={c.model.embedding_dim} and "
                f"sharding.column_width={c.sharding.column_width} do not fill them; make it, or both if columns "
                "are cut, multiples of 32, or set it to fp16"
            )


def _data_rules(d: DataConfig) -> Iterator[str]:
    if not d.dense:
        yield "data.dense=[]: expected at least one dense feature"
    if not d.sparse:
        yield "data.sparse=[]: expected at least one sparse feature"
    names = [*d.dense, *(f.name for f in d.sparse)]
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield f"data: feature {name!r} appears {names.count(name)} times; every feature needs a name of its own"
    for table in d.tables().values():
        first = table.features[0]
        for feature in table.features:
            for key in ("rows", "mapping", "min_count", "pooling"):
                if (one := getattr(feature, key)) != (other := getattr(first, key)):
                    yield (
                        f"data.sparse: {feature.name!r} has {key}={one} and {first.name!r} has {key}={other}; "
                        f"features that share a table, here {table.name!r}, need the same"
                    )
