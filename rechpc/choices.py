"""The values that keys of the configuration choose from; each name is what one writes.

Must not know what is done with them.
"""

from enum import StrEnum


class Launcher(StrEnum):
    local = "local"
    slurm = "slurm"


class GpuRequest(StrEnum):
    """How a site wants GPUs to be asked for."""

    gpus_per_node = "gpus_per_node"
    gres = "gres"
    none = "none"


class NumaBinding(StrEnum):
    """How torchrun binds a rank to CPUs near its GPU; its words."""

    none = "none"
    node = "node"
    socket = "socket"
    exclusive = "exclusive"


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
    table_row_wise = "table_row_wise"
    grid_shard = "grid_shard"
    data_parallel = "data_parallel"


class Kernel(StrEnum):
    """Where FBGEMM keeps a table; TorchRec's names. The last two keep it in host memory, behind the GPU."""

    fused = "fused"
    fused_uvm = "fused_uvm"
    fused_uvm_caching = "fused_uvm_caching"


class Precision(StrEnum):
    """Of what ranks send to each other; TorchRec's names."""

    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"
    fp8 = "fp8"
    int8 = "int8"


class TablePrecision(StrEnum):
    fp32 = "fp32"
    fp16 = "fp16"


class DataKind(StrEnum):
    """What a data set is made from; all but synthetic are converted once, by rechpc.prepare."""

    synthetic = "synthetic"  # made on the fly
    criteo = "criteo"  # text of 40 columns: label, I1 to I13, C1 to C26
    csv = "csv"  # text with a header line
    parquet = "parquet"
    npy = "npy"  # arrays of the TorchRec and MLPerf scripts, one-hot or multi-hot


class IdMapping(StrEnum):
    """How a value of a sparse feature becomes an id (see rechpc.prepare.features)."""

    hash = "hash"
    vocabulary = "vocabulary"
    as_is = "as_is"


class Pooling(StrEnum):
    sum = "sum"
    mean = "mean"


class DenseTransform(StrEnum):
    """What is done to a dense value (see rechpc.prepare.features)."""

    log1p = "log1p"
    standard = "standard"
    none = "none"


class BadRows(StrEnum):
    """What rechpc.prepare does about a row that is not as declared (see docs/data.md)."""

    fail = "fail"
    skip = "skip"
    fix = "fix"


class KeepBest(StrEnum):
    """The metric by which the best checkpoint is kept."""

    none = "none"
    val_ne = "val_ne"
    val_auc = "val_auc"


class SparseOptimizer(StrEnum):
    sgd = "sgd"
    adagrad = "adagrad"
    rowwise_adagrad = "rowwise_adagrad"


class DenseOptimizer(StrEnum):
    sgd = "sgd"
    adagrad = "adagrad"
    adam = "adam"
