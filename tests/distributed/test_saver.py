"""When a run saves itself, what it tells of it, and what it keeps."""

import logging
import threading
from typing import Any

import numpy as np
import pytest

from rechpc import manifest
from rechpc.config import RunConfig
from rechpc.errors import DataError
from rechpc.rank import checkpoint
from rechpc.rank.checkpoint import State
from rechpc.rank.saver import Saver, interval_s
from rechpc.rundir import Outcome, RunDir, read_json
from tests.configs import tiny
from tests.distributed.trainer import Parts, attempt_in_process, trainer, whole


def run_of(config: RunConfig, ranks, path) -> RunDir:
    """A finished run."""
    run = RunDir.create(path, "run")
    run.start_attempt("test.0")
    assert ranks(config.world_size, attempt_in_process, config, run, "test.0") == [Outcome.finished] * config.world_size
    return run


def saves(run: RunDir) -> list[dict[str, Any]]:
    return [r for r in run.metrics() if "checkpoint_step" in r]


class Gate:
    """Holds the write of a checkpoint until it is opened."""

    def __init__(self) -> None:
        self.opened, self._write = threading.Event(), checkpoint.write
        checkpoint.write = self._held

    def _held(self, *args: Any) -> Any:
        assert self.opened.wait(30)
        return self._write(*args)

    def remove(self) -> None:
        checkpoint.write = self._write


def train_while_writing(env, config: RunConfig, run: RunDir) -> tuple[Parts, Parts, bool, bool]:
    """The tensors at the save and after steps that were trained while it had not begun to write; was it busy."""
    gate = Gate()
    try:
        with trainer(env, config, run) as one:
            one.train(0, 3)
            saved = one.parts()
            one.saver.save(3, {"step": 3})
            one.train(3, 6)
            changed = one.parts()
            busy = one.saver.busy
            gate.opened.set()
            one.saver.settle()
            return saved, changed, busy, one.saver.busy
    finally:
        gate.remove()


def restored(env, config: RunConfig, run: RunDir) -> Parts:
    with trainer(env, config, run) as one:
        one.restore()
        return one.parts()


def test_a_checkpoint_holds_the_step_at_which_it_was_begun_although_training_goes_on(ranks, tmp_path):
    config, run = tiny("sharding.type=row_wise", "optimizer.dense=adam", world_size=2), RunDir.create(tmp_path, "run")
    results = ranks(2, train_while_writing, config, run)
    assert [(busy, after) for _, _, busy, after in results] == [(True, False)] * 2
    saved, changed = whole([r[0] for r in results]), whole([r[1] for r in results])
    found = whole(ranks(2, restored, config, run))
    assert [n for n in saved if not np.array_equal(saved[n], found[n])] == []
    assert any(not np.array_equal(saved[n], changed[n]) for n in saved)


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_both_ways_of_saving_write_the_same_bytes(ranks, tmp_path, asynchronous):
    config = tiny(f"checkpoint.asynchronous={asynchronous}", "checkpoint.every=5", world_size=2)
    run = run_of(config, ranks, tmp_path)
    found = manifest.read(run.checkpoint_path(11))
    assert [save["checkpoint_step"] for save in saves(run)] == [5, 10, 11]
    other = manifest.read(run_of(tiny("checkpoint.every=0", world_size=2), ranks, tmp_path).checkpoint_path(11))
    assert (found.files, found.tensors) == (other.files, other.tensors)


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_run_whose_last_save_fails_has_not_finished(ranks, tmp_path, asynchronous):
    config = tiny(f"checkpoint.asynchronous={asynchronous}", "checkpoint.every=0", world_size=2)
    run = RunDir.create(tmp_path, "run")
    run.start_attempt("test.0")
    run.checkpoints_path.rmdir()
    run.checkpoints_path.write_text("not a directory")
    (message,) = set(ranks(2, attempt_in_process, config, run, "test.0"))
    assert message.startswith("CheckpointError: step 11: checkpoint not written: ")
    assert not run.result_path.exists()


def test_every_save_says_what_it_cost(ranks, tmp_path):
    run = run_of(tiny("checkpoint.every=5", world_size=2), ranks, tmp_path)
    for save in saves(run):
        assert save["step"] == save["checkpoint_step"]
        assert save["checkpoint_stall_s"] > 0
        assert save["checkpoint_duration_s"] > 0
        path = run.checkpoint_path(save["step"])
        assert save["checkpoint_bytes"] == sum(file.stat().st_size for file in path.glob("*.bin"))
        assert save["checkpoint_gb_per_s"] >= 0


def warnings_of(env, config: RunConfig, run: RunDir) -> list[str]:
    """What was logged by an attempt whose saves are slow."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("rechpc.rank.saver").addHandler(handler)
    gate = Gate()
    try:
        with trainer(env, config, run) as one:
            one.saver.save(1, {"step": 1})
            settle = one.saver.settle
            one.saver.settle = lambda: (gate.opened.set(), settle())  # opens when the save is waited for
            one.saver.save(2, {"step": 2})
            one.saver.settle()
    finally:
        gate.remove()
        logging.getLogger("rechpc.rank.saver").removeHandler(handler)
    return lines


def test_a_save_that_is_too_slow_for_its_interval_or_the_signal_lead_is_told(ranks, tmp_path):
    config = tiny("checkpoint.every=1", world_size=1)
    config.job.signal_lead_s = 0.0  # less than one may set
    lines = ranks(1, warnings_of, config, RunDir.create(tmp_path, "run"))[0]
    assert lines[0].endswith("checkpoint.every=1 is too small for it")
    assert lines[1].endswith("it would not end within job.signal_lead_s=0")


def fail_while_saving(env, config: RunConfig, run: RunDir) -> Outcome | str:
    """An attempt that fails in the step after a save, whose bytes are written only after that."""
    gate, save, outlive = Gate(), Saver.save, Saver.outlive

    def saving(saver: Saver, step: int, state: State) -> None:
        save(saver, step, state)
        raise DataError("spoiled")

    Saver.save = saving
    Saver.outlive = lambda saver, error: (gate.opened.set(), outlive(saver, error))
    try:
        return attempt_in_process(env, config, run, "fails.0")
    finally:
        Saver.save, Saver.outlive = save, outlive
        gate.remove()


def test_a_save_that_is_under_way_is_completed_when_something_else_ends_the_run(ranks, tmp_path):
    run, config = RunDir.create(tmp_path, "run"), tiny("checkpoint.every=4", world_size=2)
    run.start_attempt("fails.0")
    assert ranks(2, fail_while_saving, config, run) == ["DataError: spoiled"] * 2
    assert run.committed_steps() == [4]
    assert manifest.damage(run.checkpoint_path(4)) is None


def test_the_best_by_a_metric_is_kept_beside_the_newest(ranks, tmp_path):
    values = ["trainer.epochs=3", "trainer.eval_every=4", "data.synthetic.val_rows=300"]
    values += ["checkpoint.keep=1", "checkpoint.every=7", "checkpoint.keep_best=val_auc", "checkpoint.keep_every=14"]
    run = run_of(tiny(*values, world_size=2), ranks, tmp_path)
    scores = {r["step"]: r["val_auc"] for r in run.metrics() if "val_auc" in r}
    assert sorted(scores) == list(range(4, 33, 4))
    assert {save["step"] for save in saves(run)} == {*range(4, 33, 4), *range(7, 33, 7), 33}
    best = max(scores, key=lambda step: scores[step])
    assert set(run.committed_steps()) == {33, 28, 14, best}


def test_an_automatic_interval_is_measured_and_agreed_on(ranks, tmp_path):
    values = ["checkpoint.every=auto", "checkpoint.node_mtbf_h=0.01", "trainer.epochs=24"]
    run = run_of(tiny(*values, world_size=2), ranks, tmp_path)
    steps, intervals = zip(*((s["checkpoint_step"], s["checkpoint_every"]) for s in saves(run)), strict=True)
    assert steps[0] == 100
    # Known a step or more after the save, so it may be later than planned, never sooner.
    assert all(later - step >= every for step, later, every in zip(steps, steps[1:-1], intervals, strict=False))
    assert steps[-1] == 264


def test_the_interval_is_that_of_young_and_daly_within_bounds():
    assert interval_s(2.0, 10.0, 3600.0) == pytest.approx(120.0)  # sqrt(2 * 2 * 3600)
    assert interval_s(2.0, 500.0, 3600.0) == 500.0  # never two at once
    assert interval_s(2.0, 10.0, 1e9) == 1800.0
    assert interval_s(2.0, 2000.0, 1e9) == 2000.0


def test_a_manifest_says_what_made_it(ranks, tmp_path):
    run = run_of(tiny(world_size=2), ranks, tmp_path)
    found = manifest.read(run.checkpoint_path(11)).made_by
    assert [a["name"] for a in found["attempts"]] == ["test.0"]
    assert found["world_size"] == 2
    assert len(found["code_sha256"]) == 64
    assert {"rechpc", "torch"} <= found["versions"].keys()
    assert found["config"]["sharding"]["type"] == "auto"
    assert read_json(run.checkpoint_path(11) / manifest.NAME)["optimizer_step"] == 11
