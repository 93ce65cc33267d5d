"""On one GPU, the losses are those of the CPU: every kernel, optimizer and interaction, pinned copies, the pipeline.

`bench/gpu.py` runs these first. They have not run on any GPU yet.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rechpc.config import Interaction, Kernel, RunConfig
from rechpc.rank.data import GlobalBatches, open_splits
from rechpc.rundir import RunDir
from tests.configs import tiny
from tests.distributed.ranks import Ranks
from tests.distributed.trainer import trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch sees none")

NUM_STEPS = 12
OPTIMIZERS = {
    "sgd": ["optimizer=sgd", "optimizer.learning_rate=5", "optimizer.dense_learning_rate=0.1"],
    "adagrad": ["optimizer=adagrad", "optimizer.eps=1e-4", "optimizer.warmup_steps=6"],
    "rowwise_adagrad and a dense adam": ["optimizer=adam", "optimizer.eps=1e-4", "optimizer.warmup_steps=6"],
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(1)
    yield pool
    pool.close()


def gpu() -> list[str]:
    """The GPU that is here, as a configuration."""
    found = torch.cuda.get_device_properties(0)
    return ["cluster.device=cuda", f"cluster.hbm_gib={found.total_memory / 2**30}", "sharding.reserve=0.5"]


def train(env, config: RunConfig, run: RunDir, *, pin: bool) -> list[float]:
    with trainer(env, config, run) as one:
        one.batches._pin = pin
        return one.train(0, NUM_STEPS)


def unpipelined(env, config: RunConfig, run: RunDir) -> list[float]:
    """The same steps one after the other, without streams."""
    with trainer(env, config, run) as one:
        losses = []
        for step in range(NUM_STEPS):
            one.optimizers.set_step(step)
            one.optimizers.combined.zero_grad()
            loss, (detached, *_) = one.model(one.batches.batch(step).to(one.here.device))
            loss.backward()
            one.optimizers.combined.step()
            losses.append(detached.item())
        return losses


def losses(ranks: Ranks, tmp_path, config: RunConfig, *, pin: bool) -> list[float]:
    (found,) = ranks(1, _pinned if pin else _pageable, config, RunDir.create(tmp_path, "run"))
    return found


def _pinned(env, config: RunConfig, run: RunDir) -> list[float]:
    return train(env, config, run, pin=True)


def _pageable(env, config: RunConfig, run: RunDir) -> list[float]:
    return train(env, config, run, pin=False)


@pytest.mark.parametrize("interaction", Interaction)
@pytest.mark.parametrize("kernel", Kernel)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_kernel_and_optimizer_trains_as_on_the_cpu(ranks, tmp_path, optimizer, kernel, interaction):
    values = [*OPTIMIZERS[optimizer], f"model.interaction={interaction}", "model.dcn_layers=2", "model.dcn_rank=5"]
    expected = losses(ranks, tmp_path, tiny(*values), pin=False)
    found = losses(ranks, tmp_path, tiny(*values, *gpu(), f"sharding.kernel={kernel}"), pin=True)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert expected[0] > expected[-1]


@pytest.mark.parametrize("sharding", ["table_wise", "column_wise", "row_wise", "data_parallel"])
def test_every_sharding_type_trains_as_on_the_cpu(ranks, tmp_path, sharding):
    values = [*OPTIMIZERS["adagrad"], f"sharding.type={sharding}"]
    expected = losses(ranks, tmp_path, tiny(*values), pin=False)
    np.testing.assert_allclose(losses(ranks, tmp_path, tiny(*values, *gpu()), pin=True), expected, rtol=1e-4)


def test_pinned_copies_and_the_pipeline_change_nothing(ranks, tmp_path):
    config = tiny(*OPTIMIZERS["sgd"], *gpu())
    pinned, pageable = (losses(ranks, tmp_path, config, pin=pin) for pin in (True, False))
    (plain,) = ranks(1, unpipelined, config, RunDir.create(tmp_path, "run"))
    np.testing.assert_allclose(pinned, pageable, rtol=1e-6)
    np.testing.assert_allclose(pinned, plain, rtol=1e-6)


def test_batches_for_a_gpu_are_pinned():
    config = tiny()
    batches = GlobalBatches(
        open_splits(config.data)["train"], config.data, global_batch=96, rank=0, world_size=1, seed=1, pin=True
    )
    batch = next(batches.batches(0, 1))
    tensors = (batch.dense_BF, batch.labels_B, batch.weights_B, batch.sparse.values(), batch.sparse.lengths())
    assert all(tensor.is_pinned() for tensor in tensors)
