"""track: metrics.json of a run's rounds → a W&B folder or an MLflow store, and a record of what was sent.

It only reads files of the run, while the run goes on; no stage waits for it.
"""

from collections.abc import Sequence
from pathlib import Path

from rloo_pipeline.artifacts.files import read_artifact, write_json
from rloo_pipeline.errors import UserError, counted, explain
from rloo_pipeline.judging import run_files
from rloo_pipeline.runtime.progress import say, warn
from rloo_pipeline.trackers import trackers


def track(run: Path, to: Sequence[str] | None, round_: int | None, earlier: Path | None, output: Path | None) -> None:
    """Sends the metrics of finished rounds to trackers.

    Args:
        run: folder of the run.
        to: names of trackers, by default those of `report_to`.
        round_: last round to send, by default all; later rounds that are finished by then are sent too.
        earlier: `output` of the previous call.
        output: file for the record of what was sent. With it, a tracker that fails gives a warning, and the next call
            sends what is missing; without it, it is an error.

    Raises:
        UserError: the run, a finished round or the tracker is missing, or a library is missing.
    """
    files = run_files.read(run)
    config = files.config
    names = list(to or config.trackers)
    trackers.require(names)
    last = run_files.in_order_of_time(run, round_, config.rounds) if round_ else len(files.rounds)
    if round_ and config.held_out_each_round:
        last = trackers.with_accuracy(run, round_, last)
    history = trackers.history_of(run, config, last)
    if not names or not history.points:
        lacks = run_files.why_no_round(run) if names else "report_to names no tracker; name one with --to"
        raise UserError(f"{run}: {lacks}")
    digest, sent = history.digest(len(history.points)), dict[str, dict[str, str]]()
    previous = read_artifact(earlier)["sent"] if earlier else {}
    for name in names:
        if previous.get(name, {}).get("digest") == digest:
            sent[name] = previous[name]
        elif message := _send(name, history, run, strict=output is None):
            sent[name] = {"digest": digest, "said": message}
            if output is None or history.finished or not previous:
                say(f"{name}: {counted(len(history.points), 'round')}; {message}")
    if output:
        write_json(output, {"rounds": len(history.points), "sent": sent})


def _send(name: str, history: trackers.History, run: Path, strict: bool) -> str | None:
    """Sends to one tracker. Returns a message for the user, or None after any error: training goes on without it."""
    try:
        return trackers.sender(name)(history, run)
    except Exception as error:
        if strict:
            raise
        warn(f"{name} did not take the metrics: {explain(error)}; send them with: rloo track {run} --to {name}", error)
        return None
