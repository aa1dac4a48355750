"""evaluate-chosen: selection.json → an evaluation of a chosen policy on the test rows, `dataset.eval`."""

from pathlib import Path

from rloo_pipeline.artifacts.policy import Policy, chosen_of, measured_reward_model
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.stages.evaluate import evaluate_on


def evaluate_chosen(config: Config, selection: Path, seed: int, output: Path, greedy: Path, summary: Path) -> None:
    """Evaluates a chosen policy on the test rows.

    Args:
        config: the stage's configuration, that of the chosen run.
        selection: file that `select` wrote.
        seed: seed of the chosen run.
        output: table for the sampled completions.
        greedy: table for the greedy completions.
        summary: JSON file for the summary.

    Raises:
        UserError: the policy is not the one that was evaluated on `dataset.dev`.
    """
    chosen = chosen_of(selection, seed)
    if any(reward.uses_own_model for reward in config.rewards):
        model = measured_reward_model(chosen.run / "reward_model" / "checks.json")
        config = config.with_reward_model(str(model))
    policy = Policy(chosen.policy, config.model.trust_remote_code)
    if policy.digest != chosen.digest:
        raise UserError(
            f"{policy}: not the policy that was evaluated on dataset.dev; delete the evaluations of "
            f"{chosen.run} and run again"
        )
    evaluate_on(config, PromptSet(chosen.run / "prompts" / "eval"), policy, "test", output, greedy, summary)
