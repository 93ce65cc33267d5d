"""rechpc.report: the life of a run, the page that a browser shows without a network, and the exports."""

import csv
import io
import json
import re
import shutil
import sys
import time

import pytest

from rechpc import report
from rechpc.config import Launcher
from rechpc.host import slurm
from rechpc.life import Span, goodput, life
from rechpc.rundir import RunDir, write_json
from tests.unit.browser import chromium

START_S = 1_800_000_000.0
ZONE_S = 2 * 3600  # the node's clock shows another zone than ours


def log(attempt, start_s, *lines):
    """The log of rank 0: lines at so many seconds after the start, with the local time of the node."""
    stamps = [time.strftime("%Y-%m-%d %H:%M:%S,500", time.localtime(start_s + at + ZONE_S)) for at, _ in lines]
    text = "".join(f"{stamp} INFO rechpc.rank.report {line}\n" for stamp, (_, line) in zip(stamps, lines, strict=True))
    attempt.rank_log_path(0).write_text("torchrun says something\n" + text)


def record(attempt, step, at_s, **values):
    return json.dumps({"attempt": attempt, "step": step, "time_s": START_S + at_s, **values}) + "\n"


@pytest.fixture
def make(tmp_path):
    """A run that crashed at step 25 after a checkpoint at step 20, waited, and finished at step 40."""

    def run(name, loss=0.5, seed=1):
        run = RunDir.create(tmp_path, "sweep", name)
        run.config_path.write_text(f"name: x\nseed: {seed}\ndata: {{sparse: [{{name: <b>}}]}}\n")
        job = slurm.Job(
            launcher=Launcher.slurm, job_id="7_0", host="login", pid=None, path=str(run.path), submitted_at_s=START_S
        )
        slurm.record(run, job, [f"seed={seed}", "model=dlrm"])
        facts = [("7_0.0", 10.0, 25, "failed"), ("7_0.1", 60.0, 40, "finished")]
        for ordinal, (name, at_s, step, outcome) in enumerate(facts):
            attempt = run.attempt(name)
            attempt.path.mkdir()
            write_json(attempt.facts_path, {"ordinal": ordinal, "started_at_s": START_S + at_s})
            write_json(attempt.outcome_path, {"outcome": outcome, "step": step, "error": None})
        first, second = run.attempts()
        began = "attempt=0 step=0 time_s=1.8e+09 resumed_at_step=0"
        lines = [(4, "phase=checking data step=0"), (6, began), (6, "phase=training step=0")]
        lines += [(16, "phase=saving step=20"), (18, "phase=training step=20"), (20, "loss=0.4")]
        log(first, START_S + 10, *lines)
        write_json(first.heartbeat_path, {"step": 25, "time_s": START_S + 33.5})  # it was killed
        lines = [(3, "phase=planning step=0"), (5, began), (5, "phase=training step=20")]
        lines += [(25, "phase=evaluating step=40"), (30, "phase=done step=40")]
        log(second, START_S + 60, *lines)
        values = {"ne": 0.9, "samples_per_s": 1000.0, "step_time_ms": 3.0, "rank0_peak_rss_gib": 0.4}
        parts = ("data_wait", "forward", "backward", "all_to_all", "optimizer", "other", "checkpoint_stall")
        values |= {f"rank0_{part}_ms": 0.5 for part in parts}
        run.metrics_path.write_text(
            record(0, 0, 16.5, resumed_at_step=0)
            + record(0, 10, 20.5, loss=loss + 0.2, **values)
            + record(0, 20, 25.5, loss=loss + 0.1, **values)
            + record(0, 20, 29.5, checkpoint_step=20, checkpoint_stall_s=0.2)
            + record(0, 25, 32.5, loss=9.0, **values)
            + record(1, 20, 65.5, resumed_at_step=20)
            + record(1, 30, 75.5, loss=loss, **values)
            + record(1, 40, 84.5, test_auc=0.8)
        )
        write_json(run.provenance_path, {"rechpc": "0.1.0", "host": "login"})
        tables = {"t_user": {"type": "row_wise", "shards": [{"rank": r, "shape": [1 << 18, 16]} for r in (0, 1)]}}
        tables["t_small"] = {"type": "data_parallel", "shards": [], "rows": 1 << 18, "dim": 4}
        write_json(run.plan_path, {"made_for": {"world_size": 2}, "tables": tables})
        write_json(run.result_path, {"state": "finished", "step": 40, "test_auc": 0.8 - loss / 100})
        return run

    return run


@pytest.fixture
def sweep(make, tmp_path):
    runs = [make("a1"), make("b2", loss=0.6, seed=2)]
    write_json(tmp_path / "sweep" / "sweep.json", {"objective": "test_auc"})
    return runs


@pytest.fixture
def command(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["report", *map(str, arguments)])
        return report.main(), *capsys.readouterr()

    return run


# The life of a run


def lived(run):
    return life(run, run.metrics())


def test_the_life_of_a_run_has_its_waits_its_phases_and_its_lost_work(make):
    spans = [(s.attempt, s.phase, s.start_s - START_S, s.end_s - START_S) for s in lived(make("a1"))]
    assert spans == [
        (0, "queued", 0.0, 10.0),
        (0, "starting", 10.0, 14.5),
        (0, "starting", 14.5, 16.5),
        (0, "training", 16.5, 26.5),
        (0, "saving", 26.5, 28.5),
        (0, "lost", 28.5, 33.5),
        (1, "queued", 33.5, 60.0),
        (1, "starting", 60.0, 63.5),
        (1, "starting", 63.5, 65.5),
        (1, "training", 65.5, 85.5),
        (1, "evaluating", 85.5, 90.5),
    ]


def test_training_beside_a_save_that_never_ended_is_lost_too(make):
    run = make("a1")
    text = run.metrics_path.read_text()
    run.metrics_path.write_text(text.replace('"resumed_at_step": 20', '"resumed_at_step": 0'))
    assert [s.phase for s in lived(run) if s.attempt == 0][3:] == ["lost", "saving", "lost"]


def test_training_behind_a_checkpoint_that_a_later_attempt_could_not_use_is_lost(make):
    run = make("a1")
    third = run.attempt("7_0.2")
    third.path.mkdir()
    write_json(third.facts_path, {"ordinal": 2, "started_at_s": START_S + 100})
    with run.metrics_path.open("a") as file:
        file.write(record(2, 0, 104, resumed_at_step=0))
    assert [s.phase for s in lived(run) if s.phase in ("training", "lost")] == ["lost", "lost", "lost"]


def test_goodput_is_training_that_counts_over_all_time(make):
    assert goodput(lived(make("a1"))) == pytest.approx((10 + 20) / 90.5)
    assert goodput([]) == 0.0
    assert goodput([Span(attempt=0, phase="queued", start_s=1.0, end_s=1.0)]) == 0.0


def test_a_run_that_waits_has_no_life_yet(make):
    run = make("a1")
    shutil.rmtree(run.attempts_path)
    assert lived(run) == []


# The page


def test_the_page_needs_nothing_else(sweep, command, tmp_path):
    code, out, _ = command(tmp_path / "sweep", "-o", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert (code, "of 2 runs" in out) == (0, True)
    assert not re.search(r"<(script|img|iframe)[^>]* src=|<link |@import", re.sub("(?s)<script>.*?</script>", "", text))


TEXT = "document.body.innerText"
SHEET = "document.querySelector('table.sortable')"


def column(page, name):
    """The texts of a column of the first table, from above."""
    rows = page.ask(f"[...{SHEET}.rows].map(row => [...row.cells].map(cell => cell.innerText))")
    return [row[rows[0].index(name)] for row in rows[1:]]


def press(page, name):
    page.ask(f"[...{SHEET}.querySelectorAll('th')].find(head => head.innerText === {name!r}).click()")


def contrast(page, selector):
    """Of an element's text with the page behind it: 1 is unreadable, 21 the most."""
    return page.ask(
        f"""(() => {{
        const light = color => {{
            const [r, g, b] = color.match(/[\\d.]+/g).map(Number).map(v => v / 255)
                .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
            return .2126 * r + .7152 * g + .0722 * b + .05; }};
        const probe = document.body.appendChild(document.createElement('i'));
        probe.style.color = 'Canvas';
        const style = getComputedStyle(document.querySelector({selector!r}));
        const text = light(style.fill === 'rgb(0, 0, 0)' ? style.color : style.fill);
        const page = light(getComputedStyle(probe).color);
        return Math.max(text, page) / Math.min(text, page); }})()"""
    )


def test_the_browser_shows_what_the_runs_did_without_a_network(sweep, command, tmp_path):
    command(tmp_path / "sweep", "-o", tmp_path / "report.html")
    with chromium(tmp_path / "profile") as page:
        page.emulate(width=1100)
        page.open(tmp_path / "report.html")
        # Parallel coordinates, curves, parts of a step, life, and one plan for both runs.
        assert page.ask("document.querySelectorAll('.js-plotly-plot .main-svg').length >= 5")
        assert page.ask("document.querySelectorAll('.js-plotly-plot').length") == 5
        text = page.ask(TEXT) + page.ask("[...document.querySelectorAll('svg text')].map(t => t.textContent).join(' ')")
        words = ["loss", "NE", "samples/s", "wall time, minutes", "lost", "goodput", "t_user (row_wise)", "rank 1"]
        for word in [*words, "data wait", "forward", "backward", "all-to-all", "checkpoint stall"]:
            assert word in text, word
        assert "2 runs: 2 finished" in text
        assert re.search(r"goodput[\s\S]*\b33%", text)
        assert re.search(r"seed\s+1\s+2", text)  # the configurations differ in it
        assert "32.0" not in text
        assert "16.0" in text  # MiB of each rank's half of the table
        assert text.count("4.0") >= 2  # and of the other one, which both have

        # A click sorts, another one turns it round.
        for _ in range(2):
            before = column(page, "seed")
            press(page, "seed")
            assert sorted(column(page, "seed")) == ["1", "2"]
            turned = column(page, "seed") != before
        assert turned
        press(page, "test_auc")
        assert column(page, "test_auc") == ["0.7940", "0.7950"]

        # At a press of the button the curves go over wall time.
        axis = "[...document.querySelectorAll('.js-plotly-plot')][1].data[0].x"
        assert page.ask(axis) == [10, 20, 30]
        press_button = (
            "[...document.querySelectorAll('.updatemenu-button')].find(b => b.textContent.startsWith('wall'))"
        )
        page.ask(f"{press_button}.dispatchEvent(new MouseEvent('click'))")
        assert page.ask(axis) == pytest.approx([20.5 / 60, 25.5 / 60, 75.5 / 60])


def test_the_page_is_readable_on_light_and_dark_on_a_phone_and_on_paper(sweep, command, tmp_path):
    command(tmp_path / "sweep", "-o", tmp_path / "report.html")
    with chromium(tmp_path / "profile") as page:
        page.emulate(width=1100)
        page.open(tmp_path / "report.html")
        for dark in (False, True):
            page.emulate(width=1100, dark=dark)
            assert page.ask("matchMedia('(prefers-color-scheme: dark)').matches") is dark
            assert contrast(page, "td") > 7
            assert contrast(page, ".xtick text") > 3.5
        page.emulate(width=1100)
        assert page.ask("getComputedStyle(document.querySelector('.modebar')).display") != "none"
        page.emulate(width=360)
        page.open(tmp_path / "report.html")
        assert page.ask("innerWidth") == 360
        assert page.ask("document.documentElement.scrollWidth") <= 360  # nothing but tables is moved sideways
        fits = "[...document.querySelectorAll('.js-plotly-plot')].every(p => p.getBoundingClientRect().right <= 360)"
        assert page.ask(fits)
        ends = """[...document.querySelectorAll('.legend')].map(
            legend => [legend, legend.closest('.plot-container')].map(e => e.getBoundingClientRect().bottom))"""
        assert all(legend <= figure for legend, figure in page.ask(ends))  # none lies on what comes next
        page.emulate(width=1100)
        page.open(tmp_path / "report.html")
        page.emulate(width=700, paper=True)
        page.ask("dispatchEvent(new Event('beforeprint')), null")
        ends = "[...document.querySelectorAll('table, .main-svg')].map(e => e.getBoundingClientRect().right)"
        assert max(page.ask(ends)) <= 700
        assert page.ask("[...document.querySelectorAll('table')].every(t => t.scrollWidth <= t.clientWidth)")
        shown = "s => [...document.querySelectorAll(s)].some(e => getComputedStyle(e).display !== 'none')"
        assert not page.ask(f"({shown})('.modebar')")
        assert not page.ask(f"({shown})('.updatemenu-container')")
        assert page.ask(f"({shown})('.js-plotly-plot')")


def test_of_many_runs_the_page_has_the_mean_parts_of_a_step(make, command, tmp_path):
    for name in ("a1", "b2", "c3", "d4"):
        make(name)
    write_json(tmp_path / "sweep" / "sweep.json", {"objective": "test_auc"})
    command(tmp_path / "sweep", "-o", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    bars = re.findall(r'"name":"([\w -]+)","marker":[^}]*},"x":\[0\.5,0\.5,0\.5,0\.5\]', text)
    assert bars == ["data wait", "forward", "backward", "all-to-all", "optimizer", "other", "checkpoint stall"]


def test_text_of_users_is_text_on_the_page(make, command, tmp_path):
    run = make("a1")
    command(run.path, "-o", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;" in page
    assert '"<b>"' not in page


def test_a_run_that_has_not_begun_has_a_page(make, command, tmp_path):
    run = make("a1")
    for path in (run.attempts_path, run.metrics_path, run.plan_path, run.result_path):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert command(run.path, "-o", tmp_path / "report.html")[0] == 0


def test_a_path_that_is_no_run_is_a_line(command, tmp_path):
    code, _, err = command(tmp_path, "-o", tmp_path / "report.html")
    assert (code, err.count("\n")) == (2, 1)
    assert not (tmp_path / "report.html").exists()


def test_a_page_that_cannot_be_written_is_a_line(make, command, tmp_path):
    code, _, err = command(make("a1").path, "-o", tmp_path / "nowhere" / "report.html")
    assert (code, err.count("\n")) == (2, 1)
    assert "No such file or directory" in err


# The exports


def test_a_requeued_run_shows_no_step_twice(make, command):
    rows = list(csv.DictReader(io.StringIO(command(make("a1").path, "--csv")[1])))
    assert [(row["step"], row["loss"]) for row in rows if row["loss"]] == [("10", "0.7"), ("20", "0.6"), ("30", "0.5")]


def test_json_has_the_numbers_of_the_page(sweep, command, tmp_path):
    facts = json.loads(command(tmp_path / "sweep", "--json")[1])
    assert [f["swept"] for f in facts] == [{"seed": "1"}, {"seed": "2"}]
    assert facts[0]["objective"] == 0.795
    assert [r["step"] for r in facts[0]["metrics"]] == [0, 10, 20, 20, 20, 30, 40]
    assert facts[0]["life"][5]["phase"] == "lost"
