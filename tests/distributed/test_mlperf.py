"""The MLPerf experiment, complete up to the hardware and the data: its tables are scaled down, and its rows made."""

from rechpc.config import DataKind
from rechpc.rules import dump
from rechpc.rundir import Outcome, RunDir, read_json
from rechpc.state import expectation
from tests.configs import changed
from tests.distributed.trainer import attempt_in_process


def test_the_mlperf_experiment_trains_evaluates_and_says_what_is_expected_of_it(ranks, tmp_path):
    config = changed("experiment=mlperf_dlrm_dcnv2", "trainer.collective_timeout_s=60", "trainer.log_every=1")
    assert sum(feature.rows for feature in config.data.sparse) == 204_184_588
    assert sum(feature.ids_per_sample for feature in config.data.sparse) == 214
    assert round(0.793 * 4_195_197_692 / config.trainer.global_batch) == 50_763
    config.data.kind = DataKind.synthetic
    for feature in config.data.sparse:
        feature.rows = min(feature.rows, 1000)
    config.data.synthetic.train_rows, config.data.synthetic.val_rows, config.data.synthetic.test_rows = 128, 40, 41
    config.trainer.global_batch, config.trainer.eval_every = 32, 2
    run = RunDir.create(tmp_path, "run")
    run.config_path.write_text(dump(config))
    run.start_attempt("test.0")

    assert ranks(2, attempt_in_process, config, run, "test.0", timeout_s=120) == [Outcome.finished] * 2

    assert [r["step"] for r in run.metrics() if "val_auc" in r] == [2, 4]
    assert read_json(run.result_path)["test_samples"] == 41
    said = expectation(run)
    assert said.startswith("AUC 0.80275 (MLPerf's target for val; ")
    assert "0.793 of an epoch, step 50,763" in said
    assert ": not reached, the best is " in said
