"""Writes the result of an experiment into the docs.

`python tools/experiment_figures.py [results/demo-algorithms]` writes that of `make experiment`: its table, that of its
seeds, the README's row, and an image of its page; a second argument says what else the machine did.
`python tools/experiment_figures.py results/lag` writes the table of tools/bench/lag.yaml, and so do those of
tools/bench/budget.yaml and tools/bench/lora.yaml.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from marks import write_part
from screenshots import ASSETS, ROOT, shoot

from rloo_pipeline.report.live_run import clock

DOCS, README = ROOT / "docs", ROOT / "README.md"
TABLES = DOCS / "generated" / "experiments.md"
OTHERS = ("lag", "budget", "lora")
"""Experiments of tools/bench/ whose tables are in `TABLES`."""
SIZE = (1280, 1700, 1, "")


def table(summary: Mapping[str, Any], total: str) -> str:
    """The arms in Markdown: mean, interquartile mean, difference from the baseline, and a sentence with the total."""
    against = {row["arm"]: row for row in summary["comparisons"] if row["less"] == summary["baseline"]}
    lines = [
        "| arm | before | after, mean | interquartile mean | difference | p (Holm) |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in summary["arms"]:
        compared = against.get(row["arm"])
        cells = [row["arm"], f"{100 * row['warmstart']:.1f}", _points(row["mean"])]
        cells += [_points(row["iqm"]) if row["iqm"] else "–"]
        cells += [_points(compared), _p(compared["p_holm"])] if compared else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"Held-out pass@1 in %, with 95% intervals. {total}"]
    return "\n".join(lines) + "\n"


def seeds_table(folder: Path, arm: str, seeds: Sequence[int]) -> str:
    """The runs of an arm in Markdown: accuracy before and after, and what the gain is made of."""
    lines = [
        "| seed | pass@1 before (95% interval) | pass@1 after (95% interval) | gain | shows its work, before → after | "
        "right among those, before → after |",
        "|---|---|---|---|---|---|",
    ]
    better = []
    for seed in seeds:
        run = folder / arm / str(seed)
        summary = json.loads((run / "summary.json").read_text())
        ends = [summary[end] for end in ("warmstart", "final")]
        worked = [_worked(run / "evaluation" / end / "completions.parquet") for end in ("warmstart", "final")]
        better.append(100 * (worked[1]["accuracy"] - worked[0]["accuracy"]))
        cells = [f"{end['accuracy']:.1%} ({100 * end['ci95'][0]:.1f} to {100 * end['ci95'][1]:.1f})" for end in ends]
        cells += [f"{100 * summary['gain']:+.1f}", *(_arrow(worked, key) for key in ("share", "accuracy"))]
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    return "\n".join(lines) + (
        "\n\nMost of the gain comes from nearly all completions showing their work. The rest is better arithmetic: "
        f"{min(better):.0f} to {max(better):.0f} points\n"
        "among those that do. Seeds differ a lot because SFT stops where learning is fastest.\n"
    )


def _worked(completions: Path) -> Mapping[str, float]:
    """Share of completions that show their work, and accuracy of these."""
    scores = pd.read_parquet(completions, columns=["scores/worked", "scores/answer"])
    worked = scores["scores/worked"] >= 1
    return {"share": worked.mean(), "accuracy": (scores["scores/answer"][worked] >= 1).mean()}


def _arrow(ends: Sequence[Mapping[str, float]], key: str) -> str:
    return " → ".join(f"{end[key]:.1%}" for end in ends)


def readme_row(summary: Mapping[str, Any]) -> str:
    """The README's row about the demo: its own algorithm, by seeds."""
    row = summary["arms"][0]
    accuracies = ", ".join(f"{100 * value:.0f}" for value in row["accuracies"])
    mean = f"{100 * row['warmstart']:.1f} → {_points(row['mean'])}%"
    description = f"the demo, mean of {len(row['seeds'])} seeds: held-out accuracy before → after"
    return f"| {description} | {mean} (seeds: {accuracies}) |"


def _points(estimate: Mapping[str, Any]) -> str:
    value, low, high = (round(100 * one, 1) + 0.0 for one in (estimate["value"], *estimate["ci95"]))  # no -0.0
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


def _p(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 else f"{value:.1g}"


def wall_seconds(folder: Path) -> float:
    """Seconds from the experiment's first file to the end of its last job."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    ends = [file.stat().st_mtime for file in files if "benchmarks" in file.parts]
    return max(ends) - min(file.stat().st_mtime for file in files)


def main() -> None:
    """Writes what docs/ holds of one experiment."""
    folder = Path(*sys.argv[1:2]) if sys.argv[1:] else ROOT / "results" / "demo-algorithms"
    summary = json.loads((folder / "experiment.json").read_text())
    finished = [row for row in summary["runs"] if row["finished"]]
    if folder.name in OTHERS:
        write_part(TABLES, folder.name, table(summary, f"{len(finished)} runs."))
        return
    own = summary["arms"][0]
    beside = "".join(f", {words}" for words in sys.argv[2:])
    total = f"{len(finished)} runs in {clock(wall_seconds(folder))} on two CPU cores{beside}."
    write_part(TABLES, "experiment", table(summary, total))
    write_part(TABLES, "demo", seeds_table(folder, own["arm"], own["seeds"]))
    readme = re.sub(r"^\| the demo, .*$", lambda _: readme_row(summary), README.read_text(), flags=re.MULTILINE)
    README.write_text(readme)
    shoot(folder / "experiment.html", ASSETS / "experiment.png", *SIZE)


if __name__ == "__main__":
    main()
