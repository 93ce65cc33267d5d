"""A run that changes its number of ranks and its plan goes on as if it had not."""

import os
from typing import Any

import numpy as np
import pytest
from torchrec.distributed import comm

from rechpc.config import RunConfig
from rechpc.rank import sharding
from rechpc.rundir import RunDir
from tests.configs import tiny
from tests.distributed.trainer import trainer

STEPS = 6  # on each number of ranks
DENSE = {"adagrad": "adagrad", "rowwise_adagrad": "adam", "sgd": "adam"}
# World sizes and the sharding type there; a pair is a type that no configuration offers yet, on nodes of so many ranks.
JOURNEYS = {
    "adagrad": [(4, "row_wise"), (2, "table_wise"), (3, "column_wise"), (1, "data_parallel")],
    "rowwise_adagrad": [(4, "table_wise"), (2, "data_parallel"), (3, "row_wise"), (1, "table_wise")],
    "sgd": [(4, "data_parallel"), (2, "column_wise"), (3, "table_wise"), (1, "row_wise")],
}
TWO_NODES = [(4, "table_row_wise"), (2, "column_wise"), (4, "grid_shard"), (3, "row_wise")]


def settings(optimizer: str, sharding_type: str, world_size: int) -> RunConfig:
    values = [f"optimizer={optimizer}", f"optimizer.dense={DENSE[optimizer]}", "optimizer.eps=1e-4", "trainer.epochs=3"]
    return tiny(*values, f"sharding.type={sharding_type}", world_size=world_size)


def on_two_nodes(plan: sharding.Plan, sharding_type: str) -> sharding.Plan:
    """Large tables by rows over the two ranks of a node, and by columns over two nodes where it is a grid."""
    for number, table in enumerate(plan["tables"].values()):
        if table["rows"] < 4:
            continue
        rows, dim = table["rows"], table["dim"]
        first = -(-rows // 2)
        nodes = [(0, 4), (1, 8)] if sharding_type == "grid_shard" else [(number % 2, dim)]
        column, shards = 0, []
        for node, width in nodes:
            for local_rank, (begin, end) in enumerate([(0, first), (first, rows)]):
                shards.append({"rank": 2 * node + local_rank, "offset": [begin, column], "shape": [end - begin, width]})
            column += width
        table |= {"type": sharding_type, "ranks": [s["rank"] for s in shards], "shards": shards}
    return plan


def go_on(env, config: RunConfig, run: RunDir, step: int, by_hand: str | None) -> list[float]:
    """This rank's losses of the next steps, from the newest checkpoint to a new one."""
    if by_hand:
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        # TorchRec makes these once in the life of a process; here they are of a process group that has ended.
        comm._INTRA_PG = comm._CROSS_PG = None
        real = sharding.agree_on_plan
        sharding.agree_on_plan = lambda *args: on_two_nodes(real(*args), by_hand)
    try:
        with trainer(env, config, run) as one:
            if by_hand:
                types = {s.sharding_type for s in one.model.plan.plan.popitem()[1].values()}
                assert by_hand in types
            state = one.restore() or {"step": 0}
            assert state["step"] == step
            losses = one.train(step, step + STEPS)
            one.save(step + STEPS)
            return losses
    finally:
        if by_hand:
            sharding.agree_on_plan = real


def travel(ranks, run: RunDir, optimizer: str, journey: list[tuple[int, str]]) -> np.ndarray:
    losses: list[Any] = []
    for i, (world_size, sharding_type) in enumerate(journey):
        by_hand = sharding_type if sharding_type in ("table_row_wise", "grid_shard") else None
        config = settings(optimizer, "table_wise" if by_hand else sharding_type, world_size)
        losses += np.mean(ranks(world_size, go_on, config, run, i * STEPS, by_hand), axis=0).tolist()
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
