"""Configurations for tests, composed from conf/ as the command line composes them."""

import functools

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from rechpc import compose as product
from rechpc.config import CommandConfig

# A DLRM that trains in milliseconds and has what goes wrong elsewhere: a table with fewer rows than ranks, one with
# more rows than share a random stream, a shared table, bags that may be empty, sums and means of them, rows and
# columns that nothing divides, and a last batch that is not full (1,000 = 10 x 96 + 40).
TINY = (
    "model.embedding_dim=12",
    "model.dense_layers=[16,12]",
    "model.over_layers=[16,1]",
    "data.dense=[d0,d1,d2]",
    "data.sparse=[{name: user, rows: 5003}, {name: item, rows: 97}, {name: device, rows: 2},"
    "{name: history, rows: 97, table: t_item, ids_per_sample: 3},"
    "{name: tags, rows: 31, ids_per_sample: 1.5, pooling: mean}]",
    "data.block_rows=256",
    "data.synthetic.train_rows=1000",
    "data.synthetic.val_rows=0",
    "data.synthetic.test_rows=61",
    "trainer.global_batch=96",
)


def compose(*overrides: str) -> CommandConfig:
    """The validated configuration of these overrides, as on the command line."""
    return product.typed(_composed(*overrides))


@functools.cache
def _composed(*overrides: str) -> DictConfig:
    ConfigStore.instance().store(name="schema", node=CommandConfig)
    with hydra.initialize_config_dir(str(product.CONF_PATH), version_base="1.3"):
        raw = hydra.compose("config", overrides=list(overrides))
        job = product.rehearsed(raw, list(overrides))
        return hydra.compose("config", overrides=job) if job else raw


def changed(*overrides: str) -> CommandConfig:
    """As `compose`, but quicker where many differ in values alone; a value is YAML here."""
    groups = [o for o in overrides if (product.CONF_PATH / o.partition("=")[0]).is_dir()]
    values = OmegaConf.from_dotlist([o for o in overrides if o not in groups])
    base = _composed(*groups).copy()
    OmegaConf.set_struct(base, False)  # `typed` refuses what the schema does not know
    return product.typed(OmegaConf.merge(base, values))


def tiny(*overrides: str, world_size: int = 1) -> CommandConfig:
    """A small run of so many ranks; a collective that hangs there fails soon."""
    return changed(*TINY, f"job.ranks_per_node={world_size}", "trainer.collective_timeout_s=30", *overrides)
