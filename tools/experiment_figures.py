"""Writes the result of `make experiment` into docs/experiments.md and the README, and an image of its page.

python tools/experiment_figures.py [results/demo-algorithms]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from screenshots import ASSETS, ROOT, shoot

from rloo_pipeline.report.terminal_table import clock

PAGE, README = ROOT / "docs" / "experiments.md", ROOT / "README.md"
BEGIN, END = "<!-- experiment -->\n", "<!-- /experiment -->\n"
SIZE = (1280, 1700, 1, "")


def table(summary: Mapping[str, Any], seconds: float) -> str:
    """The arms in Markdown: mean, interquartile mean, difference from the baseline, and what was paid."""
    against = {row["arm"]: row for row in summary["comparisons"] if row["less"] == summary["baseline"]}
    lines = [
        "| arm | before | after, mean | interquartile mean | difference | p (Holm) | seeds for 80% power |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in summary["arms"]:
        compared = against.get(row["arm"])
        cells = [row["arm"], f"{100 * row['warmstart']:.1f}", _points(row["mean"]), _points(row["iqm"])]
        cells += [_points(compared), _p(compared["p_holm"]), _seeds(compared)] if compared else ["", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    runs = [row for row in summary["runs"] if row["finished"]]
    lines += ["", f"Held-out pass@1 in %, with 95% intervals. {len(runs)} runs in {clock(seconds)} on two CPU cores."]
    return "\n".join(lines) + "\n"


def readme_row(summary: Mapping[str, Any]) -> str:
    """The README's row about the demo: its own algorithm, by seeds."""
    row = summary["arms"][0]
    accuracies = ", ".join(f"{100 * value:.0f}" for value in row["accuracies"])
    mean = f"{100 * row['warmstart']:.1f} → {_points(row['mean'])}%"
    return f"| the demo, {len(row['seeds'])} seeds: held-out accuracy before → after | {mean} (seeds: {accuracies}) |"


def _points(estimate: Mapping[str, Any]) -> str:
    low, high = estimate["ci95"]
    return f"{100 * estimate['value']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _p(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 else f"{value:.1g}"


def _seeds(compared: Mapping[str, Any]) -> str:
    return str(compared["seeds_needed"] or "")


def wall_seconds(folder: Path) -> float:
    """Seconds from the first to the last file of the experiment's runs that the workflow wrote."""
    times = [file.stat().st_mtime for file in folder.rglob("*") if file.is_file() and "benchmarks" in file.parts]
    return max(times) - min(times)


def main() -> None:
    """Writes the page, the README's row and the image."""
    folder = Path(*sys.argv[1:2]) if sys.argv[1:] else ROOT / "results" / "demo-algorithms"
    summary = json.loads((folder / "experiment.json").read_text())
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(summary, wall_seconds(folder)) + END + rest.partition(END)[2])
    readme = re.sub(r"^\| the demo, .*$", lambda _: readme_row(summary), README.read_text(), flags=re.MULTILINE)
    README.write_text(readme)
    shoot(folder / "experiment.html", ASSETS / "experiment.png", *SIZE)


if __name__ == "__main__":
    main()
