"""samples/s are the rows of all ranks over the time that training took, and a run says when that goes into reading."""

import time

import pytest
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from rechpc.config import RunConfig
from rechpc.rank import loop
from rechpc.rank.saver import Saver
from rechpc.rank.synthetic import Synthetic
from rechpc.rundir import Outcome, RunDir, read_json
from tests.configs import tiny
from tests.distributed.trainer import attempt_in_process

WARM_UP = 5


def attempt(env, config: RunConfig, run: RunDir) -> Outcome | str:
    """An attempt on a clock of its own: first steps take 10 s, others half a second, a save 50, an evaluation 1,000."""
    now_s, steps = 0.0, 0
    with pytest.MonkeyPatch.context() as patch:
        progress, save, evaluate = TrainPipelineSparseDist.progress, Saver.save, loop._Loop._evaluate

        def slow_progress(pipeline, batches):
            nonlocal now_s, steps
            if pipeline._model.training:
                steps += 1
                now_s += 10 if steps <= WARM_UP else 0.5
            return progress(pipeline, batches)

        def slow_save(saver, *args):
            nonlocal now_s
            now_s += 50
            return save(saver, *args)

        def slow_evaluate(self, batches):
            nonlocal now_s
            with self._stall("evaluating"):
                now_s += 1000
            return evaluate(self, batches)

        patch.setattr(time, "perf_counter", lambda: now_s)
        patch.setattr(TrainPipelineSparseDist, "progress", slow_progress)
        patch.setattr(Saver, "save", slow_save)
        patch.setattr(loop._Loop, "_evaluate", slow_evaluate)
        return attempt_in_process(env, config, run, "test.0")


@pytest.mark.parametrize(
    "stalls",
    [[], ["checkpoint.every=4"], ["data.synthetic.val_rows=7", "trainer.eval_every=3"]],
    ids=["alone", "with saves", "with evaluations"],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_samples_per_s_are_rows_over_time_without_warm_up_and_stalls(ranks, tmp_path, world_size, stalls):
    config = tiny(f"trainer.timing_warmup_steps={WARM_UP}", "checkpoint.every=0", *stalls, world_size=world_size)
    run = RunDir.create(tmp_path, "run")
    run.start_attempt("test.0")

    assert ranks(world_size, attempt, config, run) == [Outcome.finished] * world_size

    # 1,000 rows in steps of 96; the first 5 do not count, and each of the 6 others takes half a second.
    assert read_json(run.result_path)["samples_per_s"] == pytest.approx((1000 - 5 * 96) / (6 * 0.5))


def throttled(env, config: RunConfig, run: RunDir, read_s: float) -> Outcome | str:
    """An attempt whose file system takes so long for every block of rows."""
    with pytest.MonkeyPatch.context() as patch:
        read = Synthetic.read

        def slow_read(split, block):
            time.sleep(read_s)
            return read(split, block)

        patch.setattr(Synthetic, "read", slow_read)
        return attempt_in_process(env, config, run, "test.0")


def test_a_slow_file_system_slows_training_down_and_is_named_but_changes_nothing(ranks, tmp_path):
    config = tiny("trainer.timing_warmup_steps=1", "trainer.log_every=100", "checkpoint.every=0", world_size=2)
    losses = {}
    for read_s in (0.0, 0.4):
        run = RunDir.create(tmp_path, f"run-{read_s}")
        run.start_attempt("test.0")
        assert ranks(2, throttled, config, run, read_s) == [Outcome.finished] * 2
        losses[read_s] = [record["loss"] for record in run.metrics() if "loss" in record]

    assert losses[0.4] == losses[0.0]
    (record,) = (record for record in run.metrics() if "loss" in record)
    assert record["rank0_data_wait_ms"] > 0.1 * record["step_time_ms"]
    assert 0.1 < read_json(run.attempt("test.0").heartbeat_path)["data_wait_share"] <= 1
