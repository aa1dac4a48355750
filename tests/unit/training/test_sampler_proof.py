"""Samples of another policy are told from rounding by the log-probs of their tokens."""

import json
import math
from pathlib import Path

import pytest
import torch

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import UserError
from rloo_pipeline.training import sampler_proof
from rloo_pipeline.training.sampler_proof import Bound, SamplerDifference

ALLOWED = Bound(1e-4, "why")


def require(found: SamplerDifference, folder: Path, allowed: Bound = ALLOWED) -> None:
    sampler_proof.require(found, allowed, Policy(folder), "the rollouts of round 2", "delete them")


def bound(folder: Path, dtype: str = "float32", temperature: float = 1.0, **checks: object) -> float:
    (folder / "checks.json").write_text(json.dumps(checks))
    return sampler_proof.bound(Policy(folder), dtype, temperature, folder / "checks.json").nats


def test_the_difference_and_its_error_by_hand() -> None:
    """Σ|d| / Σ tokens = 3 / 6; residuals 1 − 0.5·4 = −1 and 2 − 0.5·2 = 1, so the error is √(2·2/1) / 6."""
    found = sampler_proof.difference(torch.tensor([1.0, 2.0]), torch.tensor([4, 2]))
    assert found == pytest.approx((0.5, math.sqrt(4) / 6, 6))
    found = sampler_proof.of_lists([[-1.0, -2.0], [-3.0]], [[-1.5, -1.0], [-3.0]], truncated=False)
    assert found.mean == pytest.approx(1.5 / 3)
    found = sampler_proof.of_lists([[-1.0, -2.0], [-3.0]], [[-1.5, -1.0], [-3.0]], truncated=True)
    assert found.mean == pytest.approx(0.5 / 3), "truncation makes the sampler's log-probs higher, never lower"


def test_the_bound_is_what_the_format_explains_or_three_times_what_the_checks_measured(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert bound(tmp_path, sampler_difference=2e-7) == 1e-4
    assert bound(tmp_path, "bfloat16", sampler_difference=None) == 0.04
    assert bound(tmp_path, "bfloat16", temperature=0.5) == 0.08
    assert bound(tmp_path, "bfloat16", temperature=0.0) == 0.04
    assert bound(tmp_path, "float16", sampler_difference=0.03) == pytest.approx(0.09)
    (tmp_path / "config.json").write_text('{"num_experts": 4}')
    assert bound(tmp_path, "bfloat16") == 0.16
    assert bound(tmp_path, "bfloat16", sampler_difference=0.015) == pytest.approx(0.045)


def test_what_was_measured_in_fp8_explains_no_difference_of_an_evaluation(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    checks = {"sampler_difference": 0.2, "sampler_format": "fp8"}
    assert bound(tmp_path, "fp8", **checks) == pytest.approx(0.6)
    assert bound(tmp_path, "fp8", sampler_difference=0.02, sampler_format="fp8") == 0.35
    assert bound(tmp_path, "bfloat16", **checks) == 0.04


def test_who_accepts_the_check_of_policy_0_accepts_the_difference_of_later_ones(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert bound(tmp_path, accept=["mixed", "logprob_difference"]) == math.inf
    assert bound(tmp_path, accept=["mixed"]) == 1e-4


def test_rounding_passes_and_so_do_few_tokens_that_went_to_other_experts(tmp_path) -> None:
    require(SamplerDifference(1.8e-7, 1e-9, 1000), tmp_path)
    sums, tokens = torch.full((64,), 1e-6), torch.full((64,), 20)
    sums[3] = sums[40] = 0.7
    found = sampler_proof.difference(sums, tokens)
    assert found.mean > ALLOWED.nats
    require(found, tmp_path)
    require(SamplerDifference(0.5, math.inf, 3), tmp_path)
    require(SamplerDifference(math.nan, math.nan, 3), tmp_path)  # the gradient says that


@pytest.mark.parametrize(
    ("name", "adapter", "cause"),
    [
        ("00001", True, "vLLM does not apply all modules of the adapter"),
        ("00001", False, "an engine that stayed alive kept the weights of an older policy"),
        ("00000", False, "the folder's model has changed"),
    ],
)
def test_the_sentence_names_difference_bound_and_likely_cause(tmp_path, name, adapter, cause) -> None:
    folder = tmp_path / name
    folder.mkdir()
    if adapter:
        (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError) as error:
        require(SamplerDifference(0.085, 0.003, 1163), folder)
    for part in (
        "rollouts of round 2 were not sampled from",
        name,
        "0.085 nats",
        "1163 tokens",
        "0.0001",
        cause,
        "delete them",
    ):
        assert part in str(error.value)


def test_a_difference_within_its_errors_of_the_bound_raises_no_alarm(tmp_path) -> None:
    (tmp_path / "00000").mkdir()
    require(SamplerDifference(0.045, 0.002, 100), tmp_path / "00000", Bound(0.04, ""))
    with pytest.raises(UserError):
        require(SamplerDifference(0.049, 0.002, 100), tmp_path / "00000", Bound(0.04, ""))
