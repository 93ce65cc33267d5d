"""FBGEMM's table-batched embedding against torch's own, forward and backward: does it compute what it should here?

FBGEMM calls ROCm experimental. Large launches of older ones give wrong numbers without an error (a HIP grid is cut at
2^32 threads), so that the comparison has to be made at the size of the run.
"""

from dataclasses import dataclass

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn

from rechpc.config import RunConfig

GOOD = "equal to nn.EmbeddingBag, forward and backward"

_ROWS = 1000
_IDS = 2  # of a sample and feature
_LEARNING_RATE = 0.1
_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Size:
    """Of one look-up."""

    batch: int
    features: int

    def __str__(self) -> str:
        return f"{self.batch} samples x {self.features} features"


def largest(config: RunConfig) -> Size:
    """The look-up of one rank where tables are spread evenly: the samples of all ranks, its share of the features."""
    return Size(config.trainer.global_batch, -(-len(config.data.sparse) // config.world_size))


def difference(device: str, *, batch: int, features: int, dim: int) -> str | None:
    """One line where the two do not agree; None where they do. B samples, T features, D columns."""
    here = torch.device(device)
    generator = torch.Generator().manual_seed(1)
    weights_TRD = torch.rand(features, _ROWS, dim, generator=generator)
    ids_TBL = torch.randint(_ROWS, (features, batch, _IDS), generator=generator)
    cpu = here.type == "cpu"
    place = (EmbeddingLocation.HOST, ComputeDevice.CPU) if cpu else (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(_ROWS, dim, *place)] * features,
        optimizer=EmbOptimType.EXACT_SGD,
        learning_rate=_LEARNING_RATE,
        device=here,
    )
    for mine, weights_RD in zip(tbe.split_embedding_weights(), weights_TRD, strict=True):
        mine.data.copy_(weights_RD)
    offsets = torch.arange(0, features * batch * _IDS + 1, _IDS)
    pooled_BTD = tbe(ids_TBL.flatten().to(here), offsets.to(here)).view(batch, features, dim)
    # A gradient of 1 / B keeps the updates of rows that many samples share within the precision of float32.
    pooled_BTD.backward(torch.full_like(pooled_BTD, 1 / batch))
    updated = tbe.split_embedding_weights()
    for t in range(features):
        bag = nn.EmbeddingBag.from_pretrained(weights_TRD[t].to(here), freeze=False, mode="sum")
        expected_BD = bag(ids_TBL[t].to(here))
        expected_BD.backward(torch.full_like(expected_BD, 1 / batch))
        assert bag.weight.grad is not None
        stepped_RD = bag.weight.detach() - _LEARNING_RATE * bag.weight.grad
        for what, mine, right in (
            ("the output", pooled_BTD[:, t], expected_BD),
            ("the updated weights", updated[t], stepped_RD),
        ):
            worst = float((mine.detach() - right.detach()).abs().max())
            if not worst <= _TOLERANCE:  # also where it is NaN
                size = Size(batch, features)
                return (
                    f"{what} of feature {t}: off by {worst:.3g} on {device} at {size} of {dim} columns: FBGEMM "
                    "computes wrong numbers; use another image, or a smaller trainer.global_batch"
                )
    return None
