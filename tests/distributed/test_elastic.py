"""A run that changes its number of ranks and its plan goes on as if it had not."""

from typing import Any

import numpy as np
import pytest

from rechpc.config import RunConfig
from rechpc.rundir import RunDir
from tests.configs import tiny
from tests.distributed.trainer import trainer

STEPS = 6  # on each number of ranks
DENSE = {"adagrad": "adagrad", "rowwise_adagrad": "adam", "sgd": "adam"}
# World sizes and the sharding type there.
JOURNEYS = {
    "adagrad": [(4, "row_wise"), (2, "table_wise"), (3, "column_wise"), (1, "data_parallel")],
    "rowwise_adagrad": [(4, "table_wise"), (2, "data_parallel"), (3, "row_wise"), (1, "table_wise")],
    "sgd": [(4, "data_parallel"), (2, "column_wise"), (3, "table_wise"), (1, "row_wise")],
}
TWO_NODES = [(4, "table_row_wise"), (2, "column_wise"), (4, "grid_shard"), (3, "row_wise")]


def settings(optimizer: str, sharding_type: str, world_size: int) -> RunConfig:
    values = [f"optimizer={optimizer}", f"optimizer.dense={DENSE[optimizer]}", "optimizer.eps=1e-4", "trainer.epochs=3"]
    if sharding_type in ("table_row_wise", "grid_shard"):
        values += ["cluster=slurm", "job.nodes=2"]
        world_size //= 2
    return tiny(*values, f"sharding.type={sharding_type}", world_size=world_size)


def go_on(env, config: RunConfig, run: RunDir, step: int) -> list[float]:
    """This rank's losses of the next steps, from the newest checkpoint to a new one."""
    with trainer(env, config, run) as one:
        types = {s.sharding_type for s in one.model.plan.plan.popitem()[1].values()}
        assert str(config.sharding.type) in types
        state = one.restore() or {"step": 0}
        assert state["step"] == step
        losses = one.train(step, step + STEPS)
        one.save(step + STEPS)
        return losses


def travel(ranks, run: RunDir, optimizer: str, journey: list[tuple[int, str]]) -> np.ndarray:
    losses: list[Any] = []
    for i, (world_size, sharding_type) in enumerate(journey):
        config = settings(optimizer, sharding_type, world_size)
        losses += np.mean(ranks(world_size, go_on, config, run, i * STEPS), axis=0).tolist()
    return np.array(losses)


@pytest.mark.parametrize("optimizer", JOURNEYS)
def test_losses_do_not_depend_on_the_ranks_and_plans_on_the_way(ranks, tmp_path, optimizer):
    expected = travel(
        ranks, RunDir.create(tmp_path, "still"), optimizer, [(1, "table_wise")] * len(JOURNEYS[optimizer])
    )
    found = travel(ranks, RunDir.create(tmp_path, "moving"), optimizer, JOURNEYS[optimizer])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_checkpoints_are_ready_for_plans_that_know_nodes(ranks, tmp_path):
    expected = travel(ranks, RunDir.create(tmp_path, "still"), "adagrad", [(1, "table_wise")] * len(TWO_NODES))
    found = travel(ranks, RunDir.create(tmp_path, "moving"), "adagrad", TWO_NODES)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
