"""Every option composes, and every mistake is one line that names the key and the fix."""

import dataclasses
import sys

import pytest

from rechpc import compose as product
from rechpc.config import RunConfig, ShardingType, SparseFeature
from rechpc.errors import ConfigError
from rechpc.rules import dump, load, validate
from tests.configs import changed, compose

CONF = product.CONF_PATH
OPTIONS = sorted(f"{path.parent.name}={path.stem}" for path in CONF.glob("*/*.yaml"))
# What an option leaves to the user to say.
NEEDS = {"container=apptainer": ["container.image=/image.sif"]}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes_to_a_valid_run(option):
    config = compose(option, *NEEDS.get(option, []))
    assert config.world_size >= 1


def test_every_group_has_options_and_a_default():
    groups = {option.partition("=")[0] for option in OPTIONS}
    assert groups == {path.name for path in CONF.iterdir() if path.is_dir()}
    defaults = (CONF / "config.yaml").read_text()
    assert [group for group in groups if f"- {group}: " not in defaults] == []


@pytest.mark.parametrize("sharding", ShardingType)
def test_every_sharding_type_has_an_option_of_its_name(sharding):
    assert compose(f"sharding={sharding}").sharding.type is sharding


@pytest.mark.parametrize(
    "overrides", [["experiment=criteo_8k"], ["model=dlrm_dcnv2", "+container.env.A=b", "container.binds=[/x:/y:ro]"]]
)
def test_a_run_reads_back_what_it_wrote(tmp_path, overrides):
    config = compose(*overrides)
    (tmp_path / "config.yaml").write_text(dump(config))
    found = load(tmp_path / "config.yaml")
    assert {f.name: getattr(found, f.name) for f in dataclasses.fields(found)} == {
        f.name: getattr(config, f.name) for f in dataclasses.fields(found)
    }


@pytest.mark.parametrize("model", ["dlrm", "dlrm_dcnv2"])
def test_models_shardings_and_optimizers_combine(model):
    for sharding in ("auto", "table_wise", "row_wise"):
        for optimizer in ("sgd", "adam"):
            changed(f"model={model}", f"sharding.type={sharding}", f"optimizer={optimizer}")


def test_what_only_the_command_line_has_is_not_part_of_the_run():
    text = dump(compose("dry_run=true"))
    assert {line.partition(":")[0] for line in text.splitlines() if line[0].isalpha()} == {
        f.name for f in dataclasses.fields(RunConfig)
    }


def test_ranks_are_what_the_job_says_else_the_cluster_else_two():
    assert compose().world_size == 2
    assert compose("cluster=slurm", "cluster.ranks_per_node=8", "job.nodes=2").world_size == 16
    assert compose("cluster=slurm", "cluster.ranks_per_node=8", "job.ranks_per_node=4", "job.nodes=2").world_size == 8


# Rules between keys: what is said, and what has to be in it.

RULES = {
    "a name that is no directory": (["name=a/b"], "name='a/b'", "letters, digits"),
    "an empty name": (["name=''"], "name=''", "letters, digits"),
    "more ranks than a node has": (
        ["cluster=slurm", "cluster.ranks_per_node=8", "job.ranks_per_node=16"],
        "job.ranks_per_node=16",
        "set job.ranks_per_node=8",
    ),
    "nodes of one machine": (["job.nodes=2"], "job.nodes=2", "set job.nodes=1"),
    "a signal before the start": (
        ["job.time_limit_min=1", "job.signal_lead_s=60"],
        "job.signal_lead_s=60",
        "below the 60 s of job.time_limit_min=1",
    ),
    "a container without an image": (["container=apptainer"], "container.image=null", "set container.image="),
    "a batch that ranks do not divide": (
        ["job.ranks_per_node=3"],
        "trainer.global_batch=2048",
        "set trainer.global_batch=2046 or 2049",
    ),
    "a batch smaller than the ranks": (
        ["job.ranks_per_node=3", "trainer.global_batch=2"],
        "trainer.global_batch=2",
        "set trainer.global_batch=3",
    ),
    "an evaluation batch that ranks do not divide": (
        ["trainer.eval_global_batch=101"],
        "trainer.eval_global_batch=101",
        "set trainer.eval_global_batch=100 or 102",
    ),
    "fewer samples than a batch": (
        ["data.synthetic.train_rows=100"],
        "data.synthetic.train_rows=100",
        "set trainer.global_batch to at most 100",
    ),
    "nothing to evaluate": (
        ["trainer.eval_every=5", "data.synthetic.val_rows=0"],
        "trainer.eval_every=5",
        "data.synthetic.val_rows=0",
    ),
    "a width that kernels do not have": (
        ["model.embedding_dim=6", "model.dense_layers=[6]"],
        "model.embedding_dim=6",
        "multiple of 4",
    ),
    "a bottom MLP of another width": (
        ["model.embedding_dim=8"],
        "model.dense_layers=[64, 16]",
        "must be model.embedding_dim=8",
    ),
    "no bottom MLP": (["model.dense_layers=[]"], "model.dense_layers=[]", "must be model.embedding_dim=16"),
    "a top MLP that is no logit": (["model.over_layers=[8,2]"], "model.over_layers=[8, 2]", "must be 1"),
    "no top MLP": (["model.over_layers=[]"], "model.over_layers=[]", "must be 1"),
    "no dense features": (["data.dense=[]"], "data.dense=[]", "at least one"),
    "no sparse features": (["data.sparse=[]"], "data.sparse=[]", "at least one"),
    "a feature twice": (["data.dense=[user]"], "feature 'user' appears 2 times", "a name of its own"),
    "a shared table of two sizes": (
        ["data.sparse=[{name: a, rows: 5, table: t}, {name: b, rows: 6, table: t}]"],
        "'b' has rows=6 and 'a' has rows=5",
        "share a table, here 't', need the same",
    ),
    "a shared table of two mappings": (
        ["data.sparse=[{name: a, rows: 5, table: t}, {name: b, rows: 5, table: t, mapping: as_is}]"],
        "'b' has mapping=as_is and 'a' has mapping=hash",
        "share a table, here 't', need the same",
    ),
    "a shared table of two poolings": (
        ["data.sparse=[{name: a, rows: 5, table: t}, {name: b, rows: 5, table: t, pooling: mean}]"],
        "'b' has pooling=mean and 'a' has pooling=sum",
        "share a table, here 't', need the same",
    ),
    "a column of no feature": (["data.columns.usr=u"], "data.columns.usr", "expected one of label, d0, d1"),
    "a transform of no feature": (
        ["data.dense_transforms.user=none"],
        "data.dense_transforms.user",
        "expected one of d0, d1, d2, d3",
    ),
    "a vocabulary without a row for a value": (
        ["data.sparse=[{name: a, rows: 2, mapping: vocabulary}]"],
        "'a' has 2 rows",
        "mapping=vocabulary needs 3",
    ),
    "a trace that ends before it begins": (
        ["trainer.profile_steps=[5,3]"],
        "trainer.profile_steps=[5, 3]",
        "[FIRST,LAST] of at most 100",
    ),
    "a trace of a list of steps": (
        ["trainer.profile_steps=[1,2,3]"],
        "trainer.profile_steps=[1, 2, 3]",
        "[FIRST,LAST]",
    ),
    "a trace that fills the memory": (["trainer.profile_steps=[1,101]"], "trainer.profile_steps=[1, 101]", "100 steps"),
    "a trace of steps that the run does not make": (
        ["trainer.profile_steps=[9,10]", "trainer.max_steps=9"],
        "trainer.profile_steps=[9, 10]",
        "ends at trainer.max_steps=9",
    ),
    "a long separator": (["data.separator=ab"], "data.separator='ab'", "one character, or tab"),
    "no separator in lists": (["data.list_separator=''"], "data.list_separator=''", "at least one character"),
    "decay during warm-up": (
        ["optimizer.warmup_steps=10", "optimizer.decay_steps=5", "optimizer.decay_start_step=9"],
        "optimizer.decay_start_step=9",
        "at least optimizer.warmup_steps=10",
    ),
    "row states of column shards": (
        ["optimizer=rowwise_adagrad", "sharding=column_wise"],
        "sharding.type=column_wise with optimizer.sparse=rowwise_adagrad",
        "choose row_wise",
    ),
    "row states of column shards of some tables": (
        ["optimizer=rowwise_adagrad", "sharding.tables={t_u*: {types: [grid_shard]}}"],
        "sharding.tables.t_u*.types=grid_shard with optimizer.sparse=rowwise_adagrad",
        "choose row_wise",
    ),
    "a kernel that needs a GPU": (
        ["sharding.kernel=fused_uvm_caching"],
        "sharding.kernel=fused_uvm_caching",
        "set it to fused",
    ),
    "a kernel of some tables that needs a GPU": (
        ["sharding.tables={t_user: {kernels: [fused, fused_uvm]}}"],
        "sharding.tables.t_user.kernels=fused_uvm",
        "set it to fused",
    ),
    "int8 between CPU ranks": (
        ["sharding.forward_precision=int8"],
        "sharding.forward_precision=int8",
        "set it to fp32 or fp16",
    ),
    "fp8 where rows are summed": (
        ["cluster=mi300x", "sharding.forward_precision=fp8", "sharding=row_wise"],
        "sharding.forward_precision=fp8",
        "set it to fp16 or bf16, or sharding=table_wise",
    ),
    "int8 where the planner may cut one table by rows": (
        [
            "cluster=mi300x",
            "sharding.backward_precision=int8",
            "sharding=table_wise",
            "sharding.tables={t_user: {types: [auto]}}",
        ],
        "sharding.backward_precision=int8: 1 tables may be cut by rows (t_user)",
        "set it to fp16 or bf16",
    ),
    "int8 of a narrow table": (
        ["cluster=mi300x", "sharding.forward_precision=int8", "sharding=table_wise"],
        "sharding.forward_precision=int8: packs 32 columns, model.embedding_dim=16",
        "multiples of 32",
    ),
    "int8 of columns that the planner cuts": (
        [
            "cluster=mi300x",
            "sharding.forward_precision=int8",
            "sharding=column_wise",
            "model.embedding_dim=64",
            "model.dense_layers=[64]",
        ],
        "sharding.forward_precision=int8: packs 32 columns",
        "multiples of 32",
    ),
    "replicated groups of ranks": (["cluster=mi300x", "sharding.replicas=2"], "sharding.replicas=2", "set it to 1"),
    "a column width that does not divide": (
        ["sharding.column_width=12"],
        "sharding.column_width=12",
        "one of 4, 8, 16",
    ),
    "a pattern that no table matches": (
        ["sharding.tables={t_usr: {types: [row_wise]}}"],
        "sharding.tables.t_usr",
        "t_user",
    ),
    "replicated tables in half precision": (
        ["model.table_precision=fp16", "sharding=data_parallel"],
        "sharding.type=data_parallel with model.table_precision=fp16",
        "choose another type",
    ),
    "too few CPU lists": (
        ["cluster.ranks_per_node=2", "cluster.rank_cpus=['0-3']"],
        "cluster.rank_cpus: 1 entries",
        "cluster.ranks_per_node=2",
    ),
    "CPUs that are no numbers": (
        ["cluster.ranks_per_node=1", "job.ranks_per_node=1", "cluster.rank_cpus=['0x3']"],
        "cluster.rank_cpus[0]='0x3'",
        "as 1-7,64-70",
    ),
    "binding without GPUs": (["cluster.numa_binding=node"], "cluster.numa_binding=node", "follows the GPUs"),
    "an option of sbatch with its dashes": (
        ["cluster.sbatch={--mem: 4G}"],
        "cluster.sbatch.--mem",
        "without the two dashes",
    ),
    "an interval that is no number": (["checkpoint.every=often"], "checkpoint.every=often", "0, or auto"),
    "the best of no evaluation": (["checkpoint.keep_best=val_ne"], "checkpoint.keep_best=val_ne", "trainer.eval_every"),
    "a choice from nothing": (["checkpoint.init_exclude=[a]"], "checkpoint.init_from=null", "to take from"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_one_line_with_the_key_and_the_fix(rule):
    overrides, key, fix = RULES[rule]
    with pytest.raises(ConfigError) as error:
        changed(*overrides)
    (line,) = str(error.value).splitlines()
    assert key in line
    assert fix in line.partition(key)[2]


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_whole_tables_may_be_sent_in_eight_bits_on_gpus(precision):
    wide = ["model.embedding_dim=32", "model.dense_layers=[32]"]
    changed("cluster=mi300x", f"sharding.forward_precision={precision}", "sharding=table_wise", *wide)
    changed(
        "cluster=mi300x",
        f"sharding.forward_precision={precision}",
        "sharding=column_wise",
        *wide,
        "sharding.column_width=32",
    )


def test_every_mistake_is_listed():
    with pytest.raises(ConfigError) as error:
        changed("name=a/b", "job.nodes=2", "model.over_layers=[8,2]")
    assert [line.partition("=")[0] for line in str(error.value).splitlines()] == [
        "name",
        "job.nodes",
        "model.over_layers",
    ]


RANGES = {
    "trainer.global_batch=0": "trainer.global_batch=0: expected at least 1 (samples in one step, over all ranks)",
    "sharding.reserve=0.96": "sharding.reserve=0.96: expected at most 0.95",
    "optimizer.learning_rate=-1": "optimizer.learning_rate=-1.0: expected at least 0",
    "optimizer.learning_rate=.nan": "optimizer.learning_rate=nan: expected a finite number",
    "optimizer.learning_rate=.inf": "optimizer.learning_rate=inf: expected a finite number",
    "model.over_layers=[0,1]": "model.over_layers[0]=0: expected at least 1",
    "data.sparse=[{name: x, rows: 0}]": "data.sparse[0].rows=0: expected at least 1",
    "data.synthetic.label_noise=1.5": "data.synthetic.label_noise=1.5: expected at most 1",
    "checkpoint.every=-1": "checkpoint.every=-1: expected at least 0",
    "checkpoint.max_failures=0": "checkpoint.max_failures=0: expected at least 1",
    "checkpoint.keep_every=-1": "checkpoint.keep_every=-1: expected at least 0",
    "checkpoint.node_mtbf_h=0": "checkpoint.node_mtbf_h=0.0: expected at least 0.01",
    "checkpoint.keep=0": "checkpoint.keep=0: expected at least 1",
    "cluster.host_memory_gib=0": "cluster.host_memory_gib=0.0: expected at least 1",
}


@pytest.mark.parametrize("override", RANGES)
def test_a_value_out_of_range_is_one_line_with_key_value_and_range(override):
    with pytest.raises(ConfigError) as error:
        changed(override)
    (line,) = str(error.value).splitlines()
    assert line.startswith(RANGES[override])


# Through the command line, where Hydra has its say first


@pytest.fixture
def complaint(monkeypatch, capsys):
    """What the command line says of overrides that it does not accept."""

    def of(*overrides: str) -> str:
        monkeypatch.setattr(sys, "argv", ["command", *overrides])
        with pytest.raises(SystemExit) as end:
            product.run(lambda config, changes: pytest.fail("it was accepted"), "help")
        out, err = capsys.readouterr()
        assert (end.value.code, out) == (2, "")
        return err.removesuffix("\n")

    return of


MISTAKES = {
    "trainer.global_bach=96": "trainer.global_bach: no such key; did you mean trainer.global_batch?",
    "global_batch=96": "global_batch: no such key; did you mean trainer.global_batch?",
    "trainer.seed=3": "trainer.seed: no such key; did you mean seed?",
    "+trainer.extra=1": "trainer.extra: no such key; ",
    "container.env.A=1": "container.env.A: an entry that is not there yet; add it with +container.env.A=VALUE",
    "container.env=A": "container.env: ",
    "+zzzzzzzz=1": "zzzzzzzz: no such key; --help lists the groups of keys",
    "model=dlrm_v3": "model=dlrm_v3: no such option; expected one of dlrm, dlrm_dcnv2",
    "trainer.global_batch=many": "trainer.global_batch: ",
    "sharding.type=diagonal": "sharding.type: ",
    "trainer.epochs=1.5": "trainer.epochs: ",
    "job.nodes=0": "job.nodes=0: expected at least 1",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_on_the_command_line_is_one_line(complaint, override):
    (line,) = complaint(override).splitlines()
    assert line.startswith(MISTAKES[override])


def test_a_value_of_another_type_names_value_and_meaning(complaint):
    line = complaint("trainer.global_batch=many")
    assert "many" in line
    assert "samples in one step, over all ranks" in line
    line = complaint("sharding.type=diagonal")
    assert "diagonal" in line
    assert "row_wise" in line


# A config.yaml in a run directory


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "config.yaml")
    assert str(error.value) == (
        f"{tmp_path / 'config.yaml'}: No such file or directory; expected a run directory with a config.yaml"
    )


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("global_batch: 2048", "global_bach: 2048", "trainer.global_bach: no such key; did you mean trainer.global"),
        ("global_batch: 2048", "global_batch: 2047", "trainer.global_batch=2047: 2 ranks (1 x 2) do not divide it"),
        ("seed: 1", "seed: one", "config.yaml: seed: "),
    ],
    ids=["unknown key", "broken rule", "wrong type"],
)
def test_a_mistake_in_a_file_is_an_error(tmp_path, before, after, expected):
    path = tmp_path / "config.yaml"
    path.write_text(dump(compose()).replace(before, after, 1))
    with pytest.raises(ConfigError) as error:
        load(path)
    assert expected in str(error.value)


def test_text_that_is_not_yaml_is_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("trainer: [unclosed\n")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load(path)


def test_features_that_name_a_table_share_it():
    config = compose("data.sparse=[{name: a, rows: 5, table: t}, {name: b, rows: 6}, {name: c, rows: 5, table: t}]")
    tables = config.data.tables()
    assert {name: [f.name for f in table.features] for name, table in tables.items()} == {"t": ["a", "c"], "t_b": ["b"]}
    assert tables["t_b"].rows == 6


def test_a_table_of_a_feature_can_be_shared_by_its_name():
    config = compose()
    config.data.sparse = [SparseFeature(name="item", rows=9), SparseFeature(name="history", rows=9, table="t_item")]
    validate(config)
    assert [f.name for f in config.data.tables()["t_item"].features] == ["item", "history"]
