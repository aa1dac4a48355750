"""compare: the folders of finished runs → comparison.html, and the same for programs in comparison.json.

No stage of a run: people call it on runs that are finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rloo_pipeline.artifacts.files import atomic_write, write_json
from rloo_pipeline.report import comparison, comparison_page, finished
from rloo_pipeline.runtime.progress import say


def compare(folders: Sequence[Path], html: Path, summary: Path | None) -> None:
    """Writes the page that lays the runs in these folders side by side, and what it says as JSON.

    Raises:
        UserError: fewer than two runs, two of one name, or a run that is missing, unfinished or damaged.
    """
    runs = [finished.read(folder) for folder in folders]
    found = comparison.compare(runs)
    if summary:
        write_json(summary, found)
    with atomic_write(html) as beside:
        beside.write_text(comparison_page.render(found, runs), encoding="utf-8")
    for row in found["runs"]:
        before, after = row["warmstart"]["accuracy"], row["final"]["accuracy"]
        say(f"{row['run']}: held-out pass@1 {before:.1%} -> {after:.1%}, gain {row['gain']:+.1%}")
    apart = [what for what, fact in found["shared"].items() if not fact["same"]]
    say(f"{'not shared: ' + ', '.join(apart) + '; ' if apart else ''}see {html}")
