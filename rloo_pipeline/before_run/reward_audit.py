"""Tests rewards on the data before a run: unusable gold answers, conflicting time limits, scores of the data's own
solutions.

The reward itself audits the gold answers: it scores each one as a completion, against itself and against its neighbour
in the data. With math_reward, a gold answer accepts itself if it does so in a box, as models write it, or as it stands.
The box is tried first, since math-verify takes up to two seconds to find an expression in a text.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from rloo_pipeline import import_string
from rloo_pipeline.before_run.findings import Finding
from rloo_pipeline.checks.statistics import reaches
from rloo_pipeline.config import Config, Reward
from rloo_pipeline.data.rows import Row
from rloo_pipeline.errors import UserError, one_line
from rloo_pipeline.rewards import math

T = TypeVar("T")
MATH_REWARD = "rloo_pipeline.rewards.math:math_reward"
GOLD_COLUMNS = {MATH_REWARD: ("answer", "solution"), "rloo_pipeline.rewards.answer:exact_answer_reward": ("answer",)}
"""Rewards that compare with a gold answer, and the columns that may hold it, of which the first existing one counts."""
CODE_REWARD = "rloo_pipeline.rewards.code:code_reward"
MOST_ROWS, MOST_PAIRS = 20_000, 200
"""Maximum number of gold answers that are read, and of those compared with a neighbour; evenly spaced if there are
more.
"""
MOST_EXPRESSIONS = 16
"""Maximum number of pairs with an expression, since math-verify takes up to a second to compare two at college
level.
"""
LONGEST_EXPRESSION = 100
"""Maximum length of an expression that is compared, in characters."""
SHOWN = 3
"""Maximum number of rows that a message names."""


class GoldAudit(NamedTuple):
    """The gold answers of a dataset, and the rows with problems."""

    column: str
    golds: dict[int, Any]
    """Gold answers by row, without nulls."""
    unreadable: list[int]
    """Rows for which the reward gives no score."""
    not_themselves: list[int]
    """Rows whose gold answer does not accept itself."""
    accepting: list[tuple[int, int]]
    """Pairs of rows in which the first accepts the second row's gold answer, although it is written differently."""
    pairs: int
    """Number of compared pairs."""

    def of_row(self, row: int) -> str:
        """Formats a row's gold answer for a message."""
        return f"row {row} {one_line(repr(self.golds[row]), 60)}"


def audit(reward: Reward, rows: Sequence[Row]) -> GoldAudit | None:
    """Scores gold answers as completions; None if the reward does not compare with a gold answer.

    Raises:
        UserError: the reward refuses a gold answer.
    """
    column = next((name for name in GOLD_COLUMNS.get(reward.function, ()) if name in rows[0]), None)
    if column is None:
        return None
    function = import_string.load(reward.function)

    def scores(pairs: Sequence[tuple[int, int]], form: str = "{}") -> list[float | None]:
        texts = [f"<think></think>{form.format(rows[written][column])}" for _, written in pairs]
        returned: list[float | None] = function(
            texts, **{column: [rows[row][column] for row, _ in pairs]}, **reward.options
        )
        return returned

    places = [row for row in _spaced(range(len(rows)), MOST_ROWS) if rows[row].get(column) is not None]
    own: dict[int, float | None] = {}
    for form in ("\\boxed{{{}}}", "{}") if reward.function == MATH_REWARD else ("{}",):
        rest = [row for row in places if own.get(row) != 1]
        own |= zip(rest, scores([(row, row) for row in rest], form), strict=True)
    readable = [row for row in places if own[row] is not None]
    neighbours = list(zip(readable, [*readable[1:], *readable[:1]], strict=True))
    pairs = _chosen(
        [(a, b) for a, b in neighbours if _final_answer(rows[a][column]) != _final_answer(rows[b][column])],
        {row: str(rows[row][column]) for row in readable} if reward.function == MATH_REWARD else {},
    )
    return GoldAudit(
        column,
        {row: rows[row][column] for row in places},
        [row for row in places if own[row] is None],
        [row for row in readable if own[row] != 1],
        [pair for pair, score in zip(pairs, scores(pairs), strict=True) if score == 1],
        len(pairs),
    )


def findings(config: Config, datasets: Mapping[str, Sequence[Row]]) -> Iterator[Finding]:
    """Yields findings on each reward for each dataset. If there are several rewards, also names the deciding one."""
    for reward in config.rewards:
        for key, rows in datasets.items():
            if reward.function in GOLD_COLUMNS and rows:
                yield _gold_finding(reward, key, rows)
            if reward.function == CODE_REWARD:
                yield from _time_findings(reward, key, rows)
    if len(config.rewards) > 1:
        by = "correct.reward" if config.correct.reward else "the first of rewards; correct.reward names another"
        name, threshold = config.deciding_reward.column, config.correct.threshold
        yield Finding("right answers", True, f"are those to which {name} gives at least {threshold:g} ({by})")


def verdict(config: Config, reward: Reward, solutions: Sequence[float | None], wrong: Sequence[float | None]) -> str:
    """A warning about the scores of the data's own solutions and of wrong answers; empty if they look right."""
    threshold = config.correct.threshold
    low = int((~reaches(np.array(solutions, float), threshold)).sum())
    if reward is config.deciding_reward and low:
        return (
            f"{low} of {len(solutions)} of these solutions are not right by correct.threshold ({threshold:g}); is this "
            "the reward that decides (correct.reward), and are its columns the right ones?"
        )
    if reward.weight and len({*solutions, *wrong}) == 1:
        return "here it does not tell the data's own solutions from wrong answers"
    return ""


def _final_answer(gold: Any) -> str:
    """The final answer in a gold answer, which may be a whole solution, without white space."""
    answer = math.find(str(gold))
    return answer.key if answer and not answer.has_words else "".join(str(gold).split())


def _chosen(pairs: Sequence[tuple[int, int]], golds: Mapping[int, str]) -> list[tuple[int, int]]:
    """The pairs to compare. Their number depends only on the gold answers, not on the clock.

    Args:
        pairs: pairs of rows.
        golds: gold answers of math_reward by row; empty for a reward that compares strings.
    """
    expressions = {row: gold for row, gold in golds.items() if _is_expression(gold)}
    lengths = [max((len(expressions[row]) for row in pair if row in expressions), default=0) for pair in pairs]
    slow = [pair for pair, length in zip(pairs, lengths, strict=True) if 0 < length <= LONGEST_EXPRESSION]
    quick = [pair for pair, length in zip(pairs, lengths, strict=True) if length == 0]
    slow = [*_spaced(slow, MOST_EXPRESSIONS)]
    return sorted([*slow, *_spaced(quick, MOST_PAIRS - len(slow))])


def _is_expression(gold: str) -> bool:
    """True if a gold answer is neither a number nor a word, so that math-verify has to compare it."""
    answer = math.find(gold)
    return answer is not None and answer.number is None and not answer.has_words


def _gold_finding(reward: Reward, key: str, rows: Sequence[Row]) -> Finding:
    subject = f"reward {reward.column}"
    try:
        result = audit(reward, rows)
    except UserError as error:
        return Finding(subject, False, f"{key}: {error}")
    if result is None:
        return Finding(subject, True, f"{key}: has no column with gold answers", note=True)
    message = f"{key}: {len(result.golds):,} gold answers in '{result.column}'"
    if len(rows) > MOST_ROWS:
        message += f", evenly spaced in {len(rows):,} rows"
    wrong = [
        f"{len(found):,} {what}: {', '.join(map(result.of_row, found[:SHOWN]))}{', …' if found[SHOWN:] else ''}"
        for found, what in ((result.unreadable, "cannot be read"), (result.not_themselves, "do not accept themselves"))
        if found
    ]
    if wrong:
        fix = f"correct these rows or leave them out; rloo reward-test {reward.function} --data … lists them"
        return Finding(subject, False, f"{message}: {'; '.join(wrong)}", fix)
    message += " accept themselves"
    if result.accepting:
        shown = (f"{result.of_row(row)} that of {result.of_row(other)}" for row, other in result.accepting[:SHOWN])
        message += (
            f"; {len(result.accepting):,} of {result.pairs:,} compared accept their neighbour's, written differently: "
        )
        return Finding(subject, True, message + ", ".join(shown), note=True)
    return Finding(subject, True, f"{message}, and none of {result.pairs:,} compared accepts its neighbour's")


def _time_findings(reward: Reward, key: str, rows: Sequence[Row]) -> Iterator[Finding]:
    """Finds time limits of code_reward that conflict, or that do not leave each input its time."""
    parameters = inspect.signature(import_string.load(reward.function)).parameters
    options = {name: parameter.default for name, parameter in parameters.items()} | reward.options
    seconds, of_row = options["timeout"], options["row_timeout"]
    if of_row + seconds > reward.timeout and reward.on_timeout == "none":
        message = (
            f"its options row_timeout ({of_row:g} s) and timeout ({seconds:g} s) exceed its timeout "
            f"({reward.timeout:g} s), at which a slow program gets no score where a quick wrong one gets 0; raise "
            "the reward's timeout, or lower the options"
        )
        yield Finding(f"reward {reward.column}", False, message)
    tests = [row.get(options["tests_column"]) for row in rows]
    counts = [len(one) if isinstance(one, list) and one and isinstance(one[0], dict) else 1 for one in tests]
    if counts and (most := max(counts)) * seconds > of_row:
        message = (
            f"{key}: row {counts.index(most)} has {most} inputs of up to {seconds:g} s, but a row gets {of_row:g} s, "
            "after which the remaining inputs count as failed; lower the option timeout, or raise row_timeout and "
            "timeout"
        )
        yield Finding(f"reward {reward.column}", True, message, note=True)


def _spaced(items: Sequence[T], most: int) -> Sequence[T]:
    """At most `most` of the items, evenly spaced."""
    return items if len(items) <= most else [items[index * len(items) // most] for index in range(most)]
