"""The metrics of the samples of a round."""

import math

import pyarrow as pa
import pytest
import torch

from rloo_pipeline.artifacts import tables
from rloo_pipeline.config import Algorithm
from rloo_pipeline.training.batch import Batch, RoundTensors
from rloo_pipeline.training.metrics import sample_metrics, update_metrics
from rloo_pipeline.training.objective import Record


def metrics(*rewards: float | None, error: str | None = None, **about: str) -> dict[str, float | int | None]:
    """Metrics of groups of two completions with these rewards, of which those without one have an error."""
    keys = [{"prompt_id": str(row // 2), "sample": row % 2} for row in range(len(rewards))]
    tokens = {"prompt_ids": [4], "completion_ids": [5, 2], "sampling_logps": [-1.0, -1.0]}
    rollouts = [{**key, **tokens, "completion": "", "finish_reason": "stop", "seed": 0} for key in keys]
    scores = [
        {**key, "scores/answer": r, "reward": r, "error": error if r is None else None}
        for key, r in zip(keys, rewards, strict=True)
    ]
    return sample_metrics(
        pa.Table.from_pylist(rollouts, schema=tables.ROLLOUTS),
        tables.build(scores, tables.scores_schema(["answer"]), "scores", **about),
        2,
    )


def test_rewards_of_a_group_that_differ_by_the_rounding_of_their_sum_are_equal() -> None:
    """As they are where groups that teach are counted; in TRL a deviation that is close to 0 is 0."""
    assert 0.1 + 0.2 != 0.3
    values = metrics(0.1 + 0.2, 0.3, 1.0, 0.0, None, 1.0, None, None)
    assert values["frac_reward_zero_std"] == 0.75


def test_rewards_are_summed_up_over_the_completions_that_have_one() -> None:
    expected = {"reward": 1.0, "reward_std": 1.0, "rewards/answer/mean": 1.0, "rewards/answer/std": 1.0}
    expected |= {"rewards/answer/none": 1, "unscorable": 1, "scoring_errors": 1, "frac_reward_zero_std": 0.5}
    values = metrics(1.0, 0.0, None, 2.0, error="late")
    assert {name: values[name] for name in expected} == expected
    assert metrics(1.0, 0.0, None, 2.0)["scoring_errors"] == 0, "a reward that does not apply is no error"
    unrewarded = metrics(1.0, 0.0, None, 2.0, weights='{"answer": 0}')
    assert (unrewarded["unscorable"], unrewarded["frac_reward_zero_std"]) == (0, None), "a teacher alone teaches"
    assert metrics(1.0, 1.0, 0.0, 0.0, weights='{"answer": 1}')["frac_reward_zero_std"] == 1
    assert metrics(None, None)["reward"] is None


LOG_WEIGHTS = torch.tensor([[2.5, 1.0, 1.0], [0.25, 1.0, 1.0], [1.0, 1.0, 1.0]]).log()
"""Of completions of 2, 1 and 3 tokens."""


def of_update(measured: bool = True, known: bool = True, **keys: object) -> dict[str, float | int | None]:
    """The metrics of an update that trained on the first two completions."""
    none, mask = torch.zeros(3), torch.arange(3) < torch.tensor([[2], [1], [3]])
    masked, zeros = torch.tensor([False, False, True]), torch.zeros(3, 3)
    old, sampling = (LOG_WEIGHTS, zeros) if measured else (None, None)
    completions = RoundTensors(none.double(), mask, masked, old, reference_logps=zeros, sampling_logps=sampling)
    rewards = torch.tensor([1.0, torch.nan, 2.0]).double()
    batch = Batch(completions, rewards, keys.pop("kl", None), none, masked, masked, 0.1)
    values = {"trained": keys.pop("trained", [1.0, 1.0, 0.0]), "entropy": [1.0, 0.5, 0.0], "kl": [0.4, 0.2, 0.0]}
    values |= {"ratio": [2.0, 1.0, 0.0], "low": [0.5, 0.0, 0.0], "high": [0.0, 1.0, 0.0], "outside": [0.5, 1.0, 0.0]}
    values |= {"weight": [[0.5, 0.8, 1.0], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]}
    record = Record.empty(3)._replace(**{name: torch.tensor(value) for name, value in values.items()})
    return update_metrics(batch, record, Algorithm.model_validate({"beta": 0.1, **keys}), ratio_is_known=known)


TOKENS = {"importance_sampling_level": "token", "mismatch": {"correction": "token_tis"}}
SEQUENCES = {"mismatch": {"correction": "sequence_tis"}}
RATIO = "sampling/importance_sampling_ratio"


@pytest.mark.parametrize(
    ("keys", "ratio", "low", "high", "weight", "outside"),
    [(TOKENS, 5 / 3, 1 / 3, 1 / 3, 1.2, 2 / 3), (SEQUENCES, 1.5, 0.25, 0.5, 1.4, 0.75)],
)
def test_ratios_clips_and_weights_weigh_every_action_that_was_trained_on_equally(
    keys, ratio, low, high, weight, outside
) -> None:
    expected = {
        "ratio/mean": ratio,
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
    }
    expected |= {f"{RATIO}/min": 0.5, f"{RATIO}/mean": weight, f"{RATIO}/max": 2.0}
    expected |= {"sampling/outside_thresholds": outside, "entropy": 0.5, "kl": 0.2, "kl/sequence_mean": 0.3}
    expected |= {"shaped_reward": 1.5, "beta": 0.1, "trained_completions": 2}
    values = of_update(**keys)
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    assert of_update(known=False, **keys)["ratio/mean"] is None


def test_the_gap_between_the_engines_is_that_of_all_completions_in_one_pass() -> None:
    """Weights of completions 2.5, 0.25 and 1; of six tokens, two are outside the band from 0.5 to 2."""
    values, logs = of_update(), (math.log(2.5), math.log(4))
    expected = {
        "sampling/sampling_logp_difference/mean": sum(logs) / 6,
        "sampling/sampling_logp_difference/max": logs[1],
        f"{RATIO}/min": 0.25,
        f"{RATIO}/mean": 3.75 / 3,
        f"{RATIO}/max": 2.5,
        "sampling/kl": (2.5 - 1 - logs[0] + 0.25 - 1 + logs[1]) / 6,
        "sampling/outside_band": 2 / 6,
        "sampling/effective_sample_size": 3.75**2 / (3 * (2.5**2 + 0.25**2 + 1)),
        "sampling/token_effective_sample_size": 6.75**2 / (6 * (2.5**2 + 0.25**2 + 4)),
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    assert values["sampling/outside_thresholds"] is None
    assert "teacher/kl" not in values
    assert {of_update(measured=False)[name] for name in expected} == {None}
    nothing = of_update(trained=[0.0] * 3, **TOKENS)
    assert [nothing[f"{RATIO}/{name}"] for name in ("min", "mean", "max")] == [None] * 3


def test_the_kl_in_the_reward_is_that_of_all_completions_in_the_loss() -> None:
    values = of_update(kl=torch.tensor([0.5, 0.25, 9.0]).double())
    assert (values["kl"], values["kl/sequence_mean"]) == pytest.approx((0.25, 0.375))
