"""Checks everything that a configuration names, from files and config.json alone: no torch, no engine, no network.

`rloo check`, `plan` and `doctor`, Snakemake before it plans, and the stages that use an input all call the same checks.
"""

from collections.abc import Iterator

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run import dataset_inputs, model_inputs
from rloo_pipeline.before_run.findings import Finding, problems_of
from rloo_pipeline.config import Config, distillation, lag
from rloo_pipeline.errors import UserError


def model_finding(config: Config) -> Finding:
    """Checks the model, if its config.json is on this machine."""
    with problems_of("model") as problems:
        if folder := model_inputs.model_folder(config.model):
            model = Policy(folder)
            model_inputs.check_model(config, model)
            model_inputs.check_sampler(config, model)
            note = model_inputs.tight_context(config, model.config)
            return Finding("model", True, note, note=bool(note))
    return next(iter(problems), Finding("model", True, ""))


def findings(config: Config) -> Iterator[Finding]:
    """Yields a finding for the model and one for each dataset; the message is empty if there is nothing to note."""
    yield model_finding(config)
    others = {distillation.key_of(name): of_teacher.model for name, of_teacher in config.teachers.items()}
    if config.reward_model is not None:
        others["reward_model"] = config.of_reward_model.model
    for key, model in others.items():
        with problems_of(key) as problems:
            model_inputs.model_folder(model, key)
        yield from problems
    notes = {"sampler": lag.note(config.rollout, config.algorithm), "update": config.update.note(config.rounds)}
    yield from (Finding(subject, True, note, note=True) for subject, note in notes.items() if note)
    for key, source in config.row_sources.items():
        with problems_of(key) as problems:
            dataset_inputs.columns(config, key, source)
        yield from problems or [Finding(key, True, "")]


def require(config: Config) -> list[str]:
    """Checks the inputs of a run that is about to start.

    Returns:
        Notes for the user.

    Raises:
        UserError: an input is missing or cannot be used.
    """
    results = list(findings(config))
    problems = [finding.message for finding in results if not finding.ok]
    if problems:
        others = f" (and {len(problems) - 1} more, which `rloo check` lists)" if len(problems) > 1 else ""
        raise UserError(problems[0] + others)
    return [finding.message for finding in results if finding.note]
