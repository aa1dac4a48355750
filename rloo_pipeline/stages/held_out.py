"""held-out: the held-out completions that a round's rollout jobs also drew → accuracy of the policy that sampled.

Prompts, seeds and temperature are those of the evaluations, so the rounds form a curve of the same problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.artifacts.prompt_set import PromptSet, held_out_part
from rloo_pipeline.config import Config
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.scoring.score_table import score_table
from rloo_pipeline.stages.evaluate import summarize
from rloo_pipeline.stages.probe import join_scores
from rloo_pipeline.trackers.events import write_events
from rloo_pipeline.trackers.names import eval_metrics


def held_out(
    config: Config, prompts: Path, policy_folder: Path, shards: Sequence[Path], round_: int, output: Path, events: Path
) -> None:
    """Scores a round's held-out completions, by the functions that need no GPU.

    Args:
        config: of the stage.
        prompts: folder that the stage `prompts` wrote.
        policy_folder: a policy with the tokenizer of the one that sampled.
        shards: tables that the round's rollout jobs wrote.
        round_: number of the round, from 1.
        output: JSON file with the policy's number and what an evaluation's summary has.
        events: TensorBoard file for the same numbers.
    """
    rewards = [reward for reward in config.rewards if not reward.gpus]
    columns = [reward.column for reward in rewards]
    evaluation = config.evaluation.model_copy(
        update={"breakdown": [name for name in config.evaluation.breakdown if name in columns]}
    )
    correct = config.correct.model_copy(update={"reward": config.correct.reward or config.rewards[0].column})
    config = config.model_copy(update={"rewards": rewards, "evaluation": evaluation, "correct": correct})
    rolled, policy = tables.read_all(shards, "held_out", round=round_), config.rollout.policy_of(round_)
    if not len(rolled):  # evaluation.each_round was 0 when the round was sampled
        write_json(output, {"policy": policy, "prompts": 0, "accuracy": None})
        write_events(events, round_, {}, "eval")
        return
    scores = score_table(config, rolled, PromptSet(held_out_part(prompts)), policy_folder)
    summary = {"policy": policy, **summarize(config, join_scores(config, rolled, scores), 1)}
    write_json(output, summary)
    write_events(events, round_, eval_metrics(summary), "eval")
    low, high = summary["ci95"]
    say(
        f"policy {policy}: {summary['accuracy']:.1%} right on {summary['prompts']} held-out prompts "
        f"(95% interval {low:.1%} to {high:.1%})"
    )
