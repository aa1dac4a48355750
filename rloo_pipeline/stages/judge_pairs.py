"""judge_pairs: completions of the warm start and of the final policy → judgements.parquet.

A judge is called like a reward function and also gets `other_completions`, the completions to compare with. Judges tend
to prefer what they see first (Zheng et al. 2023, arXiv 2306.05685, section 3.3). So each pair counts with the mean of
both orders, and the share of pairs with the same verdict in both tells how far to trust the judge.
"""

from collections import Counter
from pathlib import Path

import pyarrow as pa

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.prompt_set import PromptSet, held_out_part
from rloo_pipeline.config import Config
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.user_code.dispatch import WorkerPools
from rloo_pipeline.user_code.reward_call import OTHERS
from rloo_pipeline.user_code.score_batch import RewardBatch
from rloo_pipeline.user_code.score_table import as_table, batch_of, require_scores, require_verdicts, scoring_facts

JUDGEMENTS = pa.schema(
    [
        *tables.KEYS,
        pa.field("final_first", pa.float64()),
        pa.field("warmstart_first", pa.float64()),
        pa.field("error", pa.string()),
    ]
)
"""Verdicts on the final policy's completion in both orders, from 0 (worse than the other) to 1 (better)."""


def judge_pairs(config: Config, prompts: Path, before: Path, after: Path, output: Path) -> None:
    """Judges sample i of a prompt by the final policy against sample i by the warm start.

    Args:
        config: the stage's configuration.
        prompts: folder that the stage `prompts` wrote.
        before: table of completions of the evaluation `warmstart`.
        after: table of completions of the evaluation `final`.
        output: the table of judgements.

    Raises:
        UserError: a table is damaged or has different prompts, or the judge fails, cannot judge any pair, or returns a
            number outside 0 to 1.
    """
    assert config.judge
    old = tables.read(before, "completions", evaluated="warmstart")
    new = tables.read(after, "completions", evaluated="final")
    tables.check_aligned(old, new, after, str(before), "delete both and run again")
    held_out = PromptSet(held_out_part(prompts))
    first, second = batch_of(new, held_out), batch_of(old, held_out)
    samples = list(Counter(new["prompt_id"].to_pylist()).values())
    with WorkerPools([config.judge], config.scoring.workers) as pools:
        [of_new] = pools.score(_with_opponents(first, second), samples, {}, more=True)
        [of_old] = pools.score(_with_opponents(second, first), samples, {})
    for result in (of_new, of_old):
        require_scores(config.judge, result)
        require_verdicts(config.judge, result)
    verdicts = [result.scores for result in (of_new, of_old)]
    reversed_ = [None if verdict is None else 1 - verdict for verdict in verdicts[1]]
    scores = {"final_first": verdicts[0], "warmstart_first": reversed_}
    about = {"warmstart": tables.footer(old)[tables.DIGEST], "final": tables.footer(new)[tables.DIGEST]}
    facts = {key: value for key, value in scoring_facts([config.judge]).items() if key != tables.WEIGHTS}
    judgements = as_table(new, JUDGEMENTS, scores, [of_new, of_old])
    tables.write(output, judgements, JUDGEMENTS, "judgements", **about, **facts)
    judged = sum(None not in pair for pair in zip(*verdicts, strict=True))
    say(f"{config.judge.column} judged {judged} of {len(new)} pairs in both orders")


def _with_opponents(batch: RewardBatch, others: RewardBatch) -> RewardBatch:
    return batch._replace(columns={**batch.columns, OTHERS: others.completions})
