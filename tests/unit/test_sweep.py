"""Sweeps: what is submitted, what is found and kept, and what a study asks for; Slurm's commands are stand-ins."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rechpc import compose, submit, table
from rechpc.config import Launcher
from rechpc.errors import ConfigError
from rechpc.host import arrays, slurm
from rechpc.rundir import RunDir, code_sha256, read_json, write_json
from rechpc.study import Interval, Study, is_minimized
from rechpc.sweep import _is_same
from tests.slurm.runs import wait_until

ROOT = Path(compose.__file__).resolve().parents[1]
STAND_IN = Path(__file__).with_name("stand_in")
SLURM = ("cluster=slurm", "job.nodes=2", "sweep.dir=sweep")
# Every sbatch but a --test-only adds its script to what was submitted, and the arrays get the ids 101, 102, ...
SBATCH = """
case "$*" in *--test-only*) exit 0;; esac
n=$(ls submitted 2>/dev/null | wc -l); mkdir -p submitted; cat > submitted/$n; echo $((101 + n))"""
SQUEUE = "echo 'JOBID|STATE|REASON'; cat queue 2>/dev/null; true"


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Run rechpc.submit in this process, in an empty directory: exit status, stdout, stderr."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(submit, "check_shared", lambda root: None)  # the temporary directory would be refused
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["submit", "-m", *arguments])
        with pytest.raises(SystemExit) as exit_:
            compose.run(submit.main, submit.HELP, sweep=submit.sweep)
        return exit_.value.code, *capsys.readouterr()

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def site(commands):
    """A Slurm that takes every array, and says of its elements what the file `queue` says."""
    commands(sbatch=SBATCH, squeue=SQUEUE, sinfo="", scontrol="", sacct="exit 1")


def runs(*keys):
    """The runs of the sweep by the values of some keys, of the seed unless said otherwise."""
    found = [RunDir(path.parent) for path in Path("sweep").absolute().glob("*/config.yaml")]
    return {" ".join(table.overrides(run)[key] for key in keys or ("seed",)): run for run in found}


def scripts():
    return [path.read_text() for path in sorted(Path("submitted").iterdir())] if Path("submitted").exists() else []


# What is submitted


def test_a_sweep_is_one_array_for_each_set_of_resources(command, site):
    overrides = ["seed=1,2", "job.nodes=1,2", "optimizer.learning_rate=0.1", "sweep.max_parallel=1"]
    code, out, err = command("cluster=slurm", "sweep.dir=sweep", *overrides)
    assert (code, err) == (0, "")
    assert [re.findall("--(nodes|dependency|array)=(.*)", text) for text in scripts()] == [
        [("nodes", "1"), ("array", "0-1%1")],
        [("nodes", "2"), ("dependency", "afterany:101"), ("array", "0-1%1")],
    ]
    jobs = {name: slurm.newest_job(run).job_id for name, run in runs("seed", "job.nodes").items()}
    assert sorted(jobs) == ["1 1", "1 2", "2 1", "2 2"]
    assert sorted(jobs.values()) == ["101_0", "101_1", "102_0", "102_1"]
    assert "sweep: 4 runs, 4 to start\n" in out
    assert "rechpc.submit -m cluster=slurm" in out


def test_an_element_runs_the_batch_script_of_its_run(command, site, commands, tmp_path):
    command(*SLURM, "seed=1,2")
    run = runs()["2"]
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "srun").write_text('#!/bin/sh\necho "srun $*"\nexit 7\n')
    (fake / "srun").chmod(0o755)
    job_id = slurm.newest_job(run).job_id
    array, _, index = job_id.partition("_")
    env = {**os.environ, "PATH": f"{fake}:{os.environ['PATH']}"}
    env |= {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": index, "SLURM_JOB_ID": "555"}
    done = subprocess.run(["bash"], input=scripts()[0], text=True, env=env, capture_output=True, timeout=60)
    text = (run.submission_path / f"{job_id}_0_log.out").read_text()
    assert f"-u -m rechpc.host.task {run.path}\n" in text
    assert f"--output {run.submission_path}/%A_%a_%t_log.out" in text
    assert "srun ended with status 7 before an attempt began" in text
    assert done.returncode == 1


def test_an_attempt_of_an_element_is_named_as_its_job_was_recorded(monkeypatch, tmp_path):
    names = {"SLURM_ARRAY_JOB_ID": "101", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "105", "SLURM_RESTART_COUNT": "2"}
    names |= {"SLURM_NODEID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "n2"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert slurm.placement(Launcher.slurm, RunDir(tmp_path)).attempt_name == "101_3.2"


def test_only_the_element_is_requeued(commands, monkeypatch, tmp_path):
    commands(scontrol=f'echo "$*" > {tmp_path}/asked')
    for name, value in {"SLURM_ARRAY_JOB_ID": "101", "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "105"}.items():
        monkeypatch.setenv(name, value)
    slurm.requeue()
    assert (tmp_path / "asked").read_text() == "requeue 101_0\n"


def test_an_array_is_cut_where_the_site_allows_fewer_elements(command, site, commands, tmp_path):
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\necho 'MaxArraySize            = 2'\n")
    command(*SLURM, "seed=1,2,3")
    assert [re.findall("--array=(.*)", text) for text in scripts()] == [["0-1"], ["0-0"]]


@pytest.mark.parametrize(
    ("sizes", "limit", "shares", "after"),
    [
        ([6], 4, [4], [()]),
        ([6, 6], 4, [2, 2], [(), ()]),
        ([9, 2], 4, [3, 1], [(), ()]),
        ([5, 5, 5], 2, [1, 1, 1], [(), (), (0,)]),
        ([1, 2], None, [None, None], [(), ()]),
    ],
)
def test_the_arrays_of_a_sweep_share_what_may_run_at_a_time(sizes, limit, shares, after):
    turns = arrays.turns(sizes, limit)
    assert ([t.max_parallel for t in turns], [t.after for t in turns]) == (shares, after)


def test_what_is_on_its_way_counts_for_what_may_run_at_a_time(command, site):
    command(*SLURM, "seed=1,2", "sweep.max_parallel=3")
    Path("queue").write_text("101_0|RUNNING|None\n101_1|RUNNING|None\n")
    command(*SLURM, "seed=1,2,3,4", "sweep.max_parallel=3", "job.dependency=afterok:9")
    Path("queue").write_text("".join(f"10{i // 2 + 1}_{i % 2}|RUNNING|None\n" for i in range(4)))
    command(*SLURM, "seed=1,2,3,4,5", "sweep.max_parallel=3", "job.dependency=afterok:9")
    assert [re.findall("--(array|dependency)=(.*)", text) for text in scripts()[1:]] == [
        [("dependency", "afterok:9"), ("array", "0-1%1")],
        [("dependency", "afterok:9,afterany:101:102"), ("array", "0-0%3")],
    ]


def test_a_refused_array_leaves_no_run(command, site, tmp_path):
    (tmp_path / "bin" / "sbatch").write_text(
        '#!/bin/sh\ncase "$*" in *--test-only*) exit 0;; esac\necho no >&2; exit 1\n'
    )
    code, _, err = command(*SLURM, "seed=1,2")
    assert (code, err) == (1, "sbatch --parsable: no\n")
    assert runs() == {}


def test_every_combination_that_cannot_work_is_listed_and_nothing_is_written(command):
    code, out, err = command("model=dlrm,resnet", "trainer.global_batch=2049,2048,-1", "seed=1,2")
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert len(lines) == 3
    assert "trainer.global_batch=2049: 2 ranks" in lines[0]
    assert "trainer.global_batch=-1: expected at least 1" in lines[1]
    assert "model=resnet: no such option; expected one of dlrm, dlrm_dcnv2" in lines[2]
    assert list(Path.cwd().iterdir()) == []


def test_what_the_site_refuses_is_said_once_an_array_before_anything_is_submitted(command, site, tmp_path):
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: no such nodes' >&2; exit 1\n")
    code, out, err = command("cluster=slurm", "sweep.dir=sweep", "job.nodes=1,2", "seed=1,2")
    assert (code, out, len(err.splitlines())) == (2, "", 2)
    assert list(Path.cwd().iterdir()) == []


def test_one_child_plans_all_combinations(command, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    rows = "data.sparse=[{name: a, rows: 400_000_000}],[{name: a, rows: 2_000_000_000}]"
    asked = ["cluster=mi300x", "job.ranks_per_node=1,8", "sharding=table_wise", rows, "sweep.dir=sweep"]
    code, _, err = command(*asked)
    assert code == 2
    assert err.splitlines()[0] == "planning 3 run(s) with the torch of this Python ..."  # arithmetic refuses one
    assert err.count("planning") == 1
    assert len(err.splitlines()) == 3
    assert "at least 238.4 GiB on each of 1 ranks" in err
    assert "no plan fits 8 ranks" in err
    assert not Path("sweep").exists()


@pytest.mark.parametrize("key", ["resume=x", "wait=true", "stage=true"])
def test_what_is_for_one_run_is_refused(command, key):
    code, _, err = command("seed=1,2", key)
    assert code == 2
    assert f"{key.partition('=')[0]}=: not with -m" in err


def test_a_dry_run_is_a_table_with_node_hours_and_writes_nothing(command):
    code, out, _ = command(*SLURM, "sharding=row_wise,table_wise,row_wise", "job.time_limit_min=90", "dry_run=true")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert rows[0][:3] == ["run", "does", "sharding"]
    assert [row[1:3] + row[-1:] for row in rows[1:3]] == [["new", "row_wise", "3.0"], ["new", "table_wise", "3.0"]]
    assert out.splitlines()[-1].startswith("2 of 2 runs to start, in 1 arrays; at most 6.0 node hours")
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("argument", "count"), [("seed=range(1,4)", 3), ("model=glob(*)", 2), ("sharding=choice(auto,row_wise)", 2)]
)
def test_the_sweep_syntax_of_hydra_works(command, argument, count):
    _, out, _ = command(*SLURM, argument, "dry_run=true")
    assert f"{count} of {count} runs to start" in out


# Continuing


def test_the_same_command_submits_only_what_is_missing_or_failed(command, site):
    command(*SLURM, "seed=1,2,3")
    finished, alive, failed = (runs()[seed] for seed in ("1", "2", "3"))
    write_json(finished.result_path, {"state": "finished", "test_auc": 0.7})
    Path("queue").write_text(
        f"{slurm.newest_job(alive).job_id}|RUNNING|None\n{slurm.newest_job(failed).job_id}|FAILED|x\n"
    )
    code, out, _ = command(*SLURM, "seed=1,2,3,4", "job.time_limit_min=600")
    assert code == 0
    assert "sweep: 4 runs, 2 to start\n" in out
    assert [slurm.newest_job(runs()[seed]).job_id[:3] for seed in ("1", "2", "3", "4")] == ["101", "101", "102", "102"]
    assert "--time=600" in scripts()[1]
    assert "time_limit_min: 600" in failed.config_path.read_text()
    assert len(json.loads(failed.job_path.read_text())["submissions"]) == 2


def test_a_run_whose_directory_was_cut_off_is_made_anew(command, site):
    command(*SLURM, "seed=1")
    [run] = runs().values()
    shutil.rmtree(run.path)
    run.code_path.mkdir(parents=True)
    command(*SLURM, "seed=1")
    assert runs().keys() == {"1"}


@pytest.fixture
def finished(command, site):
    """A finished sweep over two seeds, which another one may find."""
    command("cluster=slurm", "sweep.dir=runs/dlrm/old", "seed=1,2")
    found = [RunDir(path.parent) for path in Path("runs/dlrm/old").absolute().glob("*/config.yaml")]
    for run in found:
        write_json(run.result_path, {"state": "finished", "test_auc": 0.7})
    return found


def test_a_run_that_another_sweep_has_finished_is_kept_and_not_repeated(command, finished):
    _, out, _ = command("cluster=slurm", "sweep.dir=runs/dlrm/new", "seed=2,3", "dry_run=true")
    assert re.findall(r" (new|kept, of old) +(\d) ", out) == [("kept, of old", "2"), ("new", "3")]
    code, out, _ = command("cluster=slurm", "sweep.dir=runs/dlrm/new", "seed=2,3", "optimizer.learning_rate=0.02")
    assert (code, "2 runs, 1 to start" in out, "1 finished in other sweeps" in out) == (0, True, True)
    entries = {e.swept["seed"]: e for e in table.read(Path("runs/dlrm/new").absolute()).entries}
    assert entries["2"].objective == 0.7
    assert list(entries["2"].swept) == ["seed"]
    assert entries["3"].objective is None
    assert re.search(r"kept from\n.* old\n", table.render(table.read(Path("runs/dlrm/new").absolute())))
    assert len(table.find(Path("runs").absolute())) == 3  # each run once
    _, out, _ = command("cluster=slurm", "sweep.dir=runs/dlrm/new", "seed=2,3")
    assert "2 runs, 1 to start" in out  # of which Slurm has forgotten


@pytest.mark.parametrize("why", ["asked", "other code", "gone", "not finished"])
def test_a_run_of_another_sweep_is_repeated_where_it_need_not_be_the_same(command, finished, monkeypatch, why):
    more = ["sweep.reuse=false"] if why == "asked" else []
    if why == "other code":
        monkeypatch.setattr("rechpc.sweep.code_sha256", lambda: "other")
    elif why == "gone":
        command("cluster=slurm", "sweep.dir=sweep", "seed=1,2")
        shutil.rmtree("runs")
    elif why == "not finished":
        for run in finished:
            run.result_path.unlink()
    code, out, err = command("cluster=slurm", "sweep.dir=sweep", "seed=1,2", *more)
    assert (code, err) == (0, "")
    assert "2 runs, 2 to start" in out
    assert not any(path.is_symlink() for path in Path("sweep").iterdir())


def test_data_that_were_prepared_anew_make_another_run(tmp_path, make_config):
    run, config = RunDir.create(tmp_path, "sweep", "a"), make_config()
    config.data.path = str(tmp_path)
    write_json(run.result_path, {"state": "finished"})
    write_json(tmp_path / "index.json", {})
    for written_at_s, same in ((time.time() + 60, True), (time.time() - 60, False)):
        write_json(run.provenance_path, {"code_sha256": code_sha256(), "written_at_s": written_at_s})
        assert _is_same(run, config) is same


def test_a_sweep_is_not_written_into_a_run(command, site, make_run):
    code, _, err = command("seed=1,2", f"sweep.dir={make_run().path}")
    assert code == 2
    assert "is a run; expected a sweep" in err


# Waiting, and what the sweeper gets

# submit itself, with stand-ins laid over the code of the runs: local runs through submitit and the host task.
DRIVER = f"""
import shutil, sys
from rechpc import compose, submit
from rechpc.host import provenance
write = provenance.write
def with_stand_in(run):
    write(run)
    shutil.copytree({str(STAND_IN)!r}, run.code_path, dirs_exist_ok=True)
provenance.write = with_stand_in
try:
    compose.run(submit.main, submit.HELP, sweep=submit.sweep)
except KeyboardInterrupt:
    sys.exit(130)
"""


def driven(tmp_path, mode, *arguments):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "STAND_IN": mode}
    argv = [sys.executable, "-c", DRIVER, "-m", *arguments]
    return subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)


def test_local_runs_go_in_turn_and_are_not_repeated(tmp_path):
    done = driven(tmp_path, "finish", "seed=1,2", "sweep.dir=sweep")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"^\[./2\] .*|^test AUC 0.7912", done.stdout, re.M) == [
        *("[1/2] seed=1", "test AUC 0.7912", "[2/2] seed=2", "test AUC 0.7912")
    ]
    again = driven(tmp_path, "crash", "seed=1,2", "sweep.dir=sweep")
    assert (again.returncode, again.stderr) == (0, "")
    assert "2 runs, 0 to start" in again.stdout


def test_a_failed_run_is_told_and_the_others_go_on(tmp_path):
    done = driven(tmp_path, "crash", "seed=1,2", "sweep.dir=sweep")
    assert done.returncode == 1
    assert done.stderr.count("failed: rank 1: DataError: id 7 is too large") == 2
    assert "Traceback" not in done.stderr


def test_ctrl_c_saves_the_local_run_and_starts_no_other(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "STAND_IN": "endless"}
    argv = [sys.executable, "-c", DRIVER, "-m", "seed=1,2", "sweep.dir=sweep"]
    process = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: list(tmp_path.glob("sweep/*/attempts/*/heartbeat")), lambda: "a step")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert "stopped at step" in out
    assert len(list(tmp_path.glob("sweep/*/config.yaml"))) == 1


def test_a_study_goes_on_behind_the_runs_that_are_there(tmp_path):
    study = ["optimizer.learning_rate=tag(log, interval(0.001, 1))", "sweep.dir=sweep"]
    assert driven(tmp_path, "finish", *study, "sweep.trials=1").returncode == 0
    done = driven(tmp_path, "finish", *study, "sweep.trials=2")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"runs, (\d) to start", done.stdout) == ["0", "1"]
    assert len(list((tmp_path / "sweep").glob("*/result.json"))) == 2


def test_an_objective_that_no_run_has_is_a_line(tmp_path):
    done = driven(tmp_path, "finish", "seed=1", "sweep.dir=sweep", "sweep.objective=auc")
    assert done.returncode == 2
    assert "sweep.objective=auc: no number in" in done.stderr
    assert "expected one of attempts, " in done.stderr


def test_waiting_for_slurm_ends_when_no_run_is_on_its_way(command, site, monkeypatch):
    monkeypatch.setattr("rechpc.sweep._POLL_S", 0.0)
    code, out, _ = command(*SLURM, "seed=1,2", "sweep.wait=true")  # squeue does not know them
    assert code == 1
    assert out.splitlines()[-1] == "2 runs: 2 cancelled"


def test_another_sweeper_of_hydra_gets_the_objectives_or_the_failure(command, site, monkeypatch, tmp_path):
    monkeypatch.setattr("rechpc.sweep._POLL_S", 0.0)
    basic = ["hydra/sweeper=basic", "hydra.sweep.dir=hydra"]
    command(*SLURM, "seed=1", *basic)
    write_json(runs()["1"].result_path, {"test_auc": 0.7})
    assert command(*SLURM, "seed=1", "sweep.wait=true", *basic)[0] == 0
    code, _, err = command(*SLURM, "seed=2", "sweep.wait=true", *basic)
    assert code == 1
    assert re.search("seed=2 .*: has not finished", err.splitlines()[-1])


def test_an_interval_without_a_number_of_trials_is_a_line(command):
    code, _, err = command("optimizer.learning_rate=interval(0.1,1)")
    assert (code, err.count("\n")) == (2, 1)
    assert "set sweep.trials=N" in err


# A study


def best(minimize, trials=30):
    """The best x and choice that a study finds, for a function with its optimum at x = 0.01 and choice b."""
    space = {"x": Interval(low=1e-4, high=1.0, is_log=True, is_whole=False), "c": ["a", "b"]}
    study, seen = Study(space, minimize=minimize), []
    for _ in range(trials // 3):
        asked = study.ask(3)
        import math

        loss = [abs(math.log10(p["x"]) + 2) + (p["c"] == "a") for p in asked]
        seen += zip(loss, asked, strict=True)
        study.tell([value if minimize else -value for value in loss])
    return min(seen, key=lambda pair: pair[0])[1], [p for _, p in seen]


@pytest.mark.parametrize("minimize", [True, False])
def test_a_study_finds_the_optimum_and_asks_the_same_again(minimize):
    found, asked = best(minimize)
    assert found["c"] == "b"
    assert 0.004 < found["x"] < 0.025
    assert best(minimize)[1] == asked


def test_a_study_goes_on_after_a_failure():
    study = Study({"x": Interval(low=1, high=3, is_log=False, is_whole=True)}, minimize=True)
    study.ask(2)
    study.tell([None, 1.0])
    assert study.ask(1)[0]["x"] in (1, 2, 3)


def test_bad_bounds_are_a_line():
    with pytest.raises(ConfigError, match="x: "):
        Study({"x": Interval(low=0.0, high=1.0, is_log=True, is_whole=False)}, minimize=True)


@pytest.mark.parametrize(
    ("name", "less"),
    [("test_auc", False), ("test_ne", True), ("test_log_loss", True), ("samples_per_s", False), ("wall_s", True)],
)
def test_the_name_of_an_objective_says_what_is_better(name, less):
    assert is_minimized(name) is less


# What Slurm says of many jobs


def test_slurm_is_asked_once_for_all_jobs_and_accounting_for_the_forgotten(commands, tmp_path):
    log = tmp_path / "asked"
    commands(
        squeue=f'echo "squeue $*" >> {log}; printf "101_0|RUNNING|None\\n101_1|PENDING|Resources\\n9|RUNNING|x"',
        sacct=f'echo "sacct $*" >> {log}; echo "101_2|CANCELLED by 0|None"',
    )
    jobs = [
        slurm.Job(launcher=Launcher.slurm, job_id=f"101_{i}", host="h", pid=None, path="/r", submitted_at_s=0.0)
        for i in range(4)
    ]
    known = slurm.snapshot(jobs)
    assert {name: (said.name, said.reason) for name, said in known.items()} == {
        "101_0": ("RUNNING", None),
        "101_1": ("PENDING", "Resources"),
        "101_2": ("CANCELLED", None),
    }
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["squeue", "sacct"]
    assert "--jobs=101_2,101_3" in log.read_text()


def test_facts_of_a_sweep_name_its_objective_and_command(command, site):
    command(*SLURM, "seed=1,2", "sweep.objective=test_ne")
    facts = read_json(Path("sweep/sweep.json"))
    assert facts["objective"] == "test_ne"
    assert "seed=1,2" in facts["command"]
