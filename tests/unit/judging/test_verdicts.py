"""Each check passes on a healthy warm start and warns or fails on one with its problem."""

from dataclasses import replace

import numpy as np
import pytest

from rloo_pipeline.checks.evidence import Evidence, TokenFacts
from rloo_pipeline.checks.group_stats import SuccessDistribution, fit
from rloo_pipeline.checks.registry import CHECKS, judge, verdict_of
from rloo_pipeline.config import CheckLimits
from rloo_pipeline.stages.checks import _mean_size, say_checks

PROMPTS, SAMPLES = 40, 8
LIMITS = CheckLimits().by_name("float32")
TOKENS = TokenFacts(PROMPTS, 0, 0, PROMPTS, PROMPTS, "<|assistant|>", 0, 2, (2,), (2,), (2, "</s>"), ())

PREFERENCES = {
    "pairs": 200,
    "prompts": 150,
    "accuracy": {"value": 0.8, "ci95": [0.74, 0.85]},
    "margin": {"value": 1.5, "ci95": [1.2, 1.8]},
    "length_correlation": -0.1,
}


def healthy(**changes) -> Evidence:
    """Half of the completions right in nearly every group, and no problem."""
    draw = np.random.default_rng(0)
    right = draw.random((PROMPTS, SAMPLES)) < draw.beta(3, 3, (PROMPTS, 1))
    plain = {
        "tokens": TOKENS,
        "packed": 1e-6,
        "dtype": "float32",
        "longest": 100,
        "rewards": right.astype(float),
        "rewarded": True,
        "right": right,
        "lengths": draw.integers(5, 60, (PROMPTS, SAMPLES)),
        "truncated": np.zeros((PROMPTS, SAMPLES), dtype=bool),
        "texts": [[f"{p} {s}" for s in range(SAMPLES)] for p in range(PROMPTS)],
        "in_form": np.ones((PROMPTS, SAMPLES), dtype=bool),
        "differences": draw.normal(0, 1e-5, 500),
        "entropies": draw.random(500),
        "demonstrations": np.full(100, -0.5),
        "held_out": np.full(100, -0.6),
        "preferences": PREFERENCES,
        "num_generations": SAMPLES,
        "seed": 1,
    }
    return Evidence(**{**plain, **changes})


def tokens(**changes) -> dict:
    return {"tokens": replace(TOKENS, **changes)}


NONE_RIGHT = np.zeros((PROMPTS, SAMPLES), dtype=bool)
SICK = {
    "round_trip": ("warn", tokens(changed=3)),
    "double_bos": ("fail", tokens(double_bos=1)),
    "generation_prompt": ("warn", tokens(opened=0, generation_prompt="")),
    "stop_ids": ("warn", tokens(turn_end=(7, "<|im_end|>"))),
    "chat_template": ("warn", tokens(template=("it leaves out a role",))),
    "pad_token": ("warn", tokens(pad=2)),
    "packed_logprobs": ("warn", {"packed": 3e-4}),
    "logprob_difference": ("fail", {"differences": np.array([0.0] * 99 + [0.02])}),
    "logprob_difference_q95": ("fail", {"differences": np.array([0.0] * 90 + [0.02] * 10)}),
    "perplexity": ("warn", {"demonstrations": np.full(10, -4.0)}),
    "perplexity_held_out": ("warn", {"held_out": np.full(10, -4.0)}),
    "overfitting": ("warn", {"demonstrations": np.full(10, -0.1), "held_out": np.full(10, -0.9)}),
    "pair_accuracy": ("fail", {"preferences": PREFERENCES | {"accuracy": {"value": 0.53, "ci95": [0.46, 0.6]}}}),
    "reward_length": ("warn", {"preferences": PREFERENCES | {"length_correlation": -0.9}}),
    "scorable": ("fail", {"rewards": np.full((PROMPTS, SAMPLES), np.nan)}),
    "pass_at_k": ("warn", {"right": NONE_RIGHT}),
    "all_right": ("warn", {"right": ~NONE_RIGHT}),
    "all_wrong": ("warn", {"right": NONE_RIGHT}),
    "mixed": ("warn", {"right": NONE_RIGHT}),
    "wasted": ("warn", {"right": NONE_RIGHT}),
    "teaching": ("fail", {"rewards": np.full((PROMPTS, SAMPLES), 0.5)}),
    "truncated": ("warn", {"truncated": ~NONE_RIGHT}),
    "format_rate": ("warn", {"in_form": NONE_RIGHT}),
    "entropy": ("warn", {"entropies": np.full(10, 1e-4)}),
    "duplicates": ("warn", {"texts": [["same"] * SAMPLES] * PROMPTS}),
}


def verdicts(evidence: Evidence, accepted: tuple[str, ...] = ()) -> dict[str, dict]:
    return {result["name"]: result for result in judge(evidence, LIMITS, accepted)}


def test_a_healthy_warm_start_passes_every_check() -> None:
    results = verdicts(healthy())
    assert results.keys() == CHECKS.keys() == LIMITS.keys()
    assert {result["verdict"] for result in results.values()} == {"pass"}
    assert all(result["advice"].endswith(".") and result["shown"] for result in results.values())


@pytest.mark.parametrize("name", SICK)
def test_each_problem_is_reported_with_advice(name) -> None:
    expected, changes = SICK[name]
    result = verdicts(healthy(**changes))[name]
    assert result["verdict"] == expected
    assert result["advice"] != verdicts(healthy())[name]["advice"]


def test_a_tokenizer_without_a_pad_token_keeps_its_end_tokens_in_the_loss() -> None:
    result = verdicts(healthy(**tokens(pad=None)))["pad_token"]
    assert (result["verdict"], result["shown"]) == ("warn", "no pad, so eos 2 is used for it")
    assert "the end token stays in the loss and counts as an end" in result["advice"]


def test_a_check_without_limits_always_passes() -> None:
    assert CHECKS.keys() - SICK.keys() == {"mean_reward", "pass_at_1"}
    assert verdict_of(0.0, None, None, "below") == "pass"
    assert verdict_of(0.0, 0.1, None, "below") == "warn"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_log_probs_that_are_not_finite_do_not_pass_and_can_be_written(bad: float) -> None:
    results = verdicts(healthy(differences=np.array([bad] * 2), entropies=np.array([0.5, np.nan])))
    names = ("logprob_difference", "logprob_difference_q95", "entropy")
    assert [results[name]["verdict"] for name in names] == ["fail", "fail", "warn"]
    assert [results[name]["value"] for name in names] == [None] * 3
    assert _mean_size(np.array([bad, 0.0])) is None


def test_a_check_that_does_not_apply_is_left_out() -> None:
    missing = {"demonstrations": None, "held_out": None, "in_form": None, "differences": None, "preferences": None}
    results = verdicts(healthy(**missing, **tokens(chats=0, opened=0)))
    expected = {
        *("perplexity", "perplexity_held_out", "overfitting", "format_rate", "logprob_difference"),
        *("generation_prompt", "chat_template", "logprob_difference_q95", "pair_accuracy", "reward_length"),
    }
    assert CHECKS.keys() - results.keys() == expected


def test_an_accepted_failure_stays_a_failure_and_is_marked() -> None:
    result = verdicts(healthy(rewards=np.full((PROMPTS, SAMPLES), 0.5)), accepted=("teaching",))["teaching"]
    assert (result["verdict"], result["accepted"]) == ("fail", True)


def test_rewards_that_differ_only_between_prompts_are_not_called_the_same() -> None:
    rewards = np.repeat(np.arange(PROMPTS), SAMPLES).reshape(PROMPTS, SAMPLES)
    result = verdicts(healthy(rewards=rewards.astype(float)))["teaching"]
    assert result["verdict"] == "fail"
    assert result["advice"].startswith("only 0% of groups have different rewards, so RLOO could learn nothing;")


def test_the_share_of_mixed_groups_is_that_of_a_beta_binomial() -> None:
    """With p uniform, each number of right completions is equally likely: 1 − 2/(K+1) of the groups are mixed."""
    uniform = SuccessDistribution(1.0, 1.0)
    assert [uniform.mixed(k) for k in (2, 4, 9)] == pytest.approx([1 / 3, 3 / 5, 4 / 5])
    assert uniform.samples_for(0.8) == 9
    assert SuccessDistribution(0.01, 0.01).samples_for(0.8) is None


def test_the_fit_recovers_the_distribution() -> None:
    draw = np.random.default_rng(5)
    counts = draw.binomial(8, draw.beta(0.5, 2.0, 4000))
    distribution = fit(counts, 8)
    assert distribution is not None
    assert distribution.a == pytest.approx(0.5, rel=0.1)
    assert distribution.b == pytest.approx(2.0, rel=0.1)
    share = draw.binomial(32, draw.beta(0.5, 2.0, 200_000))
    assert distribution.mixed(32) == pytest.approx(float(np.mean((share > 0) & (share < 32))), abs=0.01)
    assert fit([0, 0, 0], 8) is None
    assert fit([8, 8], 8) is None


MEASURED = {
    "bfloat16": [
        (0.018, 0.05, 0.11, "pass"),
        (0.044, 0.12, 0.27, "pass"),
        (0.15, 0.65, 1.4, "warn"),
        (0.8, 2.0, 3.1, "fail"),
    ],
    "float16": [(0.0025, 0.006, 0.014, "pass"), (0.022, 0.08, 0.3, "warn"), (0.8, 2.0, 3.1, "fail")],
}
"""By dtype: mean, 95% quantile and maximum of the differences, and the verdict. Measured on dense models (rounding), on
mixtures of experts or a window of half its size, and on packed sequences that attend to each other.
"""


@pytest.mark.parametrize("dtype", MEASURED)
def test_in_16_bits_a_wrong_mask_is_distinguished_from_rounding(dtype) -> None:
    for mean, above, largest, verdict in MEASURED[dtype]:
        differences = np.full(1000, mean)
        differences[:60], differences[0] = above, largest
        differences[60:] += (mean - differences.mean()) * 1000 / 940
        limits = CheckLimits().by_name(dtype)
        results = {
            result["name"]: result for result in judge(healthy(dtype=dtype, differences=differences), limits, ())
        }
        verdicts = [results[name]["verdict"] for name in ("logprob_difference", "logprob_difference_q95")]
        assert max(verdicts, key=["pass", "warn", "fail"].index) == verdict
        assert results["logprob_difference"]["value"] == pytest.approx(mean)


def test_at_80_columns_the_advice_is_whole_below_the_table(monkeypatch, caplog) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = {"shown": "0.0% (0.0% to 5.6%)", "limits": {"bad": "below", "warn": 0.1, "fail": None}, "accepted": False}
    advice = "Most prompts are never solved, so RLOO has nothing to reinforce: train on demonstrations first."
    with caplog.at_level("INFO", logger="rloo"):
        say_checks(
            [
                {"name": "round_trip", "verdict": "pass", "advice": "Never said.", **shown},
                {"name": "pass_at_k", "verdict": "warn", "advice": advice, **shown},
            ]
        )
    *table, last = caplog.messages[-1].splitlines()
    assert last == f"pass_at_k: {advice}"
    assert max(map(len, table)) <= 80
    assert "Never said" not in caplog.messages[-1]
