"""track: metrics.json of a run's rounds → a W&B folder, an MLflow store, and a file that says what was sent where.

It reads files and nothing else of the run, beside which it works: no stage waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from rloo_pipeline.artifacts.files import read_json, write_json
from rloo_pipeline.diagnosis import run_files
from rloo_pipeline.errors import UserError, explain
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.trackers import trackers


def track(run: Path, to: Sequence[str] | None, round_: int | None, earlier: Path | None, output: Path | None) -> None:
    """Sends the rounds that are done to each tracker in `to`, or to those of `report_to`.

    Args:
        run: its folder.
        to: names of trackers.
        round_: a round that is done; later ones are sent where they were made after it. All where not given.
        earlier: what the call before this one wrote.
        output: where to write what was sent. With it, a tracker that fails is a warning, and the next call sends all
            that is missing; without it, an error.

    Raises:
        UserError: there is no run, no round or no tracker, or a library is missing.
    """
    config = run_files.read(run).config
    names = list(to or config.trackers)
    trackers.require(names)
    last = trackers.in_order_of_time(run, round_, config.rounds) if round_ else config.rounds
    history = trackers.history_of(run, config, last)
    if not names or not history.points:
        lacks = "no round is done yet" if names else "report_to names no tracker; name one with --to"
        raise UserError(f"{run}: {lacks}")
    digest, sent = history.digest(len(history.points)), dict[str, dict[str, str]]()
    before = read_json(earlier)["sent"] if earlier else {}
    for name in names:
        if before.get(name, {}).get("digest") == digest:
            sent[name] = before[name]
        elif said := _send(name, history, run, strict=output is None):
            sent[name] = {"digest": digest, "said": said}
            if output is None or history.finished or not before:
                say(f"{name}: {len(history.points)} rounds; {said}")
    if output:
        write_json(output, {"rounds": len(history.points), "sent": sent})


def _send(name: str, history: trackers.History, run: Path, strict: bool) -> str | None:
    """What to tell people; None where it failed, whatever the reason: a tracker that is away ends no training."""
    try:
        return trackers.sender(name)(history, run)
    except Exception as error:
        if strict:
            raise
        logging.getLogger("traceback").warning("what led to it:", exc_info=error)
        say(f"warn: {name} did not take the metrics: {explain(error)}; send them with: rloo track {run} --to {name}")
        return None
