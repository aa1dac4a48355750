"""With `rollout.lag` an update trains on rollouts of an older policy, and clips around the one that it starts from."""

import json

import pytest
from helpers import Round, done, rloo, succeeded

from rloo_pipeline.artifacts.policy import Policy

pytestmark = pytest.mark.slow

ONE_STEP = {"beta": 0, "steps_per_generation": 1}


@pytest.fixture
def second_round(tmp_path, tiny_model):
    """A function that runs the first update of a run with some `algorithm` and returns the arguments of the second."""

    def first_update(**algorithm) -> tuple[Round, list[object]]:
        run = Round(tmp_path / "run", tiny_model, rollout={"lag": 1}, algorithm={**ONE_STEP, **algorithm})
        run.write(1, policy=Policy(tiny_model).digest).write(2, policy=Policy(tiny_model).digest, policy_round=0)
        succeeded(run.update(1))
        return run, [*run.update_arguments(2), "--sampler", tiny_model]

    return first_update


def metrics(run: Round) -> dict[str, float]:
    return json.loads((run.run / "rounds" / "00002" / "metrics.json").read_text())


def test_the_ratio_is_to_the_policy_before_and_the_weights_are_for_the_older_one(second_round) -> None:
    run, arguments = second_round()
    done(*arguments)
    measured = metrics(run)
    assert measured["sampling/staleness"] == 1
    assert measured["ratio/mean"] == pytest.approx(1, abs=1e-5)
    assert measured["sampling/importance_sampling_ratio/max"] <= 2
    assert measured["sampling/outside_thresholds"] > 0
    assert 0 < measured["sampling/token_effective_sample_size"] < 1


def test_with_the_samplers_log_probs_the_ratio_is_to_the_older_policy(second_round) -> None:
    run, arguments = second_round(old_logps="sampler")
    done(*arguments)
    assert abs(metrics(run)["ratio/mean"] - 1) > 0.1
    assert metrics(run)["sampling/outside_thresholds"] is None


def test_rollouts_of_another_policy_are_refused(second_round) -> None:
    run, arguments = second_round()
    outcome = rloo(*arguments[:-1], run.policy(1))
    assert outcome.returncode == 1
    assert "rollouts/000.parquet" in outcome.stderr
    assert "delete it and run again" in outcome.stderr
