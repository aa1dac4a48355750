"""The summary of an evaluation, from a table of its completions."""

from math import comb

import numpy as np
import pyarrow as pa
import pytest
from synthetic_runs import configuration

from rloo_pipeline.checks.statistics import estimate_share
from rloo_pipeline.judging.evaluation_summary import summarize_evaluation

RIGHT = [1, 1, 2, 1, 1, 1]
"""Right answers among the four of each prompt, so alike that the spread between prompts allows for all of them."""
SCORES = [float(place < right) for right in RIGHT for place in range(4)]


def test_shares_of_right_answers_have_the_intervals_of_as_many_independent_answers_as_there_are() -> None:
    """pass@2 of four answers has two independent draws, pass@4 one. The last answer has no score."""
    scores, reasons = [*SCORES[:-1], None], ["stop"] * 23 + ["length"]
    columns = {"completion_ids": [[0] * (1 + place) for place in range(24)], "finish_reason": reasons}
    table = pa.table({**columns, "scores/answer": scores, "scores/worked": [0.5] * 24, "reward": scores})
    found = summarize_evaluation(configuration(), table, 4, 0.0)
    expected = {"prompts": 6, "num_generations": 4, "temperature": 0.0, "unscored": 1}
    assert {name: found[name] for name in expected} == expected
    for k, draws in ((1, 4), (2, 2), (4, 1)):
        values = [1 - comb(4 - right, k) / comb(4, k) for right in RIGHT]
        value, ci95 = estimate_share(np.array(values), draws)
        assert found["pass@k"][str(k)] == {"value": pytest.approx(value), "ci95": pytest.approx(ci95)}
        assert ci95 != pytest.approx(estimate_share(np.array(values), 2 * draws).ci95) or k == 4
    assert found["pass@k"].keys() == {"1", "2", "4"}
    assert (found["accuracy"], found["ci95"]) == (found["pass@k"]["1"]["value"], found["pass@k"]["1"]["ci95"])
    assert found["rewards"]["worked"]["value"] == 0.5
    assert found["rewards"]["reward"]["value"] == pytest.approx((4 / 4 + 2 / 4 + 1 / 3) / 6), "of what has a score"
    assert (found["completions/mean_length"], found["completions/mean_terminated_length"]) == (12.5, 12.0)
    assert (found["completions/clipped_ratio"], found["num_completion_tokens"]) == (pytest.approx(1 / 24), 300)


def test_samples_and_temperature_are_those_of_the_configuration_unless_given() -> None:
    config = configuration(evaluation={"num_generations": 2, "temperature": 0.5})
    columns = {"completion_ids": [[1]] * 2, "finish_reason": ["stop"] * 2, "scores/answer": [1.0] * 2}
    table = pa.table({**columns, "reward": [1.0] * 2, "scores/worked": pa.nulls(2, pa.float64())})
    found = summarize_evaluation(config, table)
    assert (found["prompts"], found["num_generations"], found["temperature"]) == (1, 2, 0.5)
    assert found["rewards"]["worked"] is None, "it scored nothing"
