"""What the pages of this package have in common: templates with everything escaped, how numbers read, the curves.

A page is one file. It fetches nothing (a Content-Security-Policy in its head forbids it), everything that a model, a
dataset or a configuration wrote is escaped, and its bytes depend on what is put on it alone.
"""

from __future__ import annotations

import base64
import gzip
import json
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def fill(template: str, **about: Any) -> str:
    """A page as HTML.

    Args:
        template: its name.
        about: what stands on it. Of its `charts`, pairs of a chart and its figure, those that have no figure are left
            out; `figures` has others by the id of their element.
    """
    about["charts"] = [(chart, figure) for chart, figure in about["charts"] if figure]
    drawn = {f"plot-{place}": figure for place, (_, figure) in enumerate(about["charts"], 1)}
    about["figures"] = {**drawn, **{key: made for key, made in about.get("figures", {}).items() if made}}
    return _environment().get_template(template).render(plotly=Markup(_packed_plotly()), **about)


@cache
def _packed_plotly() -> str:
    """plotly.js as gzip in base64, which every browser since 2023 unpacks by itself: 1.9 MB in place of 4.8."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def _environment() -> Environment:
    """The templates of this package; no name in them may be missing."""
    made = Environment(
        loader=PackageLoader("rloo_pipeline", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"percent": percent, "points": points, "figure": figure_of, "duration": duration, "plain": plain}
    made.filters |= {"signed": signed, "chance": chance}
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


def signed(value: float | None) -> str:
    """A difference with its sign, and with a real minus; a dash for what does not exist."""
    if value is None:
        return "–"
    shown = f"{value:+.3g}"
    return "0" if float(shown) == 0 else shown.replace("-", "−")


def chance(p: float | None) -> str:
    """A p-value at the length that it deserves; a dash for what does not exist."""
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


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
