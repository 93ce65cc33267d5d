"""Step by step, the loss is that of a DLRM written in PyTorch alone: one process, nn.EmbeddingBag, torch.optim."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.models.dlrm import InteractionArch, InteractionDCNArch
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.sparse.jagged_tensor import KeyedTensor

from rechpc.config import DenseOptimizer, Interaction, OptimizerConfig, RunConfig, SparseOptimizer
from rechpc.prepare.convert import prepare
from rechpc.rank.data import GlobalBatches, open_splits
from rechpc.rank.interaction import CrossInteraction, DotInteraction, kernels
from rechpc.rundir import RunDir
from tests.configs import changed, tiny
from tests.distributed.trainer import Parts, trainer, whole

CRITEO = Path(__file__).resolve().parents[3] / "shared/data/criteo_8k"
NUM_STEPS = 200  # of 36 samples: one epoch of the 7,200 real rows


class PlainDLRM(nn.Module):
    """DLRM and DLRM-DCNv2 from their papers, with the weights of a gathered state dict."""

    def __init__(self, config: RunConfig, weights: dict[str, np.ndarray]) -> None:
        super().__init__()
        self.config = config
        model = {n.removeprefix("model."): w for n, w in weights.items() if "/" not in n}  # no optimizer state
        found = {name: torch.from_numpy(w.copy()) for name, w in model.items()}
        tables = {n.split(".")[3]: w for n, w in found.items() if ".embedding_bags." in n}
        self.tables = nn.ModuleDict(
            {
                name: nn.EmbeddingBag.from_pretrained(
                    w, freeze=False, mode=config.data.tables()[name].features[0].pooling
                )
                for name, w in tables.items()
            }
        )
        self.bottom = self._linear(found, "dense_arch.")
        self.top = self._linear(found, "over_arch.")
        cross = {n.rpartition("crossnet.")[2]: nn.Parameter(w) for n, w in found.items() if "crossnet." in n}
        self.cross = nn.ParameterDict({n.replace(".", "_"): w for n, w in cross.items()})

    @staticmethod
    def _linear(found: dict[str, torch.Tensor], prefix: str) -> nn.ModuleList:
        layers = nn.ModuleList()
        for name in sorted(n for n in found if n.startswith(prefix) and n.endswith("weight")):
            layer = nn.Linear(*reversed(found[name].shape))
            layer.load_state_dict({"weight": found[name], "bias": found[name.replace("weight", "bias")]})
            layers.append(layer)
        return layers

    def forward(self, dense_BF: torch.Tensor, bags: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        bottom_BD = dense_BF
        for layer in self.bottom:
            bottom_BD = layer(bottom_BD).relu()
        vectors = [bottom_BD]
        for table in self.config.data.tables().values():
            for feature in table.features:
                values, offsets = bags[feature.name]
                vectors.append(self.tables[table.name](values, offsets))
        if self.config.model.interaction is Interaction.dot:
            vectors_BVD = torch.stack(vectors, dim=1)
            first, second = zip(*((i, j) for i in range(len(vectors)) for j in range(i + 1, len(vectors))), strict=True)
            dots_BP = torch.einsum("bid,bjd->bij", vectors_BVD, vectors_BVD)[:, first, second]
            top_BD = torch.cat([bottom_BD, dots_BP], dim=1)
        else:
            first_BD = top_BD = torch.cat(vectors, dim=1)
            for i in range(self.config.model.dcn_layers):
                low_BR = top_BD @ self.cross[f"V_kernels_{i}"].T
                top_BD = first_BD * (low_BR @ self.cross[f"W_kernels_{i}"].T + self.cross[f"bias_{i}"]) + top_BD
        for layer in self.top[:-1]:
            top_BD = layer(top_BD).relu()
        return self.top[-1](top_BD).squeeze(1)


class RowWiseAdagrad(torch.optim.Optimizer):
    """One second moment a row: the mean square of its gradient, summed over the steps."""

    def __init__(self, params: Iterator[nn.Parameter], *, lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                moment = self.state[weight].setdefault("moment", torch.zeros(len(weight), 1))
                moment += weight.grad.square().mean(dim=1, keepdim=True)
                weight -= group["lr"] * weight.grad / (moment.sqrt() + group["eps"])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    SparseOptimizer.rowwise_adagrad: RowWiseAdagrad,
    SparseOptimizer.adagrad: torch.optim.Adagrad,
    DenseOptimizer.adam: torch.optim.Adam,
    SparseOptimizer.sgd: lambda params, lr, eps: torch.optim.SGD(params, lr=lr),
}


def schedule(config: OptimizerConfig, step: int) -> float:
    """The share of the peak learning rate in this step."""
    ends = step + 1 - config.decay_start_step
    if config.warmup_steps and step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    return (1 - min(1.0, max(0, ends) / config.decay_steps)) ** 2 if config.decay_steps else 1.0


def plain(config: RunConfig, weights: dict[str, np.ndarray], num_steps: int) -> tuple[list[float], PlainDLRM]:
    """The losses of the first steps, and the trained model."""
    model, settings = PlainDLRM(config, weights), config.optimizer
    rest = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
    dense_rate = settings.learning_rate if settings.dense_learning_rate is None else settings.dense_learning_rate
    peaks = (settings.learning_rate, dense_rate)
    optimizers = [
        OPTIMIZERS[kind](params, lr=peak, eps=settings.eps)
        for kind, params, peak in zip(
            (settings.sparse, settings.dense), (model.tables.parameters(), rest), peaks, strict=True
        )
    ]
    source = open_splits(config.data)["train"]
    size = config.trainer.global_batch
    batches = GlobalBatches(source, config.data, global_batch=size, rank=0, world_size=1, seed=config.seed)
    losses = []
    for step, batch in enumerate(batches.batches(0, num_steps)):
        bags = {name: (jt.values(), jt.offsets()[:-1]) for name, jt in batch.sparse.to_dict().items()}
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch.dense_BF, bags), batch.labels_B)
        model.zero_grad()
        loss.backward()
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = max(settings.min_learning_rate, peak * schedule(settings, step))
            optimizer.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("is_dcn", [False, True])
@pytest.mark.parametrize("num_features", [1, 2, 26])
def test_the_interactions_are_those_of_torchrec_in_value_and_gradient(num_features, is_dcn):
    torch.manual_seed(num_features)
    names = [f"f{i}" for i in range(num_features)]
    order = [names[i] for i in torch.randperm(num_features)]  # sharded tables come in the order of a plan
    dense_BD = torch.randn(7, 12, dtype=torch.float64)
    pooled = {name: torch.randn(7, 12, dtype=torch.float64) for name in names}
    crossnet = LowRankCrossNet(12 * (num_features + 1), num_layers=3, low_rank=5).double()
    found = []
    for ours in (True, False):
        dense, tables = dense_BD.clone().requires_grad_(), {n: x.clone().requires_grad_() for n, x in pooled.items()}
        crossnet.zero_grad()
        if ours:
            module = CrossInteraction(names, crossnet) if is_dcn else DotInteraction(names, 12)
            output = module(
                dense, KeyedTensor(order, [12] * num_features, torch.cat([tables[n] for n in order], dim=1))
            )
        else:
            module = InteractionDCNArch(num_features, crossnet) if is_dcn else InteractionArch(num_features)
            output = module(dense, torch.stack([tables[n] for n in names], dim=1))
        output.sin().sum().backward()
        kernels = [p.grad for p in crossnet.parameters()] if is_dcn else []
        found.append((output, dense.grad, *(tables[n].grad for n in names), *kernels))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


def threads_of_steps(env, config: RunConfig, run: RunDir) -> tuple[list[int], int]:
    """Threads while tables are updated, and after the steps, of a rank that has 2."""
    found: list[int] = []
    before = torch.get_num_threads()

    def watch(_: nn.Module, __: object, pooled: torch.Tensor) -> None:
        pooled.grad_fn.register_prehook(lambda _: found.append(torch.get_num_threads()))

    with trainer(env, config, run) as one:
        torch.set_num_threads(2)
        for tables in kernels(one.model):
            tables.register_forward_hook(watch)
        one.train(0, 2)
        after = torch.get_num_threads()
    torch.set_num_threads(before)
    return found, after


def test_tables_are_updated_on_one_thread_and_the_others_come_back(ranks, tmp_path):
    config = tiny()
    (answer,) = ranks(1, threads_of_steps, config, RunDir.create(tmp_path, "run"))
    assert answer == ([1, 1], 2)


@dataclasses.dataclass
class Curve:
    """What one rank saw of a training."""

    initial: Parts
    final: Parts
    losses: list[float]


def train(env, config: RunConfig, run: RunDir, num_steps: int) -> Curve:
    with trainer(env, config, run) as one:
        return Curve(one.parts(), losses=one.train(0, num_steps), final=one.parts())


def mean_losses(curves: list[Curve]) -> np.ndarray:
    return np.mean([c.losses for c in curves], axis=0)


@pytest.mark.parametrize("interaction", Interaction)
def test_shared_tables_means_and_empty_bags_train_as_in_plain_pytorch(ranks, tmp_path, interaction):
    values = [f"model.interaction={interaction}", "model.dcn_layers=2", "model.dcn_rank=5", "sharding.type=row_wise"]
    # The gradients of tables are small: with this learning rate a wrong one shows in the loss.
    rates = ["optimizer=sgd", "optimizer.learning_rate=5", "optimizer.dense_learning_rate=0.1"]
    config = tiny(*rates, *values, world_size=2)
    curves = ranks(2, train, config, RunDir.create(tmp_path, "run"), 12)

    losses, model = plain(config, whole([c.initial for c in curves]), 12)

    np.testing.assert_allclose(mean_losses(curves), losses, rtol=1e-5)
    final = whole([c.final for c in curves])
    for name, table in model.tables.items():
        (trained,) = (w for key, w in final.items() if key.endswith(f".embedding_bags.{name}.weight"))
        np.testing.assert_allclose(trained, table.weight.detach(), rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def criteo(tmp_path_factory) -> str:
    """The first 8,000 rows of Criteo Kaggle, prepared."""
    if not CRITEO.is_dir():
        pytest.skip(f"needs the real Criteo rows in {CRITEO}")
    path = tmp_path_factory.mktemp("criteo") / "data"
    prepare(changed("experiment=criteo_8k", f"data.source={CRITEO}", f"data.path={path}").data)
    return str(path)


# Adagrad and Adam with eps=1e-8 step by the sign of a gradient that is nothing but rounding; see test_training.py.
SETTINGS = {
    "sgd": ["optimizer=sgd", "optimizer.learning_rate=0.5", "optimizer.dense_learning_rate=0.1"],
    "adagrad": ["optimizer=adagrad", "optimizer.eps=1e-4"],
    "rowwise_adagrad and a dense adam": ["optimizer=adam", "optimizer.eps=1e-4"],
}
PLANS = {1: "auto", 2: "row_wise", 3: "table_wise"}
# Everything with DLRM, and each world size with DCNv2.
CASES = [(optimizer, Interaction.dot, world_size) for optimizer in SETTINGS for world_size in PLANS]
CASES += [(optimizer, Interaction.dcn, world_size) for optimizer, world_size in zip(SETTINGS, PLANS, strict=True)]


@pytest.fixture(scope="module")
def reference(criteo):
    """Losses of plain PyTorch, computed once for each model and optimizer."""
    found: dict[tuple[str, str], list[float]] = {}

    def of(config: RunConfig, key: tuple[str, str], weights: dict[str, np.ndarray]) -> list[float]:
        if key not in found:
            found[key] = plain(config, weights, NUM_STEPS)[0]
        return found[key]

    return of


def _settings(optimizer: str, interaction: Interaction, world_size: int, path: str) -> RunConfig:
    return changed(
        "experiment=criteo_8k",
        *SETTINGS[optimizer],
        *("optimizer.warmup_steps=30", "optimizer.decay_start_step=100", "optimizer.decay_steps=80"),
        *(f"model.interaction={interaction}", "model.dcn_layers=2", "model.dcn_rank=8"),
        *(f"data.path={path}", "trainer.global_batch=36", "trainer.collective_timeout_s=30"),
        *(f"job.ranks_per_node={world_size}", f"sharding.type={PLANS[world_size]}"),
    )


@pytest.mark.parametrize(("optimizer", "interaction", "world_size"), CASES, ids=str)
def test_an_epoch_of_real_rows_is_that_of_plain_pytorch(
    ranks, criteo, reference, tmp_path, optimizer, interaction, world_size
):
    config = _settings(optimizer, interaction, world_size, criteo)
    curves = ranks(world_size, train, config, RunDir.create(tmp_path, "run"), NUM_STEPS)

    expected = reference(config, (optimizer, interaction), whole([c.initial for c in curves]))

    assert len(expected) == NUM_STEPS
    np.testing.assert_allclose(mean_losses(curves), expected, rtol=1e-4)
    assert np.mean(expected[-40:]) < np.mean(expected[:40]) < math.log(2) + 0.05
