"""The summary of an evaluation, from a table of its completions."""

import math

import numpy as np
import pyarrow as pa
import pytest
from synthetic_runs import configuration

from rloo_pipeline.checks.statistics import estimate_share
from rloo_pipeline.judging.evaluation_summary import summarize_evaluation

SCORES = [1.0, 1.0, 0.0, 1.0, 0.0, None, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
"""Three prompts with four answers each, of which 3, 1 and 0 are right; one has no score."""


def test_shares_of_right_answers_have_the_intervals_of_as_many_independent_answers_as_there_are() -> None:
    """pass@2 of four answers has two independent draws, pass@4 one."""
    lengths = [[0] * (1 + place) for place in range(12)]
    reasons = ["stop"] * 9 + ["length"] * 3
    columns = {"completion_ids": lengths, "finish_reason": reasons, "scores/answer": SCORES}
    table = pa.table({**columns, "scores/worked": [0.5] * 12, "reward": SCORES})
    found = summarize_evaluation(configuration(), table, 4, 0.0)
    assert {name: found[name] for name in ("prompts", "num_generations", "temperature", "unscored")} == {
        "prompts": 3,
        "num_generations": 4,
        "temperature": 0.0,
        "unscored": 1,
    }
    by_k = {"1": [3 / 4, 1 / 4, 0], "2": [1, 1 - math.comb(3, 2) / math.comb(4, 2), 0], "4": [1, 1, 0]}
    assert found["pass@k"].keys() == by_k.keys()
    for (k, values), draws in zip(by_k.items(), (4, 2, 1), strict=True):
        expected = estimate_share(np.array(values), draws)
        assert found["pass@k"][k] == {"value": pytest.approx(expected.value), "ci95": pytest.approx(expected.ci95)}
    assert (found["accuracy"], found["ci95"]) == (found["pass@k"]["1"]["value"], found["pass@k"]["1"]["ci95"])
    assert found["rewards"]["worked"]["value"] == 0.5
    assert found["rewards"]["reward"]["value"] == pytest.approx((3 / 4 + 1 / 3 + 0) / 3), "of what has a score"
    assert (found["completions/mean_length"], found["completions/mean_terminated_length"]) == (6.5, 5.0)
    assert (found["completions/clipped_ratio"], found["num_completion_tokens"]) == (0.25, 78)


def test_samples_and_temperature_are_those_of_the_configuration_unless_given() -> None:
    config = configuration(evaluation={"num_generations": 2, "temperature": 0.5})
    columns = {"completion_ids": [[1]] * 2, "finish_reason": ["stop"] * 2}
    table = pa.table(columns | {name: [1.0, 1.0] for name in ("scores/answer", "scores/worked", "reward")})
    found = summarize_evaluation(config, table)
    assert (found["prompts"], found["num_generations"], found["temperature"]) == (1, 2, 0.5)
