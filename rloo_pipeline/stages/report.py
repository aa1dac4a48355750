"""report: the files of a run → summary.json and report.html."""

from pathlib import Path

from rloo_pipeline.artifacts import lineage
from rloo_pipeline.artifacts.files import write_json, write_text
from rloo_pipeline.config import Config
from rloo_pipeline.judging.run_files import RunFiles, metrics_of, read_metrics
from rloo_pipeline.report.live_run import outcome
from rloo_pipeline.report.page import render
from rloo_pipeline.report.summary import summarize_run
from rloo_pipeline.runtime.progress import say


def report(config: Config, run: Path, summary: Path, html: Path) -> None:
    """Writes the summary and the report of the run in folder `run`, and prints the last round's symptoms: no gate does.

    Raises:
        UserError: a file is missing or damaged, belongs to a different run, or was scored by a different version of
            functions.
    """
    rounds, evaluations = tables_of(config, run)
    lineage.require_own(config.seed, [*rounds, *evaluations])
    lineage.require_one_scoring([*rounds, *evaluations])
    facts = summarize_run(config, run)
    write_json(summary, facts)
    write_text(html, render(config, run, facts))
    metrics = [read_metrics(run, number) for number in range(1, config.rounds + 1)]
    for package, earlier in facts.get("earlier_versions", {}).items():
        seen = ", ".join(f"{version} from round {number}" for version, number in earlier.items())
        now = facts["versions"].get(package, "not installed")
        say(f"warn: {package} was {seen} and is {now} now: the same run again may give other numbers")
    for symptom in RunFiles(run, config, [*metrics]).symptoms(since=config.rounds):
        say(symptom.line())
    say(f"{outcome(facts)}; see {html}")


def tables_of(config: Config, run: Path) -> tuple[list[Path], list[Path]]:
    """The tables of a run's updates, and those of its evaluations' completions."""
    return (
        [metrics_of(run, number).with_name(lineage.TRAIN) for number in range(1, config.rounds + 1)],
        [run / "evaluation" / name / "completions.parquet" for name in config.evaluated],
    )
