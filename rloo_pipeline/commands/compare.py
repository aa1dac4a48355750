"""compare, experiment: write a page that compares finished runs, and its data as files."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from rloo_pipeline.artifacts.files import write_json, write_text
from rloo_pipeline.errors import counted
from rloo_pipeline.report import (
    comparison,
    comparison_page,
    experiment_page,
    experiment_summary,
    experiment_tables,
    finished,
)
from rloo_pipeline.runtime.progress import say


def compare(folders: Sequence[Path], html: Path, summary: Path | None) -> None:
    """Writes the page and its data, and prints one line per run.

    Args:
        folders: the runs' folders.
        html: file for the page.
        summary: file for the data; None for none.

    Raises:
        UserError: there are fewer than two runs, two have the same name, or one is missing, unfinished or damaged.
    """
    runs = [finished.read(folder) for folder in folders]
    data = comparison.compare(runs)
    if summary:
        write_json(summary, data)
    write_text(html, comparison_page.render(data, runs))
    for row in data["runs"]:
        before, after = row["warmstart"]["accuracy"], row["final"]["accuracy"]
        say(f"{row['run']}: held-out pass@1 {before:.1%} -> {after:.1%}, gain {100 * row['gain']:+.1f} points")
    differences = [name for name, fact in data["shared"].items() if not fact["same"]]
    say(f"{'different: ' + ', '.join(differences) + '; ' if differences else ''}see {html}")


def experiment(folder: Path) -> None:
    """Writes experiment.html, .json, .csv and .tex and runs.csv into the folder, from the finished runs.

    Args:
        folder: the experiment's folder, results/<experiment>.

    Raises:
        UserError: the folder has no experiment, no run of it is finished, or a file is damaged.
    """
    finished = experiment_summary.read(folder)
    summary = experiment_summary.summary_of(finished)
    write_json(folder / "experiment.json", summary)
    for name, table in (
        ("experiment.csv", experiment_tables.arms_table(summary)),
        ("runs.csv", experiment_tables.runs_table(summary)),
    ):
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(table)
        write_text(folder / name, text.getvalue())
    write_text(folder / "experiment.tex", experiment_tables.latex_table(summary))
    write_text(folder / "experiment.html", experiment_page.render(summary, finished, folder))
    for row in summary["arms"]:
        interval = row["mean"]["ci95"]
        shown = f" ({interval[0]:.1%} to {interval[1]:.1%})" if interval else ""
        say(
            f"{row['arm']}: held-out pass@1 {row['mean']['value']:.1%}{shown} over {counted(len(row['seeds']), 'seed')}"
        )
    if missing_baseline := experiment_summary.without_baseline(summary):
        say(missing_baseline)
    missing = sum(not run["finished"] for run in summary["runs"])
    unfinished = f"not finished yet: {counted(missing, 'run')}; " if missing else ""
    say(f"{unfinished}see {folder / 'experiment.html'}")
