"""experiment: the folder of an experiment → a page, tables as CSV, and a LaTeX table of its arms."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from rloo_pipeline.artifacts.files import write_json, write_text
from rloo_pipeline.report import experiment_page, experiment_summary, experiment_tables
from rloo_pipeline.runtime.progress import say


def experiment(folder: Path) -> None:
    """Writes experiment.html, .json, .csv and .tex and runs.csv into the folder, from the runs that are finished.

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
        say(f"{row['arm']}: held-out pass@1 {row['mean']['value']:.1%}{shown} over {len(row['seeds'])} seeds")
    if missing_baseline := experiment_summary.without_baseline(summary):
        say(missing_baseline)
    missing = sum(not run["finished"] for run in summary["runs"])
    say(f"{f'{missing} runs are not finished; ' if missing else ''}see {folder / 'experiment.html'}")
