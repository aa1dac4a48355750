"""A model of each kind through two rounds: sampler and trainer hold the same model."""

import os

import kinds_page
import pytest
import skipped_tests
import two_rounds
from rounding import within
from two_rounds import KINDS

pytestmark = pytest.mark.slow

OFTEN = {"falcon_h1", "deepseek_v3", "gpt_oss"}
"""Those that every run of the tests takes."""
LARGEST, MEAN = within(1e-3, 2e-2), within(1e-4, 2e-3)
"""Differences in float32, nats."""


def cases() -> list:
    every_kind = "EVERY_KIND" in os.environ
    only_on_request = pytest.mark.skipif(not every_kind, reason=skipped_tests.EVERY_KIND)
    return [kind if kind in OFTEN else pytest.param(kind, marks=only_on_request) for kind in KINDS]


@pytest.mark.parametrize("kind", cases())
def test_sampler_and_trainer_are_one_model_in_two_rounds(kind, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome, facts = two_rounds.run(kind, tmp_path), two_rounds.of(kind)
    assert outcome.same, "a new engine samples the same, and so does one that is swapped to its own policy"
    assert outcome.warm is facts.warm
    assert facts.warm or "so the policy gets a new engine" in outcome.refusal
    assert min(outcome.gains) > 1, "weights that an update changes"
    assert {distance.form for distance in outcome.distances} == {facts.form}
    for distance in outcome.distances:
        if facts.dtype == "float32":
            assert (distance.mean < MEAN, distance.largest < LARGEST) == (True, True), distance
        else:
            assert distance.mean < 2 * outcome.rounding, "no farther apart than two roundings"
    assert outcome.greedy >= within(1, 0.9) or facts.dtype != "float32"


def test_the_page_has_a_row_of_each_kind() -> None:
    assert list(kinds_page.rows()) == list(KINDS)
