"""gate: the metrics of all rounds so far → diagnosis.json of the latest, or the end of the run after it.

Evaluations and logs are left out here, since which of them are there is of the clock; `rloo diagnose` and the report
have them.
"""

from __future__ import annotations

from pathlib import Path

from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.config import Config
from rloo_pipeline.diagnosis.diagnosis import diagnose, monitors_of, showing
from rloo_pipeline.diagnosis.run_files import metrics_until
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.snakemake_ext.early_stop import STOPPED


def gate(config: Config, run: Path, round_: int, output: Path) -> None:
    """Judges round `round_`, behind which another one is to come, and writes what it shows.

    Raises:
        UserError: a symptom shows whose action is `stop`; stopped.json in the run's folder then has it.
    """
    rounds = metrics_until(run, round_)
    found = showing(diagnose(rounds, config.gates, monitors=monitors_of(config.rewards)), round_)
    said = {"round": round_, "symptoms": [symptom._asdict() for symptom in found]}
    stops = [symptom for symptom in found if symptom.action == "stop"]
    for symptom in found:
        if symptom.first == round_ and symptom not in stops:
            say(symptom.line())
    if not stops:
        write_json(output, said)
        return
    write_json(run / STOPPED, said)
    names = ", ".join(f"gates.{symptom.name}.action" for symptom in stops)
    raise UserError(
        f"the run ends after round {round_}, as {names} asks for: {stops[0].title}: {stops[0].evidence}; "
        f"try: {stops[0].cure}"
    )
