"""`python -m rechpc.report RUN|SWEEP ... -o report.html`: what runs did, on one page that needs no network.

Also the same numbers as CSV or JSON. Only this file knows plotly.
"""

import argparse
import csv
import html
import io
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rechpc import table
from rechpc.errors import ConfigError, RechpcError
from rechpc.life import Span, goodput, life
from rechpc.rundir import RunDir, read_json, write_text
from rechpc.state import duration, shown

_CURVES = {
    "loss": "loss",
    "ne": "NE",
    "val_auc": "AUC of the val split",
    "samples_per_s": "samples/s",
    "step_time_ms": "step time, ms",
    "checkpoint_stall_s": "stall of a save, s",
    "rank0_peak_rss_gib": "peak memory of rank 0, GiB",
    "rank0_peak_hbm_gib": "peak GPU memory of rank 0, GiB",
}
_PARTS = {
    **{"data_wait": "#c9a227", "forward": "#3b82c4", "backward": "#2fa5a5", "all_to_all": "#e07b39"},
    **{"optimizer": "#3a9d5d", "other": "#9aa0a6", "checkpoint_stall": "#8a6fd1"},
}
_FEW = 3  # runs whose steps are told one by one
_COLORS = ("#3b82c4", "#e07b39", "#3a9d5d", "#b6529e", "#8a6fd1", "#c9a227", "#2fa5a5", "#d1495b")
_PHASES = {
    **{"queued": "#9aa0a6", "starting": "#c9a227", "training": "#3a9d5d", "evaluating": "#3b82c4"},
    **{"saving": "#8a6fd1", "profiling": "#2fa5a5", "lost": "#d1495b"},
}
_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root {{ color-scheme: light dark }} body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: auto;
padding: 1em }} table {{ border-collapse: collapse; display: block; overflow-x: auto }} th, td {{ text-align: left;
padding: .2em .7em; border-bottom: 1px solid #8885; overflow-wrap: break-word; max-width: 30em; vertical-align: top }}
.parcoords text {{ text-shadow: none !important }} table.sortable th {{ cursor: pointer }}
section {{ break-inside: avoid }} h1 {{ overflow-wrap: anywhere }}
@media print {{ .modebar, .updatemenu-container {{ display: none !important }}
table {{ display: table; font-size: 80% }} th, td {{ overflow-wrap: anywhere; padding: .2em }} }}</style>
<script>{plotly}</script></head><body><h1>{title}</h1><p>{summary}</p>{sections}<script>
for (const head of document.querySelectorAll('table.sortable th')) head.onclick = () => {{
  const body = head.closest('table').tBodies[0], i = head.cellIndex;
  const down = head.dataset.down = head.dataset.down ? '' : '1';
  const value = row => row.cells[i].textContent.replace(/,/g, ''), number = t => t !== '' && !isNaN(t);
  [...body.rows].sort((a, b) => {{ const x = value(a), y = value(b);
    return (number(x) && number(y) ? x - y : number(x) ? -1 : number(y) ? 1 : x.localeCompare(y)) * (down ? 1 : -1);
  }}).forEach(row => body.append(row)); }};
const fit = width => () => document.querySelectorAll('.js-plotly-plot').forEach(
  plot => Plotly.relayout(plot, {{ width, autosize: !width }}));
addEventListener('beforeprint', fit(680)); addEventListener('afterprint', fit(null));
</script></body></html>
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """What is told of one run."""

    name: str
    run: RunDir
    entry: table.Entry
    metrics: list[dict[str, Any]]  # no step twice
    spans: list[Span]


def main() -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m rechpc.report", description=__doc__)
    parser.add_argument("paths", nargs="+", metavar="RUN|SWEEP", help="runs, sweeps or directories of runs")
    parser.add_argument("-o", "--output", default="report.html", help="the page (default: report.html)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print every record of the metrics, a line each")
    form.add_argument("--json", action="store_true", help="print everything")
    given = parser.parse_args()
    try:
        tables = [table.read(Path(path).expanduser().absolute()) for path in given.paths]
        stories = [story(entry, of.path) for of in tables for entry in of.entries]
        if given.csv or given.json:
            print(_as_csv(stories) if given.csv else _as_json(stories), end="")
            return 0
        output = Path(given.output).expanduser().absolute()
        write_text(output, page(tables, stories))
    except RechpcError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except OSError as error:
        print(f"{error.filename or given.output}: {error.strerror}", file=sys.stderr)
        return ConfigError.exit_status
    print(f"report      {output}, of {len(stories)} runs")
    return 0


def page(tables: Sequence[table.Table], stories: Sequence[Story]) -> str:
    """The page: everything it needs is in it."""
    sections = {"Runs": "".join(_rows([table.cells(entry, one) for entry in one.entries]) for one in tables)}
    for one in tables:
        if one.is_sweep and len(done := [e for e in one.entries if e.objective is not None]) > 1:
            sections[f"What the swept keys do to {one.objective}"] = _parallel(done, one.objective)
    sections |= {"Curves": _curves(stories), "Where the time of a step goes, ms on rank 0": _parts(stories)}
    sections |= {"Life, minutes since the submission": _time_line(stories)}
    plans = {json.dumps(plan): (s, plan) for s in reversed(stories) if (plan := read_json(s.run.plan_path))}
    sections |= {f"Plan of {s.name}, MiB of float32 weights": _plan(plan) for s, plan in reversed(plans.values())}
    configs = {s.name: _flat(OmegaConf.to_container(OmegaConf.load(s.run.config_path))) for s in stories}
    sections["Configuration"] = _compared(configs)
    sections["Environment"] = _compared({s.name: _flat(read_json(s.run.provenance_path) or {}) for s in stories})
    body = "".join(f"<section><h2>{html.escape(name)}</h2>{text}</section>" for name, text in sections.items() if text)
    title = html.escape(", ".join(shown(one.path) for one in tables))
    summary = html.escape("; ".join(one.summary() for one in tables))
    return _PAGE.format(title=title, summary=summary, plotly=_plotly().offline.get_plotlyjs(), sections=body)


def _plotly() -> Any:
    try:
        import plotly.io  # noqa: PLC0415 - optional
        import plotly.offline  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("plotly is not installed; pip install 'rechpc[report]', or take --csv or --json") from error
    return plotly


def story(entry: table.Entry, root: Path) -> Story:
    """A run with its numbers, named below `root`."""
    run = RunDir(entry.status.path)
    name = run.path.name if run.path == root else str(run.path.relative_to(root))
    name += "".join(f" {key.rpartition('.')[2]}={value}" for key, value in entry.swept.items())
    metrics = run.metrics()
    return Story(name=name, run=run, entry=entry, metrics=metrics, spans=life(run, metrics))


def _drawn(data: list[dict[str, Any]], height: int, **layout: Any) -> str:
    """A figure as HTML that is readable on light and dark, and as wide as the screen."""
    axis = {"gridcolor": "rgba(128,128,128,.25)", "zerolinecolor": "rgba(128,128,128,.4)", "automargin": True}
    look = {
        **{"height": height, "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)"},
        **{"font": {"color": "#808080"}, "margin": {"l": 60, "r": 60, "t": 60, "b": 10}},
        **{"template": {"layout": {"xaxis": axis, "yaxis": axis}}, "modebar": {"bgcolor": "rgba(0,0,0,0)"}},
        "legend": {"orientation": "h", "yanchor": "top", "y": -0.05},
    }
    figure, config = {"data": data, "layout": look | layout}, {"responsive": True, "displaylogo": False}
    return str(_plotly().io.to_html(figure, config=config, full_html=False, include_plotlyjs=False, validate=False))


def _curves(stories: Sequence[Story]) -> str:
    """What the run measured over steps, and at a press of a button over wall time."""
    names = [key for key in _CURVES if any(record.get(key) is not None for s in stories for record in s.metrics)]
    axes: dict[str, list[list[float]]] = {"steps": [], "wall time, minutes": []}
    lines = []
    for number, story in enumerate(stories):
        began_s = story.spans[0].start_s if story.spans else 0.0
        for row, key in enumerate(names, 1):
            points = [r for r in story.metrics if r.get(key) is not None]
            axes["steps"].append([r["step"] for r in points])
            axes["wall time, minutes"].append([(r["time_s"] - began_s) / 60 for r in points])
            line: dict[str, Any] = {
                "x": axes["steps"][-1],
                "y": [r[key] for r in points],
                "name": story.name,
                "yaxis": f"y{row}",
            }
            line |= {"legendgroup": number, "showlegend": row == 1, "mode": "lines+markers"}
            lines.append({**line, "marker": {"size": 4, "color": _COLORS[number % len(_COLORS)]}})
    return _stacked(lines, axes, [_CURVES[key] for key in names])


def _parts(stories: Sequence[Story]) -> str:
    """The parts of a step: of few runs as they go on, of many the means."""
    told = [s for s in stories if any("rank0_forward_ms" in record for record in s.metrics)]
    points = [[r for r in s.metrics if r.get("rank0_forward_ms") is not None] for s in told]
    names = [part.replace("_", " ").replace("all to all", "all-to-all") for part in _PARTS]
    axes: dict[str, list[list[float]]] = {"steps": [], "wall time, minutes": []}
    data: list[dict[str, Any]] = []
    if len(told) > _FEW:
        for part, name in zip(_PARTS, names, strict=True):
            means = [statistics.fmean(r[f"rank0_{part}_ms"] for r in of_run) for of_run in points]
            bar = {"type": "bar", "orientation": "h", "name": name, "marker": {"color": _PARTS[part]}}
            data.append({**bar, "x": means, "y": [s.name for s in told]})
        return _drawn(data, 280 + 40 * len(told), barmode="stack", yaxis={"autorange": "reversed"})
    for row, (s, of_run) in enumerate(zip(told, points, strict=True), 1):
        began_s = s.spans[0].start_s if s.spans else 0.0
        for part, name in zip(_PARTS, names, strict=True):
            axes["steps"].append([r["step"] for r in of_run])
            axes["wall time, minutes"].append([(r["time_s"] - began_s) / 60 for r in of_run])
            area = {"stackgroup": row, "mode": "lines", "line": {"color": _PARTS[part], "width": 1}, "name": name}
            area |= {"x": axes["steps"][-1], "y": [r[f"rank0_{part}_ms"] for r in of_run], "yaxis": f"y{row}"}
            data.append({**area, "legendgroup": name, "showlegend": row == 1})
    return _stacked(data, axes, [s.name if len(told) > 1 else "ms" for s in told]) if told else ""


def _stacked(data: list[dict[str, Any]], axes: dict[str, list[list[float]]], titles: Sequence[str]) -> str:
    """Figures below each other, over one x-axis; a button changes what that is."""
    buttons = [{"label": name, "method": "restyle", "args": [{"x": values}]} for name, values in axes.items()]
    menu = {"type": "buttons", "direction": "right", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
    layout = {f"yaxis{row}": {"title": {"text": title}} for row, title in enumerate(titles, 1)}
    grid = {"rows": len(titles), "columns": 1, "pattern": "coupled"}
    return _drawn(data, 120 + 190 * len(titles), updatemenus=[{**menu, "buttons": buttons}], grid=grid, **layout)


def _time_line(stories: Sequence[Story]) -> str:
    """What each run did when, and how much of that was training that counts."""
    told = [story for story in stories if story.spans]
    bars = []
    for phase, color in _PHASES.items():
        parts = [(s, span) for s in told for span in s.spans if span.phase == phase]
        bar: dict[str, Any] = {"type": "bar", "name": phase, "orientation": "h", "marker": {"color": color}}
        bar["base"] = [(span.start_s - s.spans[0].start_s) / 60 for s, span in parts]
        bar["hovertext"] = [f"attempt {span.attempt}: {duration(span.length_s)}" for _, span in parts]
        bars.append({**bar, "x": [span.length_s / 60 for _, span in parts], "y": [s.name for s, _ in parts]})
    rows = []
    for s in told:
        sums = {phase: sum(span.length_s for span in s.spans if span.phase == phase) for phase in _PHASES}
        times = {phase: duration(seconds) if seconds else "" for phase, seconds in sums.items()}
        rows.append({"run": s.name, "goodput": f"{goodput(s.spans):.0%}", **times})
    order = {"autorange": "reversed"}
    return (_drawn(bars, 280 + 40 * len(told), barmode="overlay", yaxis=order) + _rows(rows)) if told else ""


def _plan(plan: dict[str, Any]) -> str:
    """Which rank holds how much of which table."""
    ranks, mib = range(int(plan["made_for"]["world_size"])), []
    for facts in plan["tables"].values():
        parts = [(shard["rank"], shard["shape"][0] * shard["shape"][1] * 4 / 2**20) for shard in facts["shards"]]
        parts = parts or [(rank, facts["rows"] * facts["dim"] * 4 / 2**20) for rank in ranks]  # data_parallel
        mib.append([sum(size for holder, size in parts if holder == rank) or None for rank in ranks])
    heat = {"type": "heatmap", "z": mib, "text": [[f"{v:,.1f}" if v else "" for v in row] for row in mib]}
    heat |= {"x": [f"rank {r}" for r in ranks], "y": [f"{n} ({f['type']})" for n, f in plan["tables"].items()]}
    return _drawn([{**heat, "texttemplate": "%{text}", "colorscale": "Blues"}], 160 + 26 * len(mib))


def _parallel(entries: Sequence[table.Entry], objective: str) -> str:
    """Parallel coordinates: a line for each run, from the values of the swept keys to the objective."""
    reached = [entry.objective for entry in entries]
    dimensions: list[dict[str, Any]] = []
    for key in entries[0].swept:
        words = [entry.swept[key] for entry in entries]
        try:
            dimensions.append({"label": key, "values": [float(word) for word in words]})
        except ValueError:
            known = sorted(set(words))
            ticks = {"tickvals": list(range(len(known))), "ticktext": known}
            dimensions.append({"label": key, "values": [known.index(word) for word in words], **ticks})
    dimensions.append({"label": objective, "values": reached})
    line = {"color": reached, "colorscale": "Portland"}
    return _drawn([{"type": "parcoords", "dimensions": dimensions, "line": line}], 380)


def _compared(facts: dict[str, dict[str, str]]) -> str:
    """A row for every key: of one run all, of several those that differ."""
    keys = list(dict.fromkeys(key for of_run in facts.values() for key in of_run))
    if len(facts) > 1:
        keys = [key for key in keys if len({of_run.get(key) for of_run in facts.values()}) > 1]
    rows = [{"key": key, **{name: of_run.get(key, "") for name, of_run in facts.items()}} for key in keys]
    return _rows(rows) if rows else "<p>The same for all.</p>"


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(value, dict):
        return {prefix: json.dumps(value) if isinstance(value, list) else str(value)}
    return {
        k: v for name, child in value.items() for k, v in _flat(child, f"{prefix}.{name}" if prefix else name).items()
    }


def _rows(rows: Sequence[dict[str, str]]) -> str:
    names = table.columns(rows)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    cells = ("".join(f"<td>{html.escape(row.get(name, ''))}</td>" for name in names) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<table class="sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _as_csv(stories: Sequence[Story]) -> str:
    rows = [{"run": s.run.path, **record} for s in stories for record in s.metrics]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _as_json(stories: Sequence[Story]) -> str:
    facts = [
        {"name": s.name, **asdict(s.entry), "metrics": s.metrics, "life": [asdict(span) for span in s.spans]}
        for s in stories
    ]
    return json.dumps(facts, indent=2, default=str) + "\n"


if __name__ == "__main__":
    sys.exit(main())
