"""`python -m rechpc.report RUN|SWEEP ... -o report.html`: what runs did, on one page that needs no network.

Also the same numbers as CSV or JSON. Only this file knows plotly.
"""

import argparse
import csv
import html
import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rechpc import table
from rechpc.errors import ConfigError, RechpcError
from rechpc.life import Span, goodput, life
from rechpc.rundir import RunDir, read_json, write_text
from rechpc.state import duration

_CURVES = {
    "loss": "loss",
    "ne": "NE",
    "val_auc": "AUC of the val split",
    "samples_per_s": "samples/s",
    "step_time_ms": "step time, ms",
    "rank0_peak_rss_gib": "peak memory of rank 0, GiB",
    "rank0_peak_hbm_gib": "peak GPU memory of rank 0, GiB",
}
_COLORS = ("#3b82c4", "#e07b39", "#3a9d5d", "#b6529e", "#8a6fd1", "#c9a227", "#2fa5a5", "#d1495b")
_PHASES = {
    **{"queued": "#9aa0a6", "starting": "#c9a227", "training": "#3a9d5d", "evaluating": "#3b82c4"},
    **{"saving": "#8a6fd1", "lost": "#d1495b"},
}
_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root {{ color-scheme: light dark }} body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: auto;
padding: 1em }} table {{ border-collapse: collapse; display: block; overflow-x: auto }} th, td {{ text-align: left;
padding: .2em .7em; border-bottom: 1px solid #8885; overflow-wrap: break-word; max-width: 30em; vertical-align: top }}
.parcoords text {{ text-shadow: none !important }} table.sortable th {{ cursor: pointer }}
section {{ break-inside: avoid }} h1 {{ overflow-wrap: anywhere }}
@media print {{ .modebar, .updatemenu-container {{ display: none !important }} }}</style>
<script>{plotly}</script></head><body><h1>{title}</h1><p>{summary}</p>{sections}<script>
for (const head of document.querySelectorAll('table.sortable th')) head.onclick = () => {{
  const body = head.closest('table').tBodies[0], i = head.cellIndex;
  const down = head.dataset.down = head.dataset.down ? '' : '1';
  const value = row => row.cells[i].textContent.replace(/,/g, ''), number = t => t !== '' && !isNaN(t);
  [...body.rows].sort((a, b) => {{ const x = value(a), y = value(b);
    return (number(x) && number(y) ? x - y : number(x) ? -1 : number(y) ? 1 : x.localeCompare(y)) * (down ? 1 : -1);
  }}).forEach(row => body.append(row)); }};
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
    try:
        from plotly.offline import get_plotlyjs  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ConfigError("plotly is not installed; pip install 'rechpc[report]', or take --csv or --json") from error
    sections = {"Runs": _runs(tables)}
    for one in tables:
        if one.is_sweep and len(done := [e for e in one.entries if e.objective is not None]) > 1:
            sections[f"What the swept keys do to {one.objective}"] = _parallel(done, one.objective)
    sections["Curves"] = _curves(stories)
    sections["Life, minutes since the submission"] = _time_line(stories)
    sections |= {f"Plan of {s.name}": _plan(plan) for s in _with_plan(stories) if (plan := read_json(s.run.plan_path))}
    sections["Configuration: " + ("what differs" if len(stories) > 1 else "all")] = _configurations(stories)
    sections["Environment"] = _compared({s.name: _flat(read_json(s.run.provenance_path) or {}) for s in stories})
    body = "".join(f"<section><h2>{html.escape(name)}</h2>{text}</section>" for name, text in sections.items() if text)
    title = html.escape(", ".join(str(one.path) for one in tables))
    summary = html.escape("; ".join(one.summary() for one in tables))
    return _PAGE.format(title=title, summary=summary, plotly=get_plotlyjs(), sections=body)


def story(entry: table.Entry, root: Path) -> Story:
    """A run with its numbers, named below `root`."""
    run = RunDir(entry.status.path)
    name = run.path.name if run.path == root else str(run.path.relative_to(root))
    name += "".join(f" {key.rpartition('.')[2]}={value}" for key, value in entry.swept.items())
    return Story(name=name, run=run, entry=entry, metrics=run.metrics(), spans=life(run))


def _drawn(figure: Any, height: int, *, side: int = 10) -> str:
    """A figure as HTML that is readable on light and dark, and as wide as the screen."""
    grid = {"gridcolor": "rgba(128,128,128,.25)", "zerolinecolor": "rgba(128,128,128,.4)", "automargin": True}
    figure.update_layout(
        **{"height": height, "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)"},
        **{"font": {"color": "#808080"}, "margin": {"l": side, "r": side, "t": 60, "b": 10}},
        modebar={"bgcolor": "rgba(0,0,0,0)", "orientation": "v"},
        legend={"orientation": "h", "yanchor": "top", "y": -0.05},
    )
    figure.update_xaxes(**grid)
    figure.update_yaxes(**grid)
    return str(
        figure.to_html(full_html=False, include_plotlyjs=False, config={"responsive": True, "displaylogo": False})
    )


def _curves(stories: Sequence[Story]) -> str:
    """What the run measured over steps, and at a press of a button over wall time."""
    from plotly import graph_objects, subplots  # noqa: PLC0415 - optional

    names = [key for key in _CURVES if any(record.get(key) is not None for s in stories for record in s.metrics)]
    if not names:
        return ""
    figure = subplots.make_subplots(len(names), 1, shared_xaxes=True, subplot_titles=[_CURVES[n] for n in names])
    axes: dict[str, list[list[float]]] = {"steps": [], "wall time, minutes": []}
    for number, story in enumerate(stories):
        began_s = story.spans[0].start_s if story.spans else 0.0
        for row, key in enumerate(names, 1):
            points = [r for r in story.metrics if r.get(key) is not None]
            axes["steps"].append([r["step"] for r in points])
            axes["wall time, minutes"].append([(r["time_s"] - began_s) / 60 for r in points])
            line = graph_objects.Scatter(
                **{"x": axes["steps"][-1], "y": [r[key] for r in points], "name": story.name},
                **{"legendgroup": str(number), "showlegend": row == 1, "mode": "lines+markers"},
                **{"marker": {"size": 4}, "line": {"color": _COLORS[number % len(_COLORS)]}},
            )
            figure.add_trace(line, row=row, col=1)
    buttons = [{"label": name, "method": "restyle", "args": [{"x": values}]} for name, values in axes.items()]
    menu = {"type": "buttons", "direction": "right", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
    figure.update_layout(updatemenus=[{**menu, "buttons": buttons, "pad": {"b": 30}}])
    return _drawn(figure, 100 + 230 * len(names))


def _time_line(stories: Sequence[Story]) -> str:
    """What each run did when, and how much of that was training that counts."""
    from plotly import graph_objects  # noqa: PLC0415 - optional

    told = [story for story in stories if story.spans]
    bars = []
    for phase, color in _PHASES.items():
        parts = [(s, span) for s in told for span in s.spans if span.phase == phase]
        bars.append(
            graph_objects.Bar(
                **{"name": phase, "orientation": "h", "marker": {"color": color}, "y": [s.name for s, _ in parts]},
                base=[(span.start_s - s.spans[0].start_s) / 60 for s, span in parts],
                x=[(span.end_s - span.start_s) / 60 for _, span in parts],
                hovertext=[f"attempt {span.attempt}: {duration(span.end_s - span.start_s)}" for _, span in parts],
            )
        )
    figure = graph_objects.Figure(bars)
    figure.update_layout(barmode="overlay")
    figure.update_yaxes(autorange="reversed")
    rows = [{"run": s.name, "goodput": f"{goodput(s.spans):.0%}", **_times(s.spans)} for s in told]
    return (_drawn(figure, 160 + 40 * len(told)) + _rows(rows)) if told else ""


def _times(spans: Sequence[Span]) -> dict[str, str]:
    sums = {phase: sum(s.end_s - s.start_s for s in spans if s.phase == phase) for phase in _PHASES}
    return {phase: duration(seconds) if seconds else "" for phase, seconds in sums.items()}


def _with_plan(stories: Sequence[Story]) -> list[Story]:
    """One run for every plan that there is."""
    return list({text: s for s in reversed(stories) if (text := _text(s.run.plan_path))}.values())[::-1]


def _plan(plan: Mapping[str, Any]) -> str:
    """Which rank holds how much of which table."""
    from plotly import graph_objects  # noqa: PLC0415 - optional

    ranks, tables = int(plan["made_for"]["world_size"]), plan["tables"]
    mib = {name: [0.0] * ranks for name in tables}
    for name, facts in tables.items():
        for shard in facts["shards"]:
            rows, columns = shard["shape"]
            mib[name][shard["rank"]] += rows * columns * 4 / 2**20
    labels = [f"{name} ({facts['type']})" for name, facts in tables.items()]
    text = [[f"{value:,.1f}" if value else "" for value in row] for row in mib.values()]
    heat = graph_objects.Heatmap(
        **{
            "z": [[v or None for v in row] for row in mib.values()],
            "y": labels,
            "x": [f"rank {r}" for r in range(ranks)],
        },
        **{"text": text, "texttemplate": "%{text}", "colorscale": "Blues", "colorbar": {"title": "MiB"}},
    )
    figure = graph_objects.Figure(heat)
    figure.update_layout(title="weights, MiB (float32)")
    return _drawn(figure, 160 + 26 * len(tables))


def _parallel(entries: Sequence[table.Entry], objective: str) -> str:
    """Parallel coordinates: a line for each run, from the values of the swept keys to the objective."""
    from plotly import graph_objects  # noqa: PLC0415 - optional

    dimensions: list[dict[str, Any]] = []
    for key in entries[0].swept:
        words = [entry.swept[key] for entry in entries]
        try:
            dimensions.append({"label": key, "values": [float(word) for word in words]})
        except ValueError:
            known = sorted(set(words))
            ticks = {"tickvals": list(range(len(known))), "ticktext": known}
            dimensions.append({"label": key, "values": [known.index(word) for word in words], **ticks})
    values = [entry.objective for entry in entries]
    dimensions.append({"label": objective, "values": values})
    line = {"color": values, "colorscale": "Portland"}
    figure = graph_objects.Figure(graph_objects.Parcoords(dimensions=dimensions, line=line))
    return _drawn(figure, 380, side=60)


def _runs(tables: Sequence[table.Table]) -> str:
    return "".join(_rows([table.cells(entry, one) for entry in one.entries]) for one in tables)


def _configurations(stories: Sequence[Story]) -> str:
    return _compared({s.name: _flat(OmegaConf.to_container(OmegaConf.load(s.run.config_path))) for s in stories})


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


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
