"""The curves of a run, round by round, as plotly figures in plain JSON.

A value that does not exist in a round (null) is a gap in its line, never a 0 and never bridged. Figures carry neither a
template nor the page's colours: text and hover boxes get theirs from its style sheet, which knows light and dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from rloo_pipeline.config import JSON, Reward

Rounds = Sequence[Mapping[str, float | None]]

COLOURS = ("#2080c4", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#b58900")
"""After Okabe and Ito's palette for all kinds of colour vision, made to show on a light and on a dark ground."""
DASHES = ("solid", "dash", "dot", "dashdot")
FEW_ROUNDS = 30


class Line(NamedTuple):
    """One metric of metrics.json as a curve."""

    metric: str
    label: str


class Chart(NamedTuple):
    """Curves that share an axis."""

    title: str
    caption: str
    lines: tuple[Line, ...]
    band: tuple[str, str] | None = None
    """Metrics that bound the shaded ground: (lower, upper), or (middle, half its width) with `spread`."""
    spread: bool = False
    tickformat: str = ""


def charts(rewards: Sequence[Reward]) -> list[Chart]:
    """Everything there is to draw of a run with these rewards."""
    functions = tuple(Line(f"rewards/{r.column}/mean", f"{r.column}, weight {r.weight:g}") for r in rewards)
    lengths = (
        Line("completions/mean_length", "all"),
        Line("completions/mean_terminated_length", "ended by themselves"),
    )
    wasted = (
        Line("completions/clipped_ratio", "truncated completions"),
        Line("frac_reward_zero_std", "prompts of equal rewards"),
    )
    return [
        Chart(
            "Reward",
            "Weighted sum of the rewards, before the KL penalty: mean over the round’s completions. "
            "Shaded: one mean standard deviation within a group to either side.",
            (Line("reward", "reward"),),
            ("reward", "reward_std"),
            spread=True,
        ),
        Chart("Reward functions", "Mean of each function; one of weight 0 is watched and teaches nothing.", functions),
        Chart(
            "Completion length",
            "Mean number of tokens. Shaded: shortest to longest.",
            lengths,
            ("completions/min_length", "completions/max_length"),
        ),
        Chart(
            "Samples that teach little",
            "Share of completions cut off at the length limit, and of prompts whose rewards are all the same.",
            wasted,
            tickformat=".0%",
        ),
        Chart(
            "KL from the warm start",
            "Distance of the sampling policy from policy 0: nats a completion, k1 estimate.",
            (Line("kl", "kl"),),
        ),
        Chart(
            "Entropy",
            "How undecided the policy is: mean nats a token. A fall to 0 is a collapse.",
            (Line("entropy", "entropy"),),
        ),
        Chart(
            "Clipped ratios",
            "Share of completions (of tokens, at token level) from which the clip took the gradient.",
            (Line("clip_ratio/region_mean", "clipped"),),
            tickformat=".1%",
        ),
        Chart(
            "Gradient norm",
            "Before clipping, mean over the round’s optimizer steps.",
            (Line("grad_norm", "gradient norm"),),
        ),
        Chart("Learning rate", "At the round’s last optimizer step.", (Line("learning_rate", "learning rate"),)),
    ]


def figure(chart: Chart, rounds: Rounds) -> JSON | None:
    """The plotly figure of a chart, or None where no round has any of its values (KL without a reference)."""
    numbers = [int(found["round"] or 0) for found in rounds]
    series = [[found.get(line.metric) for found in rounds] for line in chart.lines]
    if all(value is None for values in series for value in values):
        return None
    lines = [
        _trace(place, line, numbers, values)
        for place, (line, values) in enumerate(zip(chart.lines, series, strict=True))
    ]
    shaded = [_band(numbers, _limits(chart, rounds))] if chart.band else []
    return {"data": [*shaded, *lines], "layout": _layout(chart, len(rounds))}


def _trace(place: int, line: Line, numbers: list[int], values: list[float | None]) -> JSON:
    colour, dash = COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": line.label,
        "x": numbers,
        "y": values,
        "connectgaps": False,
        "line": {"color": colour, "width": 2, "dash": dash},
        "marker": {"color": colour, "size": 5 if len(numbers) <= FEW_ROUNDS else _lone(values)},
        "hovertemplate": "%{y:.4g}",
    }


def _lone(values: list[float | None]) -> list[int]:
    """Marker sizes that show only those values between two gaps, which no line reaches."""
    around = [None, *values, None]
    return [4 if around[i] is None and around[i + 2] is None else 0 for i in range(len(values))]


def _limits(chart: Chart, rounds: Rounds) -> list[tuple[float, float] | None]:
    """Lower and upper end of the shaded ground in each round; None where one of them does not exist."""
    first, second = chart.band or ("", "")
    pairs = [(found.get(first), found.get(second)) for found in rounds]
    known = [None if a is None or b is None else (a, b) for a, b in pairs]
    return [pair and ((pair[0] - pair[1], pair[0] + pair[1]) if chart.spread else pair) for pair in known]


def _band(numbers: list[int], limits: list[tuple[float, float] | None]) -> JSON:
    """One closed shape for every stretch of rounds without a gap."""
    x: list[int | None] = []
    y: list[float | None] = []
    for gap, stretch in groupby(zip(numbers, limits, strict=True), key=lambda pair: pair[1] is None):
        found = [(number, limit) for number, limit in stretch if limit is not None]
        if not gap:
            around = [(n, limit[0]) for n, limit in found] + [(n, limit[1]) for n, limit in reversed(found)]
            x += [*(n for n, _ in around), None]
            y += [*(value for _, value in around), None]
    ground = {
        "type": "scatter",
        "mode": "lines",
        "line": {"width": 0},
        "fill": "toself",
        "fillcolor": "rgba(32,128,196,0.16)",
    }
    return ground | {"x": x, "y": y, "hoverinfo": "skip", "showlegend": False}


def _layout(chart: Chart, rounds: int) -> JSON:
    grid = {
        "gridcolor": "rgba(128,128,128,0.2)",
        "zerolinecolor": "rgba(128,128,128,0.45)",
        "fixedrange": True,
        "automargin": True,
    }
    whole: dict[str, Any] = {"dtick": 1} if rounds <= 8 else {"nticks": 7}
    return {
        "height": 230 + (16 * len(chart.lines) if len(chart.lines) > 1 else 0),
        "margin": {"l": 44, "r": 10, "t": 10, "b": 28},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 12},
        "hovermode": "x unified",
        "dragmode": False,
        "showlegend": len(chart.lines) > 1,
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": -0.16,
            "yanchor": "top",
            "itemclick": False,
            "itemdoubleclick": False,
        },
        "xaxis": grid
        | whole
        | {
            "showgrid": False,
            "zeroline": False,
            "spikedash": "solid",
            "unifiedhovertitle": {"text": "round %{x}"},
        },
        "yaxis": grid | {"nticks": 6, "exponentformat": "e", "rangemode": "tozero", "tickformat": chart.tickformat},
    }
