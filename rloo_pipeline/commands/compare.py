"""compare, experiment: write a page that compares finished runs, and its data as files."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts.files import write_json, write_text
from rloo_pipeline.config import JSON
from rloo_pipeline.errors import counted
from rloo_pipeline.judging.across_seeds import FEWEST, FEWEST_FOR_IQM
from rloo_pipeline.report import comparison, comparison_page, experiment_page, experiment_summary, finished
from rloo_pipeline.report.experiment_summary import without_baseline
from rloo_pipeline.runtime.progress import say

SMALLEST_P = 0.001
"""Smallest p-value that the LaTeX table writes out."""


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
        low, high = (100 * end for end in row["gain_ci95"])
        say(
            f"{row['run']}: held-out pass@1 {before:.1%} -> {after:.1%}, gain {100 * row['gain']:+.1f} points "
            f"(95% interval {low:+.1f} to {high:+.1f})"
        )
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
    for name, table in (("experiment.csv", arms_table(summary)), ("runs.csv", runs_table(summary))):
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(table)
        write_text(folder / name, text.getvalue())
    write_text(folder / "experiment.tex", latex_table(summary))
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


def arms_table(summary: JSON) -> list[list[str]]:
    """Rows of the arms' CSV file: a header, and a row per arm with its difference from the baseline."""
    against = {row["arm"]: row for row in summary["comparisons"] if row["less"] == summary["baseline"]}
    head = ["arm", "seeds", "mean", "mean_low", "mean_high", "iqm", "iqm_low", "iqm_high"]
    head += ["difference", "difference_low", "difference_high", "p_holm", "chance_of_improvement"]
    table = [[*head, "tokens", "seconds"]]
    for row in summary["arms"]:
        compared = against.get(row["arm"], {})
        cells: list[Any] = [row["arm"], len(row["seeds"])]
        for part in (row["mean"], row["iqm"] or {}, compared):
            cells += [part.get("value"), *(part.get("ci95") or (None, None))]
        cells += [compared.get(key) for key in ("p_holm", "improvement")]
        table.append([_cell(cell) for cell in [*cells, row["tokens"], row["seconds"]]])
    return table


def runs_table(summary: JSON) -> list[list[str]]:
    """Rows of the runs' CSV file."""
    head = ["arm", "seed", "finished", "rounds", "planned", "warmstart", "final", "seconds", "symptoms"]
    rows = [[*(run[key] for key in head[:-1]), "; ".join(run["symptoms"])] for run in summary["runs"]]
    return [head, *([_cell(cell) for cell in row] for row in rows)]


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def latex_table(summary: JSON) -> str:
    """The arms as a LaTeX table with a caption; it needs booktabs."""
    against = {row["arm"]: row for row in summary["comparisons"] if row["less"] == summary["baseline"]}
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_caption(summary)}}}",
        rf"\label{{tab:{summary['experiment']}}}",
        r"\begin{tabular}{lrrrr}",
        r"\toprule",
        r"arm & mean & IQM & difference & $p$ \\",
        r"\midrule",
    ]
    for row in summary["arms"]:
        compared = against.get(row["arm"], {"value": None})
        p = compared.get("p_holm")
        cells = [_tex(row["arm"]), _with_interval(row["mean"]), _with_interval(row["iqm"]), _with_interval(compared)]
        shown = "--" if p is None else f"{p:.3f}" if p >= SMALLEST_P else rf"$<{SMALLEST_P}$"
        lines.append(" & ".join([*cells, shown]) + r" \\")
    if chosen := summary["selection"]:
        cells = [f"{_tex(chosen['arm'])}, test", *(_with_interval(chosen["test"][part]) for part in ("mean", "iqm"))]
        lines += [r"\midrule", " & ".join([*cells, "--", "--"]) + r" \\"]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def _caption(summary: JSON) -> str:
    """Caption of the LaTeX table. It leaves out intervals if there are too few seeds."""
    rows = "Dev" if summary["rows"] == "dev" else "Held-out"
    baseline = _tex(summary["baseline"])
    seeds = " to ".join(map(str, sorted({f(len(row["seeds"]) for row in summary["arms"]) for f in (min, max)})))
    shown = any(row["mean"]["ci95"] for row in summary["arms"])
    intervals = r" with 95\% intervals over seeds and prompts" if shown else ""
    tests = sum(row["p"] is not None for row in summary["comparisons"])
    corrected = rf", with $p$ corrected by Holm over {counted(tests, 'comparison')}" if tests else ""
    difference = (
        f"no difference, since {baseline}, the baseline, has no finished run"
        if without_baseline(summary)
        else f"difference from {baseline} in points, paired by seed and prompt{corrected}"
    )
    few = "" if summary["enough_seeds"] else rf" With fewer than {FEWEST} seeds there are no intervals."
    if not all(row["iqm"] for row in summary["arms"]):
        few += rf" With fewer than {FEWEST_FOR_IQM} seeds there is no interquartile mean (IQM)."
    stopped = sum(run["finished"] and run["stopped"] for run in summary["runs"])
    ended = rf" Of the runs, {stopped} ended before the last planned round." if stopped else ""
    return (
        rf"{rows} pass@1 (\%) in {_tex(summary['experiment'])}: mean and interquartile mean over {seeds} "
        rf"seed{'' if seeds == '1' else 's'}{intervals}; "
        rf"{difference}.{few}{ended}"
    )


def _with_interval(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None or estimate["value"] is None:
        return "--"
    interval = estimate.get("ci95")
    shown, *ends = (f"${100 * value:.1f}$" for value in (estimate["value"], *(interval or ())))
    return f"{shown} [{', '.join(ends)}]" if ends else shown


def _tex(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "#$%&_{}" else letter for letter in text)
