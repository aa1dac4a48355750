"""Parts that all pages share: the template environment, number formats, the packed plotly.js.

A page is a single file. It fetches nothing (a Content-Security-Policy in its head forbids it), it escapes all text from
models, datasets and configurations, and its bytes depend only on its content.
"""

import base64
import gzip
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def fill(template: str, **context: Any) -> str:
    """Renders a page as HTML.

    Args:
        template: the template's file name.
        context: the template's variables. `charts` are pairs of a chart and its figure; charts whose figure is None are
            left out. `figures` are other figures, by element id.
    """
    context["charts"] = [(chart, figure) for chart, figure in context["charts"] if figure]
    figures = {f"plot-{number}": figure for number, (_, figure) in enumerate(context["charts"], 1)}
    context["figures"] = figures | {key: figure for key, figure in context.get("figures", {}).items() if figure}
    environment = templates_of("rloo_pipeline.report", autoescape=True)
    environment.filters |= {"percent": percent, "points": points, "figure": format_number, "duration": duration}
    environment.filters |= {"signed": signed, "chance": chance, "plain": plain}
    return environment.get_template(template).render(plotly=Markup(_packed_plotly()), **context)


def folder_name(folder: Path, name: str) -> str:
    """The folder of a run or experiment as written in a command, relative to Snakemake's working folder. For one that
    is elsewhere, the folder that it would have there.
    """
    here = Path.cwd()
    return str(folder.absolute().relative_to(here)) if folder.absolute().is_relative_to(here) else f"results/{name}"


@cache
def _packed_plotly() -> str:
    """plotly.js, gzipped and base64-encoded: 2.0 MB instead of 4.8 MB. Browsers since 2023 can unpack it. The highest
    level would take twice as long for 1% less.
    """
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 5, mtime=0)).decode()


def templates_of(package: str, **options: Any) -> Environment:
    """Environment for a package's templates, in which undefined variables are errors."""
    loader = PackageLoader(package, "")
    return Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, **options)


def percent(share: float | None) -> str:
    """Formats a share: 0.123 → 12.3%; a dash for None."""
    return "–" if share is None else f"{share:.1%}"


def points(difference: float) -> str:
    """Formats a difference in percentage points: 0.123 → +12.3, with a real minus sign, and no sign on 0."""
    shown = f"{100 * difference:+.1f}"
    return "0.0" if float(shown) == 0 else shown.replace("-", "−")


def format_number(value: float | str | None) -> str:
    """Formats a number with three significant digits or thousands separators, and a real minus sign. Text is unchanged;
    None is a dash.
    """
    if value is None or isinstance(value, str):
        return value or "–"
    whole = isinstance(value, int) or abs(value) >= 999.5  # avoids 1e+03
    shown = f"{value:,.0f}" if whole else f"{value + 0.0:.3g}"  # avoids −0
    return f"−{shown[1:]}" if shown.startswith("-") else shown


def signed(value: float | None) -> str:
    """Formats a difference with its sign, using a real minus sign; a dash for None."""
    if value is None or value == 0:
        return "–" if value is None else "0"
    return f"{'+' if value > 0 else ''}{format_number(value)}"


def listed(names: Sequence[str]) -> str:
    """Joins names: `a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def end_best(names: Sequence[str]) -> str:
    """`a ends best`, or `a and b end best` on a tie."""
    return f"{listed(names)} {'end' if names[1:] else 'ends'} best"


def chance(p: float | None) -> str:
    """Formats a p-value with two or three decimals; a dash for None."""
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def duration(seconds: float) -> str:
    """Formats seconds: 4000 → 1 h 7 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return f"{round(seconds) // 60} min {round(seconds) % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def plain(value: object) -> str:
    """Formats a configuration value as YAML on one line; a dash for None."""
    if value is None or isinstance(value, str):
        return "–" if value is None else value
    whole = isinstance(value, float) and value.is_integer()
    return f"{value:g}" if whole else json.dumps(value, ensure_ascii=False)
