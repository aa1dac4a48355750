"""Which completions are right, and of how many."""

import operator
from functools import reduce

import pyarrow as pa
from synthetic_runs import configuration

from rloo_pipeline.artifacts.prompt_counts import Counts
from rloo_pipeline.judging.completions import counts_of, is_correct


def test_a_completion_without_a_score_is_neither_right_nor_wrong() -> None:
    scores = [1.0, 0.0, None, None, None, 1.0]
    table = pa.table({"prompt_id": ["a", "a", "b", "b", "c", "c"], "scores/answer": scores})
    counts = counts_of(configuration(), table, 2)
    assert counts == {"a": Counts(1.0, 2.0), "b": Counts(0.0, 0.0), "c": Counts(1.0, 1.0)}
    right = is_correct(configuration(), table, 2)
    assert right.tolist() == [[True, False], [False, False], [False, True]], "in evaluations it is not right"


def test_a_score_that_rounding_takes_below_the_threshold_is_right() -> None:
    tenths = reduce(operator.add, [0.1] * 10)  # from Python 3.12 on, `sum` does not round on the way
    assert tenths < 1
    table = pa.table({"prompt_id": ["a", "a"], "scores/answer": [tenths, 1 - 1e-9]})
    assert is_correct(configuration(), table, 2).tolist() == [[True, False]]


def test_all_groups_of_a_prompt_count() -> None:
    """With `rollout.token_budget`, groups that began in several rounds can end in one."""
    scores = [1.0, 0.0, 1.0, 0.0, 0.0, None]
    table = pa.table({"prompt_id": ["a", "a", "b", "b", "a", "a"], "scores/answer": scores})
    assert counts_of(configuration(), table, 2) == {"a": Counts(1.0, 3.0), "b": Counts(1.0, 2.0)}
