"""rechpc.submit as a user meets it: help, dry run, mistakes, resume, and a local run with Ctrl-C on a terminal."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from rechpc import compose, submit
from rechpc.dataset import DataFile, Index, Split, write_index
from rechpc.errors import LaunchError
from rechpc.host import slurm
from rechpc.rundir import RunDir, read_json, write_json

ROOT = Path(compose.__file__).resolve().parents[1]
STAND_IN = Path(__file__).with_name("stand_in")

# submit itself, with stand-ins laid over the code of the run.
DRIVER = f"""
import shutil
from rechpc import compose, submit
from rechpc.host import provenance
write = provenance.write
def with_stand_in(run):
    write(run)
    shutil.copytree({str(STAND_IN)!r}, run.code_path, dirs_exist_ok=True)
provenance.write = with_stand_in
compose.run(submit.main, submit.HELP)
"""


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Run the command in this process, in an empty directory: exit status, stdout, stderr."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*overrides):
        monkeypatch.setattr(sys, "argv", ["submit", *overrides])
        with pytest.raises(SystemExit) as exit_:
            compose.run(submit.main, submit.HELP)
        return exit_.value.code, *capsys.readouterr()

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_help_fits_a_screen_and_names_every_group(command):
    code, out, _ = command("--help")
    assert code == 0
    assert len(submit.HELP.strip().splitlines()) <= 24
    assert max(map(len, out.splitlines())) <= 120
    for group in ("cluster=", "model=", "sharding=", "data=", "optimizer=", "experiment="):
        assert group in out


def test_a_dry_run_imports_nothing_slow_and_leaves_nothing(tmp_path):
    code = (
        "import sys\nfrom rechpc import compose, submit\n"
        "try: compose.run(submit.main, submit.HELP)\n"
        "finally: print([m for m in ('torch', 'numpy', 'pyarrow', 'polars') if m in sys.modules], file=sys.stderr)"
    )
    argv = [sys.executable, "-c", code, "dry_run=true", f"runs_root={tmp_path}/runs"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert list(tmp_path.iterdir()) == []


def test_a_local_dry_run_shows_configuration_command_and_memory(command):
    code, out, _ = command("dry_run=true", "sharding=row_wise", "seed=7")
    assert code == 0
    assert "\nseed: 7\n" in out
    assert "\ndry_run: " not in out
    assert "# batch script\nnone, cluster.launcher=local starts\n" in out
    assert re.search(
        r"^sh -c 'trap .* env .*OMP_NUM_THREADS=.* --nproc-per-node 2 .* -m rechpc.train .*/RUN_ID", out, re.M
    )
    assert "largest of 2 ranks, sharding row_wise: " in out


def test_a_slurm_dry_run_shows_the_batch_script_and_the_container(command):
    image = ["container=apptainer", "container.image=x.sif"]
    code, out, _ = command("dry_run=true", "cluster=slurm", "job.nodes=2", "job.partition=low", *image)
    assert code == 0
    assert "#SBATCH --partition=low\n#SBATCH --requeue\n#SBATCH --signal=USR2@120\n" in out
    assert f"apptainer exec --cleanenv --bind={Path.cwd()}/runs/dlrm/RUN_ID {Path.cwd()}/x.sif sh -c" in out
    assert "--nnodes 2 --nproc-per-node 2 --node-rank 0 --master-addr NODE_0" in out


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.globl_batch=3", ["trainer.globl_batch", "did you mean trainer.global_batch"]),
        ("model=resnet", ["model=resnet", "dlrm_dcnv2"]),
        ("trainer.global_batch=many", ["trainer.global_batch", "many"]),
        ("optimizer.sparse=adam", ["optimizer.sparse", "'adam'", "sgd, adagrad, rowwise_adagrad"]),
        ("trainer.log_every=0", ["trainer.log_every=0", "at least 1"]),
        ("trainer.global_batch=2049", ["trainer.global_batch=2049", "2 ranks", "2048 or 2050"]),
        ("job.signal_lead_s=90000", ["job.signal_lead_s=90000", "86400 s of job.time_limit_min=1440"]),
        ("data=criteo_kaggle", ["data.path=null", "rechpc.prepare"]),
        ("experiment=criteo_8k data.path=nothing", ["data.path=", "/nothing", "no index.json"]),
        ("checkpoint.init_from=nothing", ["checkpoint.init_from=/", "/nothing: expected a checkpoint, or a run"]),
        ("resume=nothing", ["nothing", "not a run directory"]),
        ("runs_root=a%b", ["runs_root=", "'%'"]),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key_and_leaves_nothing(command, override, words):
    code, out, err = command(*override.split())
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    for word in words:
        assert word in err
    assert list(Path.cwd().iterdir()) == []


def test_a_launcher_that_refuses_leaves_no_run_directory(command, monkeypatch):
    def refuse(*args, **kwargs):
        raise LaunchError("no")

    monkeypatch.setattr(slurm, "submit", refuse)
    assert command("runs_root=runs") == (1, "", "no\n")
    assert list(Path("runs/dlrm").iterdir()) == []


def test_without_slurm_nothing_is_written_and_a_login_node_is_asked_for(command, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(submit, "check_shared", lambda root: None)  # the temporary directory would be refused
    code, out, err = command("cluster=slurm", "runs_root=runs")
    assert (code, out) == (2, "")
    assert err.startswith("cluster.launcher=slurm: sbatch is not on the PATH; go to a login node")
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("root", ["/tmp/runs", "/dev/shm", "/var/tmp/x"])
def test_a_job_of_slurm_is_not_written_where_other_nodes_cannot_see_it(command, root):
    code, _, err = command("cluster=slurm", f"runs_root={root}")
    assert code == 2
    assert err.startswith(f"runs_root={root}: ")
    assert "set runs_root= to a file system that all nodes share" in err


@pytest.mark.parametrize(
    ("train_rows", "test_rows", "words"),
    [(50, 9, ["trainer.global_batch=96", "50 samples"]), (200, 0, ["test split is empty"]), (200, 9, [])],
)
def test_a_prepared_data_set_is_checked_on_the_login_node(command, make_config, train_rows, test_rows, words):
    data = make_config("experiment=criteo_8k").data
    Path("data").mkdir()
    splits = {}
    for name, rows in {"train": train_rows, "test": test_rows}.items():
        Path(f"data/{name}.arrow").write_bytes(b"x")
        files = [DataFile(name=f"{name}.arrow", rows=rows, size_bytes=1, sha256="")] if rows else []
        splits[name] = Split(files=files, positives=1)
    facts = {"sparse_rows": {f.name: f.rows for f in data.sparse}, "mappings": data.mappings(), "dense": data.dense}
    empty = ("ids_per_sample", "id_range", "dense_transform", "dense_statistics", "vocabularies", "bad_rows")
    facts |= {key: {} for key in empty}
    write_index(Path("data"), Index(block_rows=10, splits=splits, **facts))
    code, out, err = command("experiment=criteo_8k", "trainer.global_batch=96", "data.path=data", "dry_run=true")
    assert code == (2 if words else 0)
    assert all(word in err for word in words)
    assert bool(words) != (f"path: {Path.cwd()}/data\n" in out)


# Resume


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["seed=2"], ["seed=2", "a resumed run keeps it"]),
        (
            ["sharding.type=column_wise"],
            ["sharding.type=column_wise with optimizer.sparse=rowwise_adagrad", "choose row"],
        ),
        (["+sharding.tables={t_usr: {types: [row_wise]}}"], ["sharding.tables.t_usr", "t_user"]),
        (["sharding=row_wise"], ["sharding=row_wise", "whole group"]),
        (["+job.nodes=1"], ["+job.nodes=1"]),
        (["job.ranks_per_node=3"], ["trainer.global_batch=2048", "3 ranks"]),
        (["trainer.global_batch=1024", "data.seed=1"], ["trainer.global_batch=1024", "data.seed=1"]),
    ],
)
def test_resume_refuses_what_would_change_the_experiment(command, make_run, overrides, words):
    run = make_run("optimizer=rowwise_adagrad")
    before = run.config_path.read_text()
    code, _, err = command(f"resume={run.path}", *overrides)
    assert code == 2
    for word in words:
        assert word in err
    assert run.config_path.read_text() == before


def test_a_resume_cannot_cut_the_row_states_of_adagrad_by_columns(command, make_run):
    run = make_run("optimizer=rowwise_adagrad")
    code, _, err = command(f"resume={run.path}", "sharding.type=column_wise")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "sharding.type=column_wise with optimizer.sparse=rowwise_adagrad" in err
    assert "choose row_wise" in err


def test_resume_takes_what_may_change_and_keeps_the_rest(command, make_run):
    run = make_run("trainer.global_batch=96", "seed=5")
    changes = ["job.ranks_per_node=3", "sharding.type=row_wise", "checkpoint.every=7", "trainer.max_steps=9"]
    changes += ["trainer.profile_steps=[9]"]
    code, out, _ = command(f"resume={run.path}", "dry_run=true", *changes)
    assert code == 0
    for line in ("seed: 5", "global_batch: 96", "ranks_per_node: 3", "type: row_wise", "every: 7", "max_steps: 9"):
        assert f"{line}\n" in out
    assert f"-m rechpc.train {run.path} " in out
    assert "seed: 5" in run.config_path.read_text()
    assert "every: 7" not in run.config_path.read_text()


def test_a_finished_run_is_not_resumed(command, make_run):
    run = make_run()
    write_json(run.result_path, {"state": "finished", "step": 9, "test_auc": 0.75})
    code, _, err = command(f"resume={run.path}")
    assert code == 2
    assert "finished (test AUC 0.7500)" in err


def test_a_running_run_is_not_resumed(command, make_run):
    run = make_run()
    argv = [sys.executable, "-c", "import time; time.sleep(60)", str(run.submission_path)]
    with subprocess.Popen(argv) as process:
        facts = {"launcher": "local", "job_id": "1", "host": slurm.socket.gethostname(), "submitted_at_s": 0.0}
        write_json(run.job_path, {"submissions": [{**facts, "pid": process.pid, "path": str(run.path)}]})
        code, _, err = command(f"resume={run.path}")
        process.kill()
    assert code == 2
    assert f"still running as process {process.pid}; `kill {process.pid}` makes it save and stop" in err


def test_a_resume_that_cannot_be_submitted_keeps_the_configuration(command, make_run, monkeypatch):
    run = make_run()
    before = run.config_path.read_text()

    def refuse(*args, **kwargs):
        raise LaunchError("no")

    monkeypatch.setattr(slurm, "submit", refuse)
    assert command(f"resume={run.path}", "checkpoint.every=7")[0] == 1
    assert run.config_path.read_text() == before


# A local run on a terminal, through submitit and the host task, with stand-ins for torchrun and the ranks


class Terminal:
    """The command in the foreground of a terminal of its own, where Ctrl-C reaches the whole process group."""

    def __init__(self, tmp_path, mode, *overrides):
        driver = tmp_path / "driver.py"
        driver.write_text(DRIVER)
        argv = [sys.executable, str(driver), *overrides]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "STAND_IN": mode}
        self.keyboard, screen = pty.openpty()
        self.process = subprocess.Popen(
            argv, cwd=tmp_path, env=env, stdin=screen, stdout=screen, stderr=screen, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(screen, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(screen)
        self.text = ""

    def see(self, pattern, *, limit_s=60.0):
        """Wait for a pattern on the screen, in what was not seen before."""
        start = len(self.text)
        give_up_at = time.monotonic() + limit_s
        while not (match := re.search(pattern, self.text[start:])):
            assert time.monotonic() < give_up_at, self.text
            if select.select([self.keyboard], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.keyboard, 65536).decode()
                except OSError:  # the other side is closed
                    assert re.search(pattern, self.text[start:]), self.text
        return match

    def press_ctrl_c(self):
        os.write(self.keyboard, b"\x03")

    def end(self):
        self.see(r"\n  (resume|another) [^\n]*\n")
        return self.process.wait(timeout=30)


@pytest.fixture
def terminal(tmp_path):
    opened = []

    def open_(mode, *overrides):
        opened.append(Terminal(tmp_path, mode, f"runs_root={tmp_path}/runs", *overrides))
        return opened[-1]

    yield open_
    for one in opened:
        one.process.kill()
        one.process.wait()
        os.close(one.keyboard)


def only_run(tmp_path):
    [path] = (tmp_path / "runs" / "dlrm").iterdir()
    return RunDir(path)


def test_ctrl_c_saves_and_stops_and_resume_goes_on_to_the_end(terminal, tmp_path):
    first = terminal("endless")
    first.see(r"\rstep \d+/10,000  31,200 samples/s  loss 0.5000  NE 0.9000  12 s left")
    first.press_ctrl_c()
    first.see(r"\nsaving, then stopping; press Ctrl-C again to kill it now\r\n")
    assert first.end() == 130
    run = only_run(tmp_path)
    [saved] = run.committed_steps()
    assert f"stopped at step {saved}, last checkpoint at step {saved}" in first.text

    argv = [sys.executable, "-m", "rechpc.submit", f"resume={run.path}", "checkpoint.every=7"]
    env = {**os.environ, "STAND_IN": "finish"}
    second = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert (second.returncode, second.stderr) == (0, "")
    lines = second.stdout.splitlines()
    assert "test AUC 0.7912 of 0.8103 possible, NE 0.8420 of 0.8210 possible, 31,200 samples/s on 2 ranks" in lines
    assert "3 steps in 1 min 15 s, 2 attempt(s)" in lines
    assert "every: 7" in run.config_path.read_text()
    jobs = json.loads(run.job_path.read_text())["submissions"]
    assert [job["overrides"][-1] for job in jobs] == [f"runs_root={tmp_path}/runs", "checkpoint.every=7"]


def test_a_second_ctrl_c_kills_every_process_and_says_what_is_lost(terminal, tmp_path):
    running = terminal("deaf")
    running.see(r"step 1\d+/")
    run = only_run(tmp_path)
    pids = [read_json(run.attempts()[0].path / f"facts-{rank}.json")["pid"] for rank in (0, 1)]
    running.press_ctrl_c()
    running.see("press Ctrl-C again")
    running.press_ctrl_c()
    assert running.end() == 130
    assert re.search(r"\nkilled\r\nnothing saved yet, \d+ steps after it are lost", running.text)
    give_up_at = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


def test_a_sigterm_before_the_attempt_has_begun_drains_it_once_it_has(terminal, tmp_path):
    running = terminal("endless")
    running.see(r"status +\S+ -m rechpc.status")
    running.process.terminate()
    assert running.end() == 130
    assert only_run(tmp_path).attempts()[0].stop_reason() == "drain"


def test_a_failed_run_ends_with_the_first_error_its_log_and_the_way_back(tmp_path):
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "STAND_IN": "crash"}
    argv = [sys.executable, str(driver), f"runs_root={tmp_path}/runs"]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    run = only_run(tmp_path).path.relative_to(tmp_path)
    assert done.returncode == 1
    *lines, way_back = done.stderr.splitlines()
    assert way_back.endswith(f"-m rechpc.submit resume={run}")
    assert lines == [
        "failed: rank 1: DataError: id 7 is too large",
        f"  log         {next((tmp_path / run / 'attempts').iterdir()).relative_to(tmp_path)}/rank-00001.log",
        "  checkpoint  nothing saved yet",
    ]
    assert "\r" not in done.stdout
