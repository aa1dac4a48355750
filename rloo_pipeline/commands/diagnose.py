"""diagnose: the files of a run → a table of its symptoms, on the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from rloo_pipeline.artifacts.files import read_artifact
from rloo_pipeline.judging import run_files
from rloo_pipeline.judging.diagnosis import Symptom
from rloo_pipeline.report.live import COLOURS
from rloo_pipeline.runtime.console import Terminal


def diagnose(run: Path) -> None:
    """Prints the symptoms of a run, finished or running.

    Args:
        run: its folder.

    Raises:
        UserError: the folder has no run, or one of its files is damaged.
    """
    files = run_files.read(run)
    symptoms = files.symptoms()
    console = Terminal()
    done = len(files.rounds)
    state = f"{run}: {done} of {files.config.rounds} rounds"
    if files.ended_by_gate:
        state += f", ended by a gate after round {done}"
    console.print(state)
    if not symptoms:
        console.print("no symptoms" if done else _why_no_round(run))
        return
    console.print(_table(symptoms, done))


def _why_no_round(run: Path) -> str:
    """Why no round is done: the failed checks with their advice, if policy 0 did not pass them."""
    file = run / "warmstart" / "checks.failed.json"
    if not file.exists():
        return "no round is done yet"
    failed = [check for check in read_artifact(file)["checks"] if check["verdict"] == "fail" and not check["accepted"]]
    lines = [f"{check['name']}: {check['shown']}; {check['advice']}" for check in failed]
    return "\n".join(["policy 0 did not pass its checks, so no round began:", *lines])


def _table(symptoms: list[Symptom], done: int) -> Table:
    """The symptoms as a table; symptoms of the latest round have the colour of their action."""
    table = Table("rounds", "symptom", "evidence", "what to try")
    for symptom in symptoms:
        rounds = f"{symptom.first}–{symptom.last}" if symptom.last > symptom.first else f"{symptom.first}"
        style = COLOURS[symptom.action] if symptom.last == done else "dim"
        table.add_row(rounds, Text(symptom.title, style), Text(symptom.evidence), Text(symptom.cure))
    return table
