"""compare: the folders of finished runs → a page that compares them, and its data as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rloo_pipeline.artifacts.files import write_json, write_text
from rloo_pipeline.report import comparison, comparison_page, finished
from rloo_pipeline.runtime.progress import say


def compare(folders: Sequence[Path], html: Path, summary: Path | None) -> None:
    """Writes the page and its data, and prints one line per run.

    Args:
        folders: the runs' folders.
        html: file for the page.
        summary: file for the data, if wanted.

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
        say(f"{row['run']}: held-out pass@1 {before:.1%} -> {after:.1%}, gain {row['gain']:+.1%}")
    differences = [name for name, fact in data["shared"].items() if not fact["same"]]
    say(f"{'different: ' + ', '.join(differences) + '; ' if differences else ''}see {html}")
