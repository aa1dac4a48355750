"""evaluate-chosen: selection.json → an evaluation of a chosen policy on the test rows, `dataset.eval`."""

from pathlib import Path
from typing import NamedTuple

from rloo_pipeline.artifacts.files import read_artifact
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.stages.evaluate import evaluate_on


class Chosen(NamedTuple):
    """A policy that `select` chose."""

    run: Path
    """Folder of its run."""
    policy: Path
    digest: str


def chosen_of(selection: Path, seed: int) -> Chosen:
    """The policy that was chosen for a seed.

    Raises:
        UserError: the file is missing or damaged, or no policy was chosen for this seed.
    """
    for best in read_artifact(selection)["chosen"]:
        if best["seed"] == seed:
            run = selection.parent / best["run"]
            return Chosen(run, run / "policies" / f"{best['round']:05d}", best["policy"])
    raise UserError(f"{selection}: no policy was chosen for seed {seed}; delete it and run again")


def evaluate_chosen(config: Config, chosen: Chosen, output: Path, greedy: Path, summary: Path) -> None:
    """Evaluates a chosen policy on the test rows.

    Raises:
        UserError: the policy is not the one that was evaluated on `dataset.dev`.
    """
    policy = Policy(chosen.policy, config.model.trust_remote_code)
    if policy.digest != chosen.digest:
        raise UserError(
            f"{policy}: not the policy that was evaluated on dataset.dev; delete the evaluations of "
            f"{chosen.run} and run again"
        )
    evaluate_on(config, PromptSet(chosen.run / "prompts" / "eval"), policy, "test", output, greedy, summary)
