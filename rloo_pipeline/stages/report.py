"""report: everything a run left behind → summary.json and report.html."""

from __future__ import annotations

from pathlib import Path

from rloo_pipeline.artifacts.files import atomic_write, write_json
from rloo_pipeline.config import Config
from rloo_pipeline.report.page import render
from rloo_pipeline.report.summary import summarize
from rloo_pipeline.runtime.progress import say


def report(config: Config, run: Path, summary: Path, html: Path) -> None:
    """Writes the summary and the page of the run in folder `run`.

    Raises:
        UserError: a file of the run is missing or damaged.
    """
    found = summarize(config, run)
    write_json(summary, found)
    with atomic_write(html) as beside:
        beside.write_text(render(config, run, found), encoding="utf-8")
    low, high = found["gain_ci95"]
    before, after = found["warmstart"]["accuracy"], found["final"]["accuracy"]
    say(
        f"held-out pass@1 {before:.1%} -> {after:.1%}: gain {found['gain']:+.1%} (95% "
        f"interval {low:+.1%} to {high:+.1%}); see {html}"
    )
