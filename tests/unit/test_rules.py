"""The configuration: every option in conf/ composes, and every mistake costs one line that names the key."""

import itertools
from pathlib import Path

import pytest

from rechpc.compose import CONF_PATH
from rechpc.errors import ConfigError
from rechpc.rules import dump, load, unknown_key
from tests.configs import compose

OPTIONS = [
    f"{path.parent.name}={path.stem}" for path in sorted(CONF_PATH.glob("*/*.yaml")) if path.parent.name != "experiment"
]
EXPERIMENTS = [path.stem for path in sorted(CONF_PATH.glob("experiment/*.yaml"))]
NEEDS = {"container=apptainer": ["container.image=/images/x.sif"], "data=criteo_kaggle": ["data.path=/data"]}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes_and_is_valid(option: str) -> None:
    compose(option, *NEEDS.get(option, []))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_is_valid(experiment: str) -> None:
    compose(f"experiment={experiment}")


def test_models_shardings_and_optimizers_combine() -> None:
    for model, sharding in itertools.product(("dlrm", "dlrm_dcnv2"), ("auto", "table_wise", "row_wise")):
        compose(f"model={model}", f"sharding={sharding}", "optimizer=adam")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("job.nodes=0", ["job.nodes=0", "at least 1"]),
        ("sharding.reserve=2", ["sharding.reserve=2", "at most 0.95"]),
        ("optimizer.learning_rate=nan", ["optimizer.learning_rate=nan", "finite"]),
        ("trainer.global_batch=1001", ["trainer.global_batch=1001", "2 ranks", "1000 or 1002"]),
        ("trainer.eval_global_batch=3", ["trainer.eval_global_batch=3", "2 or 4"]),
        ("job.nodes=2", ["job.nodes=2", "cluster=local has one node"]),
        ("name=a/b", ["name='a/b'", "letters"]),
        ("container=apptainer", ["container.image=null", "container.image=/path"]),
        ("model.embedding_dim=18 model.dense_layers=[64,18]", ["model.embedding_dim=18", "multiple of 4"]),
        ("model.dense_layers=[64,8]", ["model.dense_layers=[64, 8]", "model.embedding_dim=16"]),
        ("model.over_layers=[64,2]", ["model.over_layers=[64, 2]", "must be 1"]),
        ("model.dense_layers=[0,16]", ["model.dense_layers[0]=0", "at least 1"]),
        ("data.sparse=[]", ["data.sparse=[]", "at least one"]),
        ("data.dense=[user]", ["'user' appears 2 times"]),
        ("data.sparse.5.rows=7", ["table 't_item'", "4000", "7"]),
        ("data.synthetic.train_rows=100", ["data.synthetic.train_rows=100", "fewer samples than one global batch"]),
        ("trainer.eval_every=5 data.synthetic.val_rows=0", ["trainer.eval_every=5", "val_rows=0"]),
        ("optimizer.warmup_steps=9 optimizer.decay_steps=5", ["optimizer.decay_start_step=0", "warmup_steps=9"]),
        ("optimizer=rowwise_adagrad sharding=column_wise", ["rowwise_adagrad", "sharding=row_wise"]),
    ],
)
def test_a_mistake_is_one_line_with_the_key_and_what_to_do(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(*override.split())

    (line,) = str(caught.value).splitlines()
    assert all(word in line for word in words), line


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        compose("model.embedding_dim=18", "trainer.global_batch=1001", "data.dense=[]")

    assert len(str(caught.value).splitlines()) == 4  # the widths of the bottom MLP do not fit either


@pytest.mark.parametrize(
    ("key", "near"),
    [("nodes", "job.nodes"), ("job.nodez", "job.nodes"), ("optimizer.lr_rate", "optimizer.learning_rate")],
)
def test_an_unknown_key_suggests_a_known_one(key: str, near: str) -> None:
    assert f"did you mean {near}?" in unknown_key(key)


def test_an_entry_of_a_mapping_says_how_to_add_it() -> None:
    assert "+container.env.X=" in unknown_key("container.env.X")


def test_a_configuration_is_read_as_it_was_written(tmp_path: Path) -> None:
    config = compose("model=dlrm_dcnv2", "+container.env.A=b", "seed=5")
    (tmp_path / "config.yaml").write_text(dump(config))

    assert dump(load(tmp_path / "config.yaml")) == dump(config)
    assert "dry_run" not in dump(config)


def test_an_edited_configuration_names_file_and_key(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump(compose()).replace("seed: 1", "seed: one"))

    with pytest.raises(ConfigError, match=r"config\.yaml: seed: .*one"):
        load(path)
