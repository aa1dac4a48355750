"""check: checks everything that a run depends on, in seconds and without an engine, and prints a line for each.

It checks model, tokenizer, chat template, data and columns as `stage-assets` and `prompts` do. If the run has tools, a
scripted model plays an episode. Every reward function is called on a few rows, just as `score` calls it. `CHECKS` lists
the checks in order; each takes `RunInputs` and yields findings.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from rloo_pipeline import frozen_functions, import_string
from rloo_pipeline.artifacts import function_copies
from rloo_pipeline.before_run import data_trial, episode_trial, model_trial, reward_audit, reward_trial
from rloo_pipeline.before_run.findings import Finding, RunInputs, problems_of, show
from rloo_pipeline.config import STAGES, Config, provenance
from rloo_pipeline.config.loading import ConfigArguments
from rloo_pipeline.config.run_set import read_runs
from rloo_pipeline.errors import UserError, counted
from rloo_pipeline.runtime.console import Terminal


def check(arguments: ConfigArguments) -> None:
    """Runs all checks and prints the findings.

    Args:
        arguments: configuration file and changes.

    Raises:
        UserError: a check found a problem.
    """
    started = time.monotonic()
    console = Terminal()
    with tempfile.TemporaryDirectory() as folder:
        problems = show(_all_findings(arguments, Path(folder)), console)
    if problems:
        raise UserError(f"{arguments.file}: {counted(problems, 'problem')}, see above")
    message = f"No problem found in {time.monotonic() - started:.0f} s; to start the run: {arguments.run_command}"
    console.print(message, soft_wrap=True)


def _all_findings(arguments: ConfigArguments, scratch: Path) -> Iterator[Finding]:
    """Yields the findings of a run; for an experiment, those of each arm with its first seed, with each problem
    once.
    """
    runs = read_runs(arguments.file, tuple(arguments.changes))
    shown = set[Finding]()
    for number, (run, config) in enumerate(runs.configs.items()):
        if runs.experiment and config.seed != runs.experiment.seeds[0]:
            continue
        folder = scratch / str(number)
        folder.mkdir()
        for finding in findings(config, folder):
            if finding not in shown:
                arm = f"{run.split('/')[1]}: " if runs.experiment and shown else ""
                yield finding._replace(subject=f"{arm}{finding.subject}")
            shown.add(finding)


def findings(config: Config, scratch: Path) -> Iterator[Finding]:
    """Runs all checks; those that need a missing input are skipped.

    Args:
        config: the run's configuration.
        scratch: empty folder for a model that a function builds.
    """
    with ExitStack() as stack:
        with suppress(UserError):  # a check names a function that does not exist
            function_copies.write(copies := function_copies.folder_of(scratch), [config])
            frozen_functions.use(copies if copies.exists() else None)  # jobs use copies
            stack.callback(frozen_functions.use, None)
        inputs = RunInputs(config, scratch, stack)
        for one_check in CHECKS:
            yield from one_check(inputs)


def functions(inputs: RunInputs) -> Iterator[Finding]:
    """Checks by the text of their files that the functions named in the configuration exist."""
    sections = {section for stage in STAGES.values() for section in stage.decides}
    for name in provenance.functions(inputs.config, sections - {"rewards", "model"}):  # these two are called instead
        with problems_of("function") as problems:
            import_string.check(name)
        yield from problems


def golds(inputs: RunInputs) -> Iterator[Finding]:
    """Checks that verifiers can read the gold answers of the data."""
    yield from reward_audit.findings(inputs.config, {key: sample.rows for key, sample in inputs.datasets.items()})


CHECKS: Sequence[Callable[[RunInputs], Iterator[Finding]]] = (
    functions,
    model_trial.own_functions,
    model_trial.model,
    model_trial.weights,
    model_trial.machine,
    model_trial.tokenizer,
    model_trial.sampling,
    model_trial.teacher,
    episode_trial.tools,
    data_trial.datasets,
    data_trial.enough,
    data_trial.template,
    data_trial.first_prompt,
    reward_trial.rewards,
    golds,
)
