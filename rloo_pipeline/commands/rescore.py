"""rescore: scores a finished run's rollouts with different rewards, and shows how the advantages would change.

Nothing is sampled again, so later rounds still come from policies trained with the old rewards. The advantages come
from rewards alone, without KL and teacher, and are compared over all completions.

Rankings are compared within each prompt's completions, by Kendall's tau-b over the completions that both rewards
score. A group in which all values of either reward are equal has no ranking and is left out. A group is informative if
at least two of its rewards differ; RLOO learns only from such groups. As in updates, rewards that differ only by the
rounding of a weighted sum are equal.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch

from rloo_pipeline.algorithm.nan_stats import merged
from rloo_pipeline.artifacts import round_tables, tables
from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.artifacts.model_files import policy_folder
from rloo_pipeline.artifacts.policy import Policy, measured_reward_model
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.artifacts.round_tables import RoundFiles, RoundTables
from rloo_pipeline.checks.statistics import Array, informative
from rloo_pipeline.config import Config, Reward, Rollout
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.training.round_data import completions_of
from rloo_pipeline.user_code.score_table import score_tables, scoring_facts


class Change(NamedTuple):
    """The changes in one round or in all rounds; None if there is nothing to compare. Pairs are (old, new)."""

    groups: int
    ranked_groups: int
    """Groups that both rewards rank."""
    kendall: float | None
    reward: tuple[float | None, float | None]
    """Mean reward."""
    unscorable: tuple[int, int]
    """Completions without a reward."""
    informative: tuple[float, float]
    """Share of groups whose rewards differ."""
    completions: int
    advantage_correlation: float | None
    """Pearson's r, over completions."""
    sign_changes: float
    """Share of completions whose advantage changes sign."""


def rescore(config: Config, run: Path, rewards: Sequence[Reward], output: Path) -> None:
    """Scores every round of a run with different rewards; writes the scores and rescore.json, and prints a comparison.

    Args:
        config: the run's configuration.
        run: the run's folder.
        rewards: the new reward functions.
        output: folder for the scores tables and rescore.json.

    Raises:
        UserError: the run has no scored rollouts, one of its files is damaged, or a reward function fails.
    """
    from rloo_pipeline.training.batch import AlgorithmState, make_batch

    rounds = [run / "rounds" / f"{number:05d}" for number in range(1, config.rounds + 1)]  # a longer run left others
    shards = {folder: found for folder in rounds if (found := _scored(folder, config.rollout))}
    if not shards:
        sampled = (file for folder in rounds for file in sorted(folder.glob("rollouts/*.parquet")))
        if unscored := next(sampled, None):
            raise UserError(f"{unscored}: has no scores yet, nor has any other table of the run; continue the run")
        raise UserError(f"{run}: has no rollouts in rounds/*/rollouts; pass the folder of a run, results/<run>")
    prompts = PromptSet(run / "prompts" / "train")
    new_config = config.model_copy(update={"rewards": list(rewards)})
    if any(reward.uses_own_model for reward in rewards):
        new_config = new_config.with_reward_model(str(measured_reward_model(run / "reward_model" / "checks.json")))
    algorithm = config.algorithm.model_copy(update={"teacher": None})
    states = {"old": AlgorithmState(), "new": AlgorithmState()}
    compared: dict[str, Array] = {}
    for folder, files in shards.items():
        rollouts, old, new = _tables(new_config, run, files, prompts, output / "rounds" / folder.name)
        if not len(rollouts):  # no group has ended (rollout.token_budget)
            continue
        batches = {}
        for name, scores in (("old", old), ("new", new)):
            completions = completions_of(algorithm, RoundTables(rollouts, scores), config.rollout.cut_by)
            batches[name], states[name] = make_batch(algorithm, config.rollout, completions, states[name])
        values = [batch.completions.scores for batch in batches.values()]
        values += [batch.advantages.double() for batch in batches.values()]
        compared[folder.name] = torch.stack(values).view(4, -1, config.rollout.num_generations).numpy()
    if not compared:
        raise UserError(f"{run}: no group has ended in its rounds (rollout.token_budget); run it for longer")
    changes = {name: change(*values) for name, values in compared.items()}
    overall = change(*np.concatenate([*compared.values()], axis=1))
    content = {
        "run": config.run,
        "rewards": [reward.model_dump(mode="json") for reward in rewards],
        "rounds": {name: changed._asdict() for name, changed in changes.items()},
        "overall": overall._asdict(),
    }
    write_json(output / "rescore.json", content)
    _print_changes(changes, overall)


def _scored(folder: Path, settings: Rollout) -> list[Path]:
    """The rollouts of a round; while it is not yet trained on, only those that have scores."""
    trained = (folder / "metrics.json").exists()
    shards = round_tables.files_of(folder, "rollouts", settings)
    return [shard for shard in shards if trained or round_tables.scores_beside(shard).exists()]


def _tables(
    config: Config, run: Path, shards: Sequence[Path], prompts: PromptSet, output: Path
) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Returns rollouts, old scores and new scores of a round. Writes the new scores as the stage `score` does."""
    scores = [round_tables.scores_beside(shard) for shard in shards]
    old = RoundFiles(shards, scores).read()
    rollouts = old.rollouts
    say(f"round {output.name}: {len(rollouts)} completions")
    schema = tables.scores_schema([reward.column for reward in config.rewards])
    new, policy = [], Policy(policy_folder(run, 0))
    for shard, path in zip(shards, scores, strict=True):
        shard_rollouts = tables.read(shard, "rollouts")
        [rows] = score_tables(config.rewards, config.scoring, [shard_rollouts], prompts, policy)
        about = {**tables.facts_about(shard_rollouts), "policy": tables.footer(shard_rollouts)["policy"]}
        about |= scoring_facts(config.rewards)
        file = output / path.parent.name / path.name
        tables.write(file, rows, schema, "scores", **about)
        new.append(tables.read(file, "scores"))  # the footer has the weights, which GDPO needs
    return rollouts, old.scores, pa.concat_tables(new)


def _print_changes(changes: dict[str, Change], overall: Change) -> None:
    from rich.table import Column, Table

    from rloo_pipeline.runtime.console import Terminal

    numbers = (Column(heading, justify="right") for heading in _columns(overall))
    table = Table("round", *numbers, title="old rewards → new rewards", title_justify="left")
    for name, changed in changes.items():
        table.add_row(str(int(name)), *_columns(changed).values())
    table.add_section()
    table.add_row("all", *_columns(overall).values())
    Terminal(width=None if Terminal().is_terminal else 160).print(table)


def change(
    old: Sequence[Sequence[float]] | Array,
    new: Sequence[Sequence[float]] | Array,
    old_advantages: Sequence[Sequence[float]] | Array,
    new_advantages: Sequence[Sequence[float]] | Array,
) -> Change:
    """Compares old and new rewards of the same completions, of a round or of all rounds.

    Args:
        old: rewards [prompts, samples], NaN for unscorable completions.
        new: the new rewards, in the same form.
        old_advantages: advantages from the old rewards, [prompts, samples].
        new_advantages: advantages from the new rewards, [prompts, samples].
    """
    before, after = (merged(torch.tensor(values, dtype=torch.float64)).numpy() for values in (old, new))
    ranked = [tau for tau in map(_kendall, before, after) if tau is not None]
    first, second = (np.asarray(values, dtype=float).ravel() for values in (old_advantages, new_advantages))
    return Change(
        groups=len(before),
        ranked_groups=len(ranked),
        kendall=_mean(ranked),
        reward=(_mean(before[~np.isnan(before)]), _mean(after[~np.isnan(after)])),
        unscorable=(int(np.isnan(before).sum()), int(np.isnan(after).sum())),
        informative=(informative(before), informative(after)),
        completions=len(first),
        advantage_correlation=_correlation(first, second),
        sign_changes=float(np.mean(first * second < 0)),
    )


def _columns(change: Change) -> dict[str, str]:
    """A row of the printed table, heading → text."""

    def pair(values: tuple[float | None, float | None], form: str) -> str:
        return " → ".join(single(value, form) for value in values)

    def single(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    return {
        "mean reward": pair(change.reward, ".3f"),
        "unscorable": pair(change.unscorable, "d"),
        "Kendall τ": single(change.kendall, ".3f"),
        "informative groups": pair(change.informative, ".1%"),
        "advantages: correlation": single(change.advantage_correlation, ".3f"),
        "sign changes": single(change.sign_changes, ".1%"),
    }


def _kendall(old: Array, new: Array) -> float | None:
    """Kendall's tau-b of one group; None if one of the rewards does not rank it."""
    from scipy.stats import kendalltau

    both = ~(np.isnan(old) | np.isnan(new))
    first, second = old[both], new[both]
    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(kendalltau(first, second).statistic)


def _correlation(old: Array, new: Array) -> float | None:
    return None if np.ptp(old) == 0 or np.ptp(new) == 0 else float(np.corrcoef(old, new)[0, 1])


def _mean(values: Sequence[float] | Array) -> float | None:
    return float(np.mean(values)) if len(values) else None
