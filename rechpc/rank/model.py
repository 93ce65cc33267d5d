"""The model: TorchRec's DLRM and DLRM-DCNv2 over any list of tables, with a loss that padding cannot change.

Initial weights are a function of the seed and the place in the model alone, so that every world size and every
plan starts from the same model.

Shape legend: B rows of a local batch, F dense features.
"""

import math
import zlib

import torch
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from rechpc.choices import Interaction, TablePrecision
from rechpc.config import DataConfig, ModelConfig
from rechpc.rank import interaction
from rechpc.rank.data import Batch

Output = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Loss (scalar), logits (B,), labels (B,) and weights (B,) of one rank's part of a step."""

# Rows of a table that share one random stream: small enough that a row-wise shard wastes little.
_INIT_ROWS = 4096


class WeightedLoss(nn.Module):
    """A model with its loss, in the form that TorchRec's train pipelines call."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[torch.Tensor, Output]:
        """The weighted sum of the binary cross-entropies (scalar), and what the loop reports."""
        logits_B = self.model(batch.dense_BF, batch.sparse).squeeze(-1)
        loss_B = nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels_B, reduction="none")
        loss = (loss_B * batch.weights_B).sum()
        return loss, (loss.detach(), logits_B.detach(), batch.labels_B, batch.weights_B)


def build(model: ModelConfig, data: DataConfig, *, seed: int, device: torch.device) -> WeightedLoss:
    """The model with dense weights on `device` and tables on meta, to be sharded; the same on every rank."""
    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=table.name,
                embedding_dim=model.embedding_dim,
                num_embeddings=table.rows,
                feature_names=[feature.name for feature in table.features],
                pooling=PoolingType(str(table.features[0].pooling).upper()),
                data_type=DataType.FP16 if model.table_precision is TablePrecision.fp16 else DataType.FP32,
            )
            for table in data.tables().values()
        ],
        device=torch.device("meta"),
    )
    shared = {
        "embedding_bag_collection": tables,
        "dense_in_features": len(data.dense),
        "dense_arch_layer_sizes": model.dense_layers,
        "over_arch_layer_sizes": model.over_layers,
        # On the CPU first, so that a GPU run starts from the same weights.
        "dense_device": torch.device("cpu"),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        dlrm: DLRM = (
            DLRM_DCN(dcn_num_layers=model.dcn_layers, dcn_low_rank_dim=model.dcn_rank, **shared)
            if model.interaction is Interaction.dcn
            else DLRM(**shared)
        )
    if device.type == "cpu":  # not measured on a GPU
        interaction.replace(dlrm)
    for name, part in dlrm.named_children():
        if name != "sparse_arch":
            part.to(device)
    return WeightedLoss(dlrm)


@torch.no_grad()
def init_table_shard(shard: torch.Tensor, *, table: str, rows: int, row: int, column: int, dim: int, seed: int) -> None:
    """Fill the shard that begins at (row, column) of a (rows, dim) table from U(-1/sqrt(rows), 1/sqrt(rows)).

    The value of an element depends on the seed, the table and its place in the table, not on the shard.
    """
    bound = 1 / math.sqrt(rows)
    generator = torch.Generator()
    end = row + shard.shape[0]
    for first in range(row // _INIT_ROWS * _INIT_ROWS, end, _INIT_ROWS):
        generator.manual_seed(zlib.crc32(f"{seed}/{table}/{first}".encode()))
        block = torch.empty(min(_INIT_ROWS, rows - first), dim).uniform_(-bound, bound, generator=generator)
        begin, stop = max(first, row), min(first + len(block), end)
        part = block[begin - first : stop - first, column : column + shard.shape[1]]
        shard[begin - row : stop - row].copy_(part)
