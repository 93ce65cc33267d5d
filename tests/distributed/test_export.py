"""The exported model scores as the trained one, in plain PyTorch."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rechpc import checkpoint as command
from rechpc.config import RunConfig
from rechpc.rules import dump
from rechpc.rundir import RunDir, write_text
from tests.configs import tiny
from tests.distributed.trainer import trainer, whole

DOCUMENTATION = Path(__file__).resolve().parents[2] / "docs/checkpoints.md"


def train_and_score(env, config: RunConfig, run: RunDir):
    """This rank's logits of the first batch after some steps, what it looked at, and the weights."""
    with trainer(env, config, run) as one:
        one.train(0, 8)
        one.save(8)
        batch, logits_B = one.batches.batch(0), one.score(0)
        bags = {name: (jt.values().numpy(), jt.offsets()[:-1].numpy()) for name, jt in batch.sparse.to_dict().items()}
        return logits_B, batch.dense_BF.numpy(), bags, one.parts()


@pytest.fixture(scope="module", params=["row_wise", "column_wise"])
def trained(request, ranks, tmp_path_factory):
    config = tiny(f"sharding.type={request.param}", "optimizer.learning_rate=0.1", world_size=3)
    run = RunDir.create(tmp_path_factory.mktemp("runs"), "run")
    write_text(run.config_path, dump(config))
    return run, ranks(3, train_and_score, config, run)


def test_the_lines_in_the_documentation_score_as_the_trained_model(trained, tmp_path):
    run, results = trained
    assert command.main(["export", str(run.path), str(tmp_path / "out")]) == 0
    (lines,) = re.findall(r"```python\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    names = {"json": json, "torch": torch, "itertools": itertools, "load_file": load_file, "out": tmp_path / "out"}
    exec(lines, names)
    for logits_B, dense_BF, bags, _ in results:
        tensors = {name: tuple(torch.from_numpy(v) for v in bag) for name, bag in bags.items()}
        found = names["logits"](torch.from_numpy(dense_BF), tensors)
        np.testing.assert_allclose(found.numpy(), logits_B, rtol=1e-5, atol=1e-6)


def test_a_table_larger_than_the_limit_is_written_as_several_files(trained, tmp_path):
    run, results = trained
    out = tmp_path / "out"
    limit_bytes = 50_000
    assert command.main(["export", str(run.path), str(out), "--max-file-gib", str(limit_bytes / (1 << 30))]) == 0
    assert all(path.stat().st_size < limit_bytes + 200 for path in out.glob("*.safetensors"))
    files = json.loads((out / "model.json").read_text())["tables"]["t_user"]["files"]
    assert len(files) == 5  # 5,003 rows of 48 bytes
    found = torch.cat([load_file(out / f["file"])["t_user"] for f in files])
    weights = whole([r[3] for r in results])
    expected = weights["model.sparse_arch.embedding_bag_collection.embedding_bags.t_user.weight"]
    assert np.array_equal(found.numpy(), expected)


def test_every_weight_is_exported_and_nothing_else(trained, tmp_path):
    run, results = trained
    out = tmp_path / "out"
    command.main(["export", str(run.path), str(out)])
    exported = [load_file(path) for path in out.glob("*.safetensors")]
    weights = {n.removeprefix("model."): w for n, w in whole([r[3] for r in results]).items() if "/" not in n}
    assert sum(len(tensors) for tensors in exported) == len(weights)
    found = {name: tensor.numpy() for tensors in exported for name, tensor in tensors.items()}
    for name, weight in weights.items():
        table = re.fullmatch(r".*embedding_bags\.(.*)\.weight", name)
        assert np.array_equal(found[table[1] if table else name], weight), name


def test_a_damaged_checkpoint_is_not_exported(trained, tmp_path, capsys):
    run, _ = trained
    path = run.checkpoint_path(8) / "rank-00001.bin"
    content = path.read_bytes()
    path.write_bytes(bytes(len(content)))
    try:
        assert command.main(["export", str(run.path), str(tmp_path / "out")]) == 1
    finally:
        path.write_bytes(content)
    assert capsys.readouterr().err == (
        f"{run.checkpoint_path(8)}: rank-00001.bin does not have its checksum; choose another with --step\n"
    )
    assert not (tmp_path / "out").exists()
