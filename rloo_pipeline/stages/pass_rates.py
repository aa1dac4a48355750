"""pass-rates: the scores of a round and the pass rates before it → the pass rates that later rounds draw prompts by."""

from collections.abc import Sequence
from pathlib import Path

from rloo_pipeline.artifacts import prompt_counts as files
from rloo_pipeline.artifacts import tables
from rloo_pipeline.config import Config
from rloo_pipeline.data.prompts_of_round import after_round
from rloo_pipeline.judging.completions import counts_of


def pass_rates(config: Config, round_: int, scores: Sequence[Path], output: Path, earlier: Sequence[Path] = ()) -> None:
    """Adds a round to the counts.

    Args:
        config: the stage's configuration.
        round_: number of the round, from 1.
        scores: all shards of the round's scores, in order.
        output: the table of pass rates.
        earlier: the table of the round before; in round 1 the shards of the stage `difficulty`, if it ran.

    Raises:
        UserError: a table is missing, damaged, or from a different round.
    """
    table = tables.read_all(scores, "scores", round=round_)
    sampled = counts_of(config, table, config.rollout.num_generations)
    before = files.read(earlier, round_ - 1) if earlier else {}
    facts = tables.footer(table)
    about = {key: facts[key] for key in ("run", "seed", "policy")}
    files.write(output, after_round(before, sampled), round_, shard=0, **about)
