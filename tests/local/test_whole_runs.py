"""Whole runs on this machine, as a user starts them: submit, submitit, host task, torchrun, ranks."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CRITEO = Path(__file__).resolve().parents[3] / "shared/data/criteo_8k"
SMALL = ["data.synthetic.train_rows=20000", "data.synthetic.test_rows=3001", "trainer.global_batch=512"]
STEPS = -(-20_000 // 512)


def command(*arguments: str, entry: str = "submit") -> list[str]:
    return [sys.executable, "-m", f"rechpc.{entry}", *arguments]


def run(*arguments: str, entry: str = "submit", status: int = 0) -> str:
    done = subprocess.run(command(*arguments, entry=entry), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def only_run(root: Path) -> Path:
    (path,) = root.glob("*/*")
    return path


def result(path: Path) -> dict[str, Any]:
    return json.loads((path / "result.json").read_text())


def checkpoint_digests(path: Path) -> list[str]:
    newest = max((path / "checkpoints").iterdir())
    return [file["sha256"] for file in json.loads((newest / "manifest.json").read_text())["files"]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run and what submit printed."""
    root = tmp_path_factory.mktemp("runs")
    text = run(f"runs_root={root}", "checkpoint.every=15", "trainer.eval_every=20", *SMALL)
    return only_run(root), text


def test_a_run_ends_with_its_score_beside_the_best_possible_one(finished: tuple[Path, str]) -> None:
    path, text = finished
    found = result(path)

    assert found["state"] == "finished"
    assert found["step"] == STEPS
    assert found["world_size"] == 2
    assert found["attempts"] == 1
    assert found["test_samples"] == 3001
    assert 0.6 < found["test_auc"] < found["optimal_auc"]
    assert found["test_ne"] > found["optimal_ne"]
    assert found["samples_per_s"] > 0
    assert f"test AUC {found['test_auc']:.4f} of {found['optimal_auc']:.4f} possible" in text
    assert str(path) in text


def test_every_record_has_attempt_and_step_and_keys_with_units(finished: tuple[Path, str]) -> None:
    records = [json.loads(line) for line in (finished[0] / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]

    assert all({"attempt", "step", "time_s"} <= record.keys() for record in records)
    assert [record["step"] for record in steps] == [10, 20, 30, 40]
    assert {"loss", "ne", "samples_per_s", "step_time_ms", "learning_rate", "rank0_peak_rss_gib"} <= steps[0].keys()
    assert [record["step"] for record in records if "val_auc" in record] == [20, 40]


def test_tensorboard_events_are_written(finished: tuple[Path, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished[0] / "tensorboard"))
    events.Reload()

    assert [event.step for event in events.Scalars("loss")] == [10, 20, 30, 40]


def test_status_reads_a_copy(finished: tuple[Path, str], tmp_path: Path) -> None:
    copy = shutil.copytree(finished[0], tmp_path / "copy")

    text = run(str(copy), entry="status")

    assert "finished" in text
    assert f"{result(copy)['test_auc']:.4f}" in text


def test_run_directory_is_private_and_holds_its_own_code(finished: tuple[Path, str]) -> None:
    path = finished[0]

    assert path.stat().st_mode & 0o077 == 0
    assert (path / "code/rechpc/train.py").is_file()
    assert (path / "plan.txt").read_text().count("t_item") == 1


def test_ctrl_c_saves_and_a_resume_ends_with_the_same_bits(finished: tuple[Path, str], tmp_path: Path) -> None:
    arguments = [f"runs_root={tmp_path}", "checkpoint.every=15", "trainer.eval_every=20", *SMALL]
    # A group of its own, to which the whole Ctrl-C goes, as from a terminal.
    process = subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    wait_for_step(tmp_path, 1)
    os.killpg(process.pid, signal.SIGINT)
    text, _ = process.communicate(timeout=120)
    path = only_run(tmp_path)

    assert process.returncode == 130, text
    assert "resume" in text
    assert "drained" in run(str(path), entry="status", status=3)

    run(f"resume={path}")

    assert result(path)["attempts"] == 2
    assert result(path)["test_auc"] == result(finished[0])["test_auc"]
    assert checkpoint_digests(path) == checkpoint_digests(finished[0])


def wait_for_step(root: Path, step: int) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        for heartbeat in root.glob("*/*/attempts/*/heartbeat"):
            if json.loads(heartbeat.read_text()).get("step", 0) >= step:
                return
        time.sleep(0.02)
    pytest.fail(f"no heartbeat with step {step}")


def test_a_finished_run_is_not_resumed(finished: tuple[Path, str]) -> None:
    done = subprocess.run(command(f"resume={finished[0]}"), capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 2
    assert "finished" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(not CRITEO.is_dir(), reason=f"needs the real Criteo rows in {CRITEO}")
def test_one_epoch_over_real_criteo_rows_reaches_the_known_auc(tmp_path: Path) -> None:
    data = tmp_path / "data"
    run("experiment=criteo_8k", f"data.source={CRITEO}", f"data.path={data}", entry="prepare")

    run("experiment=criteo_8k", f"data.path={data}", f"runs_root={tmp_path / 'runs'}")

    found = result(only_run(tmp_path / "runs"))
    assert found["step"] == 150
    assert found["test_samples"] == 391
    assert found["test_auc"] >= 0.72


def test_a_rehearsal_plays_the_nodes_and_the_sharding_types_of_the_job(tmp_path: Path) -> None:
    rows = ["label,x,a,b,c,d", *(f"{i % 3 % 2},{i % 7},{i},{i % 90}|{i % 11},{i % 5},{i % 800}" for i in range(3000))]
    (tmp_path / "raw").mkdir()
    for split in ("train", "val", "test"):
        (tmp_path / "raw" / f"{split}.csv").write_text("\n".join(rows))
    tables = {"a": 40_000, "b": 9000, "c": 5, "d": 800}
    sparse = ", ".join(f"{{name: {n}, rows: {r}, ids_per_sample: {1 + (n == 'b')}}}" for n, r in tables.items())
    types = {"t_a": "row_wise", "t_b": "grid_shard", "t_c": "data_parallel", "t_d": "table_row_wise"}
    job = [
        "data.kind=csv", "data.dense=[x]", f"data.sparse=[{sparse}]", f"data.path={tmp_path / 'data'}",
        "+sharding.tables={" + ", ".join(f"{table}: {{types: [{kind}]}}" for table, kind in types.items()) + "}",
    ]  # fmt: skip
    run(*job, f"data.source={tmp_path / 'raw'}", entry="prepare")
    small = ["cluster=rehearsal", "cluster.rehearsal.row_share=0.01", f"runs_root={tmp_path / 'runs'}"]

    text = run(*job, *small, "job.nodes=2", "trainer.eval_every=100", "sharding.forward_precision=bf16")

    assert "of 2 x 8 ranks of mi300x as 2 x 2 CPU ranks" in text
    path = only_run(tmp_path / "runs")
    plan = json.loads((path / "plan.json").read_text())
    assert {name: table["type"] for name, table in plan["tables"].items()} == types
    assert (plan["made_for"]["world_size"], plan["made_for"]["local_world_size"]) == (4, 2)
    assert plan["tables"]["t_a"]["rows"] == 400
    assert (result(path)["step"], result(path)["world_size"], result(path)["test_samples"]) == (20, 4, 1280)
    assert "right" in run("verify", str(path), entry="checkpoint")


def test_movielens_reaches_the_known_auc(tmp_path: Path) -> None:
    found = importlib.util.find_spec("recbole")
    folders = [Path(p) / "dataset_example/ml-100k" for p in (found.submodule_search_locations or [])] if found else []
    raw = next((folder for folder in folders if folder.is_dir()), None)
    if raw is None:
        pytest.skip("needs MovieLens-100K, which is inside the wheel of recbole 1.2.1, on the Python path")
    script = [sys.executable, str(ROOT / "bench/movielens_100k.py"), str(raw), str(tmp_path / "parquet")]
    subprocess.run(script, check=True, timeout=120)
    data = ["experiment=movielens_100k", f"data.path={tmp_path / 'data'}"]
    run(*data, f"data.source={tmp_path / 'parquet'}", entry="prepare")

    run(*data, f"runs_root={tmp_path / 'runs'}")

    assert result(only_run(tmp_path / "runs"))["test_auc"] >= 0.77
