"""One prepared script for a machine with one GPU, of AMD or NVIDIA: is it right, and how fast is it?

  python bench/gpu.py cluster=mi300x [--out FILE]
  python bench/gpu.py cluster=h200 trainer.global_batch=32768

First tests/gpu, which compare with the CPU. Then MLPerf's DLRM-DCNv2 (conf/experiment/mlperf_dlrm_dcnv2.yaml), its
large tables cut until weights and Adagrad state take 60 % of the memory, on made-up batches that lie in pinned memory:

  rechpc    the model, plan and optimizers of a run, with its pipeline
  default   the same model as dlrm_main.py builds it: TorchRec's planner, topology and sharders by default

in turn, several pairs, with the median of their ratio; and beside it the roofline of rechpc.plan for this GPU. Times
are between two synchronisations. It has not run on any GPU yet.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rechpc import compose  # noqa: E402
from rechpc.config import CommandConfig, DataKind, RunConfig  # noqa: E402
from rechpc.planned import roofline_samples_per_s  # noqa: E402
from rechpc.rank import process  # noqa: E402
from rechpc.rank.data import Batch, GlobalBatches, open_splits  # noqa: E402
from rechpc.rank.model import build  # noqa: E402
from rechpc.rank.optim import Optimizers, fuse_sparse  # noqa: E402
from rechpc.rank.sharding import agree_on_plan, shard  # noqa: E402
from rechpc.rundir import RunDir  # noqa: E402
from rechpc.topology import GIB, RankEnv  # noqa: E402

BATCHES, STEPS, PAIRS = 8, 50, 6
STATE = 2 * 4  # bytes of an element: weight and Adagrad
NO_GPU = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="cluster=NAME and other keys of rechpc.submit")
    parser.add_argument("--out", type=Path, help="append the record to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no GPU here: nothing was tested and nothing measured")
        return NO_GPU
    tests = [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests/gpu")]
    if status := subprocess.run(tests, check=False, cwd=ROOT).returncode:
        return status
    # torchrun's variables, of one rank.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with tempfile.TemporaryDirectory() as folder:
        record = measure(config_of(options.overrides), RunDir.create(Path(folder), "run"))
    print(json.dumps(record, indent=2))
    if options.out:
        with options.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
    return 0


def config_of(overrides: list[str]) -> RunConfig:
    """MLPerf's model on one GPU, its tables cut to what fits."""
    ConfigStore.instance().store(name="schema", node=CommandConfig)
    fixed = ["experiment=mlperf_dlrm_dcnv2", "job.ranks_per_node=1", "cluster.launcher=local", "trainer.eval_every=0"]
    with hydra.initialize_config_dir(str(compose.CONF_PATH), version_base="1.3"):
        config = compose.typed(hydra.compose("config", [*fixed, *overrides]))
    config.data.kind, config.data.columns = DataKind.synthetic, {}
    rows = int(0.6 * config.cluster.hbm_gib * GIB) // (STATE * config.model.embedding_dim)
    limit = max(f.rows for f in config.data.sparse)
    while sum(min(f.rows, limit) for f in config.data.sparse) > rows:
        limit = limit * 9 // 10
    for feature in config.data.sparse:
        feature.rows = min(feature.rows, limit)
    config.data.synthetic.train_rows = BATCHES * config.trainer.global_batch
    return config


def measure(config: RunConfig, run: RunDir) -> dict[str, Any]:
    """Both in turn."""
    with process.start(config, RankEnv.from_environment()) as here:
        source = open_splits(config.data)["train"]
        batches = GlobalBatches(
            source, config.data, global_batch=config.trainer.global_batch, rank=0, world_size=1, seed=1, pin=True
        )
        held = [batches.batch(step).pin_memory() for step in range(BATCHES)]
        model = build(config.model, config.data, seed=1, device=here.device)
        fuse_sparse(model, config.optimizer)
        plan = agree_on_plan(model, config, run, here)
        speeds: dict[str, list[float]] = {"rechpc": [], "default": []}
        for _ in range(PAIRS):
            # One at a time, for both together do not fit.
            for name, found in speeds.items():
                model = build(config.model, config.data, seed=1, device=here.device)
                fuse_sparse(model, config.optimizer)
                default = name == "default"
                sharded = DistributedModelParallel(model, device=here.device) if default else shard(
                    model, config, run, here
                )  # fmt: skip
                found.append(speed(sharded, config, held, here.device))
                del sharded, model
                torch.cuda.empty_cache()
        ratios = [a / b for a, b in zip(speeds["rechpc"], speeds["default"], strict=True)]
        gpu = torch.cuda.get_device_properties(0)
        return {
            "gpu": gpu.name,
            "torch": torch.__version__,
            "backend": dist.get_backend(),
            "rows": sum(f.rows for f in config.data.sparse),
            "global_batch": config.trainer.global_batch,
            "samples_per_s": {name: statistics.median(found) for name, found in speeds.items()},
            "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
            "roofline_samples_per_s": roofline_samples_per_s(plan, config),
            "peak_hbm_gib": torch.cuda.max_memory_allocated() / GIB,
        }


def speed(model: DistributedModelParallel, config: RunConfig, held: list[Batch], device: torch.device) -> float:
    """samples/s of STEPS steps after a fifth as many."""
    optimizers = Optimizers(model, config.optimizer)
    pipeline = TrainPipelineSparseDist(model, optimizers.combined, device, execute_all_batches=True)
    warm_up = STEPS // 5
    iterator = (held[step % BATCHES] for step in range(warm_up + STEPS + 4))
    for _ in range(warm_up):
        pipeline.progress(iterator)
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(STEPS):
        pipeline.progress(iterator)
    torch.cuda.synchronize()
    return STEPS * config.trainer.global_batch / (time.perf_counter() - start_s)


if __name__ == "__main__":
    sys.exit(main())
