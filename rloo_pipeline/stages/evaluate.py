"""evaluate: a policy and the held-out prompts → completions with scores, and their summary with 95% intervals.

The seeds of the samples do not depend on the policy, so warm start and final policy get the same prompts and seeds.
"""

from pathlib import Path

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import PromptSet, held_out_part
from rloo_pipeline.config import Config
from rloo_pipeline.errors import counted
from rloo_pipeline.judging.evaluation_summary import summarize_evaluation
from rloo_pipeline.rollout import groups
from rloo_pipeline.rollout.groups import WholeGroups
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.user_code.score_table import join_scores, score_tables, scoring_facts
from rloo_pipeline.workers import kept_models


def evaluate(
    config: Config, prompts: Path, policy: Policy, name: str, output: Path, greedy: Path, summary: Path
) -> None:
    """Evaluates a policy on the run's held-out prompts.

    Args:
        config: the stage's configuration.
        prompts: folder that the stage `prompts` wrote.
        policy: the policy.
        name: name of the evaluation, such as `warmstart` or `final`.
        output: table for the sampled completions.
        greedy: table for the greedy completions; empty if evaluation.greedy is false, or if the sampled ones are
            greedy.
        summary: JSON file for the summary.
    """
    evaluate_on(config, PromptSet(held_out_part(prompts)), policy, name, output, greedy, summary)


def evaluate_on(
    config: Config, held_out: PromptSet, policy: Policy, name: str, output: Path, greedy: Path, summary: Path
) -> None:
    """Evaluates a policy on a set of prompts; see `evaluate`."""
    settings = config.evaluation
    rows = held_out.rows(list(range(min(len(held_out), settings.num_prompts or len(held_out)))))
    longest = config.longest_evaluated
    sampler = groups.load_sampler(policy, config, held_out, longest, for_rollouts=False)

    with_greedy = settings.greedy and settings.temperature > 0
    greedy_rows = rows if with_greedy else []
    wanted = [
        WholeGroups.of_evaluations(config, rows, settings.num_generations, settings.temperature, longest),
        WholeGroups.of_evaluations(config, greedy_rows, 1, 0.0, longest),
    ]
    completions = groups.sample_groups(sampler, config, *wanted)
    scores = score_tables(config.rewards, config.scoring, completions, held_out, policy, kept_models.elsewhere(config))
    sampled, likeliest = joined = [join_scores(config.rewards, *pair) for pair in zip(completions, scores, strict=True)]
    for path, kind, of_table, table in zip((output, greedy), ("completions", "greedy"), wanted, joined, strict=True):
        about = {"run": config.run, "seed": config.seed, "policy": policy.digest, "evaluated": name}
        about |= groups.sampling_facts(config.model, of_table.sampling) | scoring_facts(config.rewards)
        tables.write(path, table, table.schema, kind, **about)
    facts = summarize_evaluation(config, sampled)
    facts["greedy"] = summarize_evaluation(config, likeliest, 1, 0.0) if with_greedy else None
    write_json(summary, {"policy": policy.digest, "evaluated": name, **facts})
    low, high = facts["ci95"]
    title = f"policy {int(name)}" if name.isdecimal() else name
    greedy_text = f"; greedy {facts['greedy']['accuracy']:.1%}" if with_greedy else ""
    say(
        f"{title}: pass@1 {facts['accuracy']:.1%} (95% interval {low:.1%} to {high:.1%}){greedy_text}, "
        f"on {counted(len(rows), 'held-out prompt')}"
    )
