"""gate: the metrics of all rounds so far → diagnosis.json of the latest round, or the end of the run.

Evaluations and logs are not read here, because timing decides which of them exist; `rloo diagnose` and the report read
them.
"""

from pathlib import Path

from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging.diagnosis import STOPPED, diagnose, monitors_of, showing
from rloo_pipeline.judging.run_files import metrics_of, metrics_until, read_metrics
from rloo_pipeline.runtime.progress import say


def gate(config: Config, run: Path, round_: int, output: Path) -> None:
    """Diagnoses round `round_`, which is not the last one, and writes its symptoms.

    Raises:
        UserError: a symptom has the action `stop`, which stopped.json in the run's folder then names; or metrics of an
            earlier round are missing.
    """
    read_metrics(run, round_)  # checks that they are of this run
    rounds, monitors = metrics_until(run, round_), monitors_of(config.rewards)
    if len(rounds) < round_:
        raise UserError(
            f"{(lost := metrics_of(run, len(rounds) + 1))}: no such file, so round {round_} cannot be judged; run the "
            f"same command again, or, if the file is lost, make it again: snakemake -- {lost}"
        )
    # judging all rounds takes longer with each, so only the symptoms that show now are judged over all of them
    names = [symptom.name for symptom in diagnose(rounds, config.gates, monitors=monitors, since=round_)]
    symptoms = showing(diagnose(rounds, config.gates, monitors=monitors, only=names), round_) if names else []
    diagnosis_json = {"round": round_, "symptoms": [symptom._asdict() for symptom in symptoms]}
    stops = [symptom for symptom in symptoms if symptom.action == "stop"]
    for symptom in symptoms:
        if symptom.first == round_ and symptom not in stops:
            say(symptom.line())
    if not stops:
        write_json(output, diagnosis_json)
        return
    write_json(run / STOPPED, diagnosis_json)
    keys = ", ".join(f"gates.{symptom.name}.action" for symptom in stops)
    raise UserError(
        f"the run ends after round {round_}, as {keys} asks for: {stops[0].title}: {stops[0].evidence}; "
        f"try: {stops[0].cure}"
    )
