"""An engine's answers to the fixed prompts are compared with transformers."""

import pytest

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import IncompatibleEngine
from rloo_pipeline.rollout import swap_check

PROMPTS = swap_check.fixed_prompts(24, 128, 256)


@pytest.fixture(scope="module")
def right(tiny_model) -> swap_check.EngineReply:
    """The answer of an engine that computes with these weights."""
    rows = swap_check.transformers_logps(Policy(tiny_model), "float32", PROMPTS).tolist()
    return swap_check.EngineReply([dict(enumerate(row)) for row in rows], 0, prompts=PROMPTS)


def test_the_prompts_differ_and_the_last_is_longer_than_a_block_of_the_cache() -> None:
    assert [len(prompt) for prompt in PROMPTS] == [16, 16, 136]
    assert len({tuple(prompt[:16]) for prompt in PROMPTS}) == 3
    assert all(0 <= token < 24 for prompt in PROMPTS for token in prompt)
    assert max(map(len, swap_check.fixed_prompts(24, 128, 64))) == 63, "with a place for what comes after it"


def test_the_log_probs_of_transformers_pass(tiny_model, right) -> None:
    swap_check.check_weights(right, Policy(tiny_model), "float32")


def test_a_difference_of_a_thousandth_of_a_nat_is_refused_with_a_message(tiny_model, right, caplog) -> None:
    off = right._replace(logps=[{token: logp + 1e-3 for token, logp in row.items()} for row in right.logps])
    with caplog.at_level("INFO"), pytest.raises(IncompatibleEngine, match="not all those of tiny"):
        swap_check.check_weights(off, Policy(tiny_model), "float32")
    assert "Qwen3ForCausalLM 0.001 nats a token from the policy" in caplog.text
    swap_check.check_weights(off, Policy(tiny_model), "bfloat16")


def test_not_a_number_is_refused(tiny_model, right) -> None:
    with pytest.raises(IncompatibleEngine):
        swap_check.check_weights(right._replace(logps=[{0: float("nan")}] * 3), Policy(tiny_model), "float32")


def test_without_transformers_the_swap_is_refused(tmp_path, right) -> None:
    with pytest.raises(IncompatibleEngine, match="could not check"):
        swap_check.check_weights(right, Policy(tmp_path), "float32")
