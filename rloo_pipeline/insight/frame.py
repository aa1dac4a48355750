"""What the pages of this package have in common: templates with everything escaped, how numbers read, the curves.

A page is one file. It fetches nothing (a Content-Security-Policy in its head forbids it), everything that a model, a
dataset or a configuration wrote is escaped, and its bytes depend on what is put on it alone.
"""

from __future__ import annotations

import json
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def fill(template: str, **about: Any) -> str:
    """A page as HTML; of its `charts`, pairs of a chart and its figure, those that have no figure are left out."""
    from plotly.offline import get_plotlyjs

    about["charts"] = [(chart, figure) for chart, figure in about["charts"] if figure]
    return _environment().get_template(template).render(plotly=Markup(get_plotlyjs()), **about)


def _environment() -> Environment:
    """The templates of this package; no name in them may be missing."""
    made = Environment(
        loader=PackageLoader("rloo_pipeline", "insight"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"percent": percent, "points": points, "figure": figure_of, "duration": duration, "plain": plain}
    return made


def percent(share: float | None) -> str:
    """0.123 → 12.3%; a dash for what does not exist."""
    return "–" if share is None else f"{share:.1%}"


def points(difference: float) -> str:
    """0.123 → +12.3, in percentage points and with a real minus sign; no sign on a 0."""
    shown = f"{100 * difference:+.1f}"
    return "0.0" if float(shown) == 0 else shown.replace("-", "−")


def figure_of(value: float | str | None) -> str:
    """A number at a length that is read at a glance; text as it is, a dash for what does not exist."""
    if value is None or isinstance(value, str):
        return value or "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """4000 → 1 h 7 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return f"{round(seconds) // 60} min {round(seconds) % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def plain(value: object) -> str:
    """A value of the configuration as YAML would have it on one line; a dash for what is not set."""
    if value is None or isinstance(value, str):
        return "–" if value is None else value
    whole = isinstance(value, float) and value.is_integer()
    return f"{value:g}" if whole else json.dumps(value, ensure_ascii=False)
