"""held-out: the held-out completions that a round's rollout jobs also sampled, with their scores → accuracy of the
policy that sampled them.

Prompts, seeds and temperature are those of the evaluations, so the rounds form a curve over the same problems. A round
sampled at a different temperature counts as not measured. In TensorBoard the steps of the curve are the optimizer steps
that had made the policy, as in TRL.
"""

from collections.abc import Sequence
from pathlib import Path

from rloo_pipeline.artifacts import lineage
from rloo_pipeline.artifacts.files import check_facts, read_artifact, write_json
from rloo_pipeline.artifacts.round_tables import RoundFiles
from rloo_pipeline.artifacts.tables import footer
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError, counted
from rloo_pipeline.judging.evaluation_summary import summarize_evaluation
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.trackers.events import write_events
from rloo_pipeline.trackers.names import eval_metrics
from rloo_pipeline.user_code.score_table import join_scores


def held_out(
    config: Config,
    rollouts: Sequence[Path],
    scores: Sequence[Path],
    round_: int,
    output: Path,
    events: Path,
    policy_metrics: Path | None = None,
) -> None:
    """Summarizes a round's held-out completions, by the reward functions that need no GPU. If a weighted function needs
    one, the mean of the weighted sum is left out.

    Args:
        config: the stage's configuration.
        rollouts: all tables that the round's rollout jobs wrote, in order.
        scores: all tables that its score jobs wrote, in order.
        round_: number of the round, from 1.
        output: JSON file with the number of the policy and the fields of an evaluation's summary.
        events: TensorBoard file for the same numbers.
        policy_metrics: metrics.json of the round that made the policy, if it is not policy 0.

    Raises:
        UserError: a file is missing or damaged, or belongs to a different round.
    """
    rewards = [reward for reward in config.rewards if not reward.gpus]
    whole = all(reward.weight == 0 for reward in config.rewards if reward.gpus)
    config = config.override({"rewards": rewards, "correct.reward": config.deciding_reward.column})
    tables = RoundFiles(rollouts, scores).read_held_out(round_, config.evaluation.temperature)
    policy = config.rollout.policy_of(round_)
    # evaluation.each_round was 0 when the round was sampled, or evaluation.temperature was different
    if not len(tables.rollouts):
        write_json(output, {"policy": policy, "prompts": 0, "accuracy": None})
        write_events(events, round_, {}, "eval")
        return
    if policy_metrics is not None:
        check_facts(rollouts[0], footer(tables.rollouts), lineage.named_policy(policy_metrics.parents[2], policy))
    summary = {
        "policy": policy,
        **summarize_evaluation(config, join_scores(rewards, tables.rollouts, tables.scores), 1),
    }
    if not whole:
        summary["rewards"]["reward"] = None
    write_json(output, summary)
    write_events(events, round_, {**eval_metrics(summary), "step": _step(policy, policy_metrics)}, "eval")
    low, high = summary["ci95"]
    say(
        f"policy {policy}: {summary['accuracy']:.1%} right on {counted(summary['prompts'], 'held-out prompt')} "
        f"(95% interval {low:.1%} to {high:.1%})"
    )


def _step(policy: int, metrics: Path | None) -> int:
    """Number of optimizer steps that had made a policy."""
    if policy == 0:
        return 0
    if metrics is None:
        raise UserError(f"--policy-metrics: policy {policy} was measured; name metrics.json of round {policy}")
    return int(read_artifact(metrics, round=policy)["step"])
