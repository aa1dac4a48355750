"""Draws curves by round, as plotly figures in plain JSON.

A missing value (null) leaves a gap in the line; it is never drawn as 0 or bridged. Figures have neither a template nor
text colours, because the page's style sheet sets these for light and dark mode.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from textwrap import wrap
from typing import Any, NamedTuple, Self

from rloo_pipeline.config import JSON
from rloo_pipeline.report.charts import Chart
from rloo_pipeline.report.jobs import JobRecord

Rounds = Sequence[Mapping[str, float | None]]

COLOURS = ("#2080c4", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9")
"""Okabe and Ito's palette for all kinds of colour vision, adjusted for light and dark backgrounds."""
DASHES = {"solid": "none", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}
"""plotly's name of a dash pattern → the SVG pattern, for a legend outside the figure."""
FEW_ROUNDS = 30
"""Number of rounds up to which every value gets a marker."""
HEIGHT_OF_ENTRY = 16
LEGEND_WIDTH = 34
"""Number of characters in a line of a figure's own legend."""


class Curve(NamedTuple):
    """One line of a figure."""

    label: str
    numbers: list[int]
    values: list[float | None]

    @classmethod
    def of(cls, label: str, metric: str, rounds: Rounds) -> Self:
        """The curve of a metric over round numbers."""
        return cls(label, [int(row["round"] or 0) for row in rounds], [row.get(metric) for row in rounds])


def marks(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and SVG dash pattern of each named line, for a legend outside the figure."""
    return {name: (_colour(line), DASHES[_dash(line)]) for line, name in enumerate(names)}


def _colour(line: int) -> str:
    """The colour of a line by its number. Combinations of colour and dash repeat only after twelve lines."""
    return COLOURS[line % len(COLOURS)]


def _dash(line: int) -> str:
    return list(DASHES)[line % len(DASHES)]


def figure(chart: Chart, rounds: Rounds) -> JSON | None:
    """Draws a chart of one run; None if no round has any of its values (such as the KL without a reference)."""
    curves = [Curve.of(label, metric, rounds) for metric, label in chart.lines.items()]
    bands = [_band(curves[0].numbers, _limits(chart, rounds), chart.band_of)] if chart.band else []
    return _figure(chart, curves, bands, legend=len(curves) > 1)


def figure_of_runs(chart: Chart, runs: Mapping[str, Rounds]) -> JSON | None:
    """Draws a chart's first line for several runs, by name; None if no run has it. The page has the legend."""
    return _figure(chart, [Curve.of(name, chart.first_metric, rounds) for name, rounds in runs.items()])


def figure_of_arms(chart: Chart, arms: Mapping[str, Sequence[Rounds]]) -> JSON | None:
    """Draws a chart's first line for several arms: the mean over seeds, and a band from the lowest to the highest seed.

    Args:
        chart: chart whose first metric is drawn.
        arms: name → rounds of each seed. Rounds that some seed lacks are left out.
    """
    curves, bands = list[Curve](), list[JSON]()
    for line, (arm, runs) in enumerate(arms.items()):
        by_round = [{int(row["round"] or 0): row.get(chart.first_metric) for row in rounds} for rounds in runs]
        numbers = [number for number in by_round[0] if all(number in values for values in by_round)]
        seeds = [[value for values in by_round if (value := values[number]) is not None] for number in numbers]
        whole = [values if len(values) == len(runs) else [] for values in seeds]
        curves.append(Curve(arm, numbers, [sum(values) / len(values) if values else None for values in whole]))
        limits = [(min(values), max(values)) if values else None for values in whole]
        bands.append(_band(numbers, limits, line))
    return _figure(chart, curves, bands)


def _figure(chart: Chart, curves: list[Curve], bands: Sequence[JSON] = (), legend: bool = False) -> JSON | None:
    distinct = {value for curve in curves for value in curve.values if value is not None}
    if len(distinct) < (2 if chart.only_changing else 1):
        return None
    few = max(len(curve.numbers) for curve in curves) <= FEW_ROUNDS
    last = max(max(curve.numbers, default=0) for curve in curves)
    lines = [
        _trace(number, curve, few)
        for number, curve in enumerate(curves)
        if not legend or any(value is not None for value in curve.values)  # no empty line in the figure's own legend
    ]
    layout = _layout(chart, last)
    layout["showlegend"] = legend
    for line in lines:
        parts = wrap(line["name"], LEGEND_WIDTH) if legend else [line["name"]]
        line["name"] = "<br>".join(escape(part, quote=False) for part in parts)  # plotly reads a name as HTML
        layout["height"] += HEIGHT_OF_ENTRY * len(parts) if legend else 0
    return {"data": [*bands, *lines], "layout": layout}


def _trace(line: int, curve: Curve, few: bool) -> JSON:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": curve.label,
        "x": curve.numbers,
        "y": curve.values,
        "connectgaps": False,
        "line": {"color": _colour(line), "width": 2, "dash": _dash(line)},
        "marker": {"color": _colour(line), "size": 5 if few else _isolated(curve.values)},
        "hovertemplate": "%{y:.4g}",
    }


def _isolated(values: list[float | None]) -> list[int]:
    """Marker sizes that show only isolated values, which no line connects."""
    around = [None, *values, None]
    return [4 if around[i] is None and around[i + 2] is None else 0 for i in range(len(values))]


def _limits(chart: Chart, rounds: Rounds) -> list[tuple[float, float] | None]:
    """Lower and upper end of the shaded band in each round; None if one of them is missing."""
    first, second = chart.band or ("", "")
    limits: list[tuple[float, float] | None] = []
    for metrics in rounds:
        a, b = metrics.get(first), metrics.get(second)
        if a is None or b is None:
            limits.append(None)
        else:
            limits.append((a - b, a + b) if chart.spread else (a, b))
    return limits


def _band(numbers: list[int], limits: list[tuple[float, float] | None], line: int) -> JSON:
    """The shaded band of a line: one closed shape for each stretch of rounds without a gap."""
    x: list[int | None] = []
    y: list[float | None] = []
    for gap, stretch in groupby(zip(numbers, limits, strict=True), key=lambda pair: pair[1] is None):
        if not gap:
            edges = [(number, limit) for number, limit in stretch if limit is not None]
            outline = [(n, limit[0]) for n, limit in edges] + [(n, limit[1]) for n, limit in reversed(edges)]
            x += [*(n for n, _ in outline), None]
            y += [*(value for _, value in outline), None]
    shape = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "fill": "toself"}
    red, green, blue = bytes.fromhex(_colour(line)[1:])
    shape |= {"fillcolor": f"rgba({red},{green},{blue},0.16)"}
    return shape | {"x": x, "y": y, "hoverinfo": "skip", "showlegend": False}


def _layout(chart: Chart, last: int) -> JSON:
    return {
        "height": chart.height,
        "margin": {"l": 44, "r": 10, "t": 10, "b": 28},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 12},
        "hovermode": "x unified",
        "dragmode": False,
        "showlegend": False,
        "legend": {"orientation": "h", "x": 0, "y": -0.16, "yanchor": "top"}
        | {"itemclick": False, "itemdoubleclick": False},
        **_axes(chart, last),
    }


def _axes(chart: Chart, last: int) -> dict[str, Any]:
    """Both axes. Up to 8 rounds, each round has a tick."""
    grid = {
        "gridcolor": "rgba(128,128,128,0.2)",
        "zerolinecolor": "rgba(128,128,128,0.45)",
        "fixedrange": True,
        "automargin": True,
    }
    x: dict[str, Any] = {"dtick": 1} if last <= 8 else {"nticks": 7}
    x |= {"showgrid": False, "zeroline": False, "spikedash": "solid", "unifiedhovertitle": {"text": "round %{x}"}}
    y: dict[str, Any] = {"dtick": 1, "type": "log"} if chart.log else {"nticks": 6, "type": "linear"}
    y |= {"exponentformat": "e", "rangemode": "tozero" if chart.from_zero else "normal", "tickformat": chart.tickformat}
    return {"xaxis": grid | x, "yaxis": grid | y}


def bars(x: Sequence[float | str], y: Sequence[float], title: str, tickformat: str = "") -> JSON:
    """Draws a distribution with one bar per value.

    Args:
        x: the values.
        y: their counts or shares.
        title: title of the x axis.
        tickformat: format of ticks on the y axis.
    """
    layout = _layout(Chart("", "", {}, tickformat=tickformat), len(x))
    layout["hovermode"], layout["bargap"] = "closest", 0.12
    layout["xaxis"] |= {"title": {"text": title, "standoff": 6}, "type": "category" if isinstance(x[0], str) else "-"}
    layout["margin"] = {**layout["margin"], "b": 44}
    layout["xaxis"].pop("dtick", None)
    trace = {"type": "bar", "x": list(x), "y": list(y), "marker": {"color": COLOURS[0]}}
    return {"data": [trace | {"hovertemplate": f"{title} %{{x}}: %{{y}}<extra></extra>"}], "layout": layout}


def timeline(jobs: Sequence[JobRecord]) -> JSON | None:
    """Draws a timeline of jobs, one row per stage, in minutes since the first job began; None without jobs."""
    if not jobs:
        return None
    zero = min(job.began for job in jobs)
    stages = list(dict.fromkeys(job.stage for job in jobs))
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": [job.stage for job in jobs],
        "base": [round((job.began - zero).total_seconds() / 60, 3) for job in jobs],
        "x": [round(job.seconds / 60, 3) for job in jobs],
        "text": [job.name for job in jobs],
        "textposition": "none",
        # plotly omits bars narrower than a pixel unless they have an outline
        "marker": {"color": COLOURS[0], "opacity": 0.75, "line": {"width": 1, "color": COLOURS[0]}},
        "hovertemplate": "%{y} %{text}: %{x:.2f} minutes<extra></extra>",
    }
    layout = _layout(Chart("", "", {}, height=60 + 24 * len(stages)), 9)
    layout["hovermode"], layout["barmode"] = "closest", "overlay"
    layout["margin"] = {"l": 96, "r": 10, "t": 10, "b": 44}
    layout["xaxis"] |= {"title": {"text": "minutes since the first job began", "standoff": 6}, "showgrid": True}
    layout["yaxis"] |= {"type": "category", "categoryarray": stages[::-1], "nticks": len(stages), "showgrid": False}
    return {"data": [trace], "layout": layout}
