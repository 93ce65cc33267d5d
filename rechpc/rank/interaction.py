"""What a CPU computes of TorchRec's DLRM in fewer passes over the rows, to float tolerance the same.

Where tables are pooled quickly, the time of a step beside the products of matrices goes into copies: of the pooled rows
into the order of the features, of arrays that are added to another one, and into fresh memory for each; and into
threads that are woken for little (docs/performance.md). Parameters, their names and initial values stay TorchRec's.

Shape legend: B rows of a local batch, F sparse features, V = F + 1 vectors with the dense one, D columns, E = F D,
P pairs of vectors, O = D + P outputs of the dot interaction; N = V D columns of the cross net, R its rank.
"""

from collections.abc import Iterator
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import Perceptron
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor


def replace(dlrm: DLRM) -> None:
    """Have a model on the CPU use what is below."""
    sparse = dlrm.sparse_arch
    features = sparse.sparse_feature_names
    if isinstance(dlrm, DLRM_DCN):
        dlrm.inter_arch = CrossInteraction(features, dlrm.inter_arch.crossnet)
    else:
        dlrm.inter_arch = DotInteraction(features, sparse.D)
    dlrm.sparse_arch = PooledTables(sparse.embedding_bag_collection)
    for module in dlrm.modules():
        if isinstance(module, Perceptron):
            module._activation_fn = torch.relu_  # of a product that nobody else sees


class PooledTables(nn.Module):
    """TorchRec's SparseArch without its copy: the pooled rows of all features in the order that the plan gives."""

    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = tables

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Of every feature the pooled rows (B, D), side by side."""
        return self.embedding_bag_collection(features)  # type: ignore[no-any-return]


class _Interaction(torch.autograd.Function):
    """The dense vector (B, D) and x x^T above its diagonal (B, P) for the vectors x (B, V, D) of every sample.

    Left to autograd, the backward pass takes two products of the same size, whose results it adds, a scatter that sums
    what never meets, and a copy for every feature.
    """

    @staticmethod
    def forward(
        ctx: Any, dense_BD: torch.Tensor, pooled_BE: torch.Tensor, places_P: torch.Tensor, columns_VV: torch.Tensor
    ) -> torch.Tensor:
        x_BVD = torch.cat((dense_BD, pooled_BE), dim=1).view(len(dense_BD), len(columns_VV), -1)
        ctx.save_for_backward(x_BVD, columns_VV)
        products_BVV = torch.bmm(x_BVD, x_BVD.transpose(1, 2))
        return torch.cat((dense_BD, products_BVV.flatten(1).index_select(1, places_P)), dim=1)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_BO: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x_BVD, columns_VV = ctx.saved_tensors
        grad_BVV = grad_BO.index_select(1, columns_VV.flatten()).view(-1, *columns_VV.shape)
        grad_BVV.diagonal(dim1=1, dim2=2).zero_()  # a vector with itself is no output
        dense_BD = torch.bmm(grad_BVV[:, :1], x_BVD).squeeze(1).add_(grad_BO[:, : x_BVD.shape[2]])
        return dense_BD, torch.bmm(grad_BVV[:, 1:], x_BVD).flatten(1), None, None


class DotInteraction(nn.Module):
    """What TorchRec's SparseArch and InteractionArch make of the pooled tables."""

    def __init__(self, features: list[str], dim: int) -> None:
        super().__init__()
        self._features, self._dim = features, dim
        self._order: list[str] = []
        self.register_buffer("places_P", None, persistent=False)
        self.register_buffer("columns_VV", None, persistent=False)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedTensor) -> torch.Tensor:
        """The dense vector (B, D) and all dot products of two different vectors (B, P), side by side."""
        if sparse_features.keys() != self._order:
            self._arrange(sparse_features.keys())
        return _Interaction.apply(dense_features, sparse_features.values(), self.places_P, self.columns_VV)

    def _arrange(self, order: list[str]) -> None:
        """Where each pair of features is found among those of the sharded tables, whose order is a plan's."""
        self._order = order
        size = len(order) + 1
        place_V = torch.tensor([0, *(1 + order.index(name) for name in self._features)])
        row_P, column_P = place_V[torch.triu_indices(size, size, offset=1)]
        columns_VV = torch.zeros(size, size, dtype=torch.long)
        columns_VV[row_P, column_P] = columns_VV[column_P, row_P] = self._dim + torch.arange(len(row_P))
        self.places_P, self.columns_VV = row_P * size + column_P, columns_VV


class _Cross(torch.autograd.Function):
    """x_{l+1} = x_0 * (W (V x_l) + b) + x_l for every layer l, https://arxiv.org/abs/2008.13535.

    Left to autograd, the backward pass makes an array of (B, N) four times a layer, to add it to another one.
    """

    @staticmethod
    def forward(ctx: Any, x0_BN: torch.Tensor, num_layers: int, *kernels: torch.Tensor) -> torch.Tensor:
        v_LRN, w_LNR, bias_LN = (kernels[i * num_layers : (i + 1) * num_layers] for i in range(3))
        x_LBN, low_LBR, crossed_LBN = [x0_BN], [], []
        for v_RN, w_NR, bias_N in zip(v_LRN, w_LNR, bias_LN, strict=True):
            low_LBR.append(nn.functional.linear(x_LBN[-1], v_RN))
            crossed_LBN.append(nn.functional.linear(low_LBR[-1], w_NR, bias_N))
            x_LBN.append(torch.addcmul(x_LBN[-1], x0_BN, crossed_LBN[-1]))
        ctx.num_layers = num_layers
        ctx.save_for_backward(*v_LRN, *w_LNR, *x_LBN[:-1], *low_LBR, *crossed_LBN)
        return x_LBN[-1]

    @staticmethod
    def backward(ctx: Any, grad_BN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        saved, n = ctx.saved_tensors, ctx.num_layers
        v_LRN, w_LNR, x_LBN, low_LBR, crossed_LBN = (saved[i * n : (i + 1) * n] for i in range(5))
        grad_BN, grad_x0_BN = grad_BN.clone(), torch.zeros_like(grad_BN)
        grad_v_LRN: list[torch.Tensor] = []
        grad_w_LNR: list[torch.Tensor] = []
        grad_bias_LN: list[torch.Tensor] = []
        for layer in reversed(range(n)):
            grad_x0_BN.addcmul_(grad_BN, crossed_LBN[layer])
            grad_crossed_BN = grad_BN * x_LBN[0]
            grad_low_BR = grad_crossed_BN @ w_LNR[layer]
            grad_v_LRN.insert(0, grad_low_BR.t() @ x_LBN[layer])
            grad_w_LNR.insert(0, grad_crossed_BN.t() @ low_LBR[layer])
            grad_bias_LN.insert(0, grad_crossed_BN.sum(0))
            grad_BN.addmm_(grad_low_BR, v_LRN[layer])
        return grad_BN.add_(grad_x0_BN), None, *grad_v_LRN, *grad_w_LNR, *grad_bias_LN


class CrossInteraction(nn.Module):
    """What TorchRec's SparseArch and InteractionDCNArch make of the pooled tables."""

    def __init__(self, features: list[str], crossnet: LowRankCrossNet) -> None:
        super().__init__()
        self._features = features
        self.crossnet = crossnet

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedTensor) -> torch.Tensor:
        """The dense vector and the pooled ones (B, N), crossed."""
        pooled, net = sparse_features.to_dict(), self.crossnet
        x0_BN = torch.cat((dense_features, *(pooled[name] for name in self._features)), dim=1)
        return _Cross.apply(x0_BN, len(net.bias), *net.V_kernels, *net.W_kernels, *net.bias)


def update_tables_on_one_thread(model: nn.Module) -> None:
    """Have FBGEMM's backward pass of the tables of a sharded model on the CPU use one thread, whatever the others use.

    It sorts the ids of each table in parallel parts of microseconds, and nothing else of it is parallel: with 2 threads
    it took twice as long for 256 ids of a table, and never less for more of them (FBGEMM 1.8, docs/performance.md).
    """
    for tables in kernels(model):
        tables.register_forward_hook(_hook_backward)


def kernels(model: nn.Module) -> Iterator[SplitTableBatchedEmbeddingBagsCodegen]:
    """What computes the tables of this rank in a sharded model."""
    for module in model.modules():
        for lookup in getattr(module, "_lookups", ()):  # a plain list in TorchRec
            yield from (m for m in lookup.modules() if isinstance(m, SplitTableBatchedEmbeddingBagsCodegen))


def _hook_backward(_: nn.Module, __: Any, pooled_BE: torch.Tensor) -> None:
    if pooled_BE.grad_fn is not None:
        threads = torch.get_num_threads()
        pooled_BE.grad_fn.register_prehook(lambda _: torch.set_num_threads(1))
        pooled_BE.grad_fn.register_hook(lambda _, __: torch.set_num_threads(threads))
