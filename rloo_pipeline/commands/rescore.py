"""rescore: scores a finished run's rollouts with different rewards, and shows how the advantages would change.

Nothing is sampled again, so later rounds still come from policies trained with the old rewards. The advantages come
from rewards alone, without KL and teacher, and are compared over all completions.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pyarrow as pa
from torch import Tensor

from rloo_pipeline.artifacts import round_tables, tables
from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.artifacts.policy import Policy, measured_reward_model
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.artifacts.round_tables import RoundFiles, RoundTables
from rloo_pipeline.config import Config, Reward, Rollout
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging.change import Change, change, columns
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.training.round_data import completions_of
from rloo_pipeline.user_code.score_table import score_table, scoring_facts


def rescore(config: Config, run: Path, rewards: Sequence[Reward], output: Path) -> None:
    """Scores every round of a run with different rewards; writes the scores and rescore.json, and prints a comparison.

    Args:
        config: the run's configuration.
        run: the run's folder.
        rewards: the new reward functions.
        output: folder for the scores tables and rescore.json.

    Raises:
        UserError: the run has no rollouts, one of its files is damaged, or a reward function fails.
    """
    from rloo_pipeline.training.batch import AlgorithmState, make_batch

    folders = sorted(folder for folder in (run / "rounds").glob("[0-9]*") if any(folder.glob("rollouts/*.parquet")))
    if not folders:
        raise UserError(f"{run}: has no rollouts in rounds/*/rollouts; pass the folder of a run, results/<run>")
    prompts = PromptSet(run / "prompts" / "train")
    new_config = config.model_copy(update={"rewards": list(rewards)})
    if any(reward.uses_own_model for reward in rewards):
        new_config = new_config.with_reward_model(str(measured_reward_model(run / "reward_model" / "checks.json")))
    algorithm = config.algorithm.model_copy(update={"teacher": None})
    states = {"old": AlgorithmState(), "new": AlgorithmState()}
    compared: dict[str, tuple[list[list[float]], ...]] = {}
    for folder in folders:
        rollouts, old, new = _tables(new_config, run, folder, prompts, output / "rounds" / folder.name)
        if not len(rollouts):  # no group has ended (rollout.token_budget)
            continue
        batches = {}
        for name, scores in (("old", old), ("new", new)):
            completions = completions_of(algorithm, RoundTables(rollouts, scores), config.rollout.cut_by)
            batches[name], states[name] = make_batch(algorithm, config.rollout, completions, states[name])
        compared[folder.name] = (
            *(_by_prompt(batches[name].completions.scores, config.rollout) for name in ("old", "new")),
            *(_by_prompt(batches[name].advantages.double(), config.rollout) for name in ("old", "new")),
        )
    if not compared:
        raise UserError(f"{run}: no group has ended in its rounds (rollout.token_budget); run it for longer")
    changes = {name: change(*values) for name, values in compared.items()}
    overall = change(*(list(chain.from_iterable(rounds)) for rounds in zip(*compared.values(), strict=True)))
    content = {
        "run": config.run,
        "rewards": [reward.model_dump(mode="json") for reward in rewards],
        "rounds": {name: changed._asdict() for name, changed in changes.items()},
        "overall": overall._asdict(),
    }
    write_json(output / "rescore.json", content)
    _print_changes(changes, overall)


def _tables(
    config: Config, run: Path, folder: Path, prompts: PromptSet, output: Path
) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Returns rollouts, old scores and new scores of a round. Writes the new scores as the stage `score` does."""
    shards = round_tables.files_of(folder, "rollouts", config.rollout)
    scores = [round_tables.scores_beside(shard) for shard in shards]
    old = round_tables.read(RoundFiles(shards, scores))
    rollouts = old.rollouts
    say(f"round {folder.name}: {len(rollouts)} completions")
    schema = tables.scores_schema([reward.column for reward in config.rewards])
    new = []
    for shard, path in zip(shards, scores, strict=True):
        shard_rollouts = tables.read(shard, "rollouts")
        rows = score_table(config.rewards, config.scoring, shard_rollouts, prompts, Policy(run / "policies" / "00000"))
        about = {**tables.facts_about(shard_rollouts), "policy": tables.footer(shard_rollouts)["policy"]}
        about |= scoring_facts(config.rewards)
        file = output / path.relative_to(folder)
        tables.write(file, rows, schema, "scores", **about)
        new.append(tables.read(file, "scores"))  # the footer has the weights, which GDPO needs
    return rollouts, old.scores, pa.concat_tables(new)


def _by_prompt(values: Tensor, rollout: Rollout) -> list[list[float]]:
    """Values of completions as nested lists [prompts, samples]."""
    rows: list[list[float]] = values.view(-1, rollout.num_generations).tolist()
    return rows


def _print_changes(changes: dict[str, Change], overall: Change) -> None:
    from rich.table import Column, Table

    from rloo_pipeline.runtime.console import Terminal

    numbers = (Column(heading, justify="right") for heading in columns(overall))
    table = Table("round", *numbers, title="old rewards → new rewards", title_justify="left")
    for name, changed in changes.items():
        table.add_row(str(int(name)), *columns(changed).values())
    table.add_section()
    table.add_row("all", *columns(overall).values())
    Terminal(width=None if Terminal().is_terminal else 160).print(table)
