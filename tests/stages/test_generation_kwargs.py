"""vLLM's log-probs are those of the distribution that it drew from: the whole one where `rollout.generation_kwargs`
ends completions, and the whole one over the probability of the allowed tokens where it masks others.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config.generation import GenerationKwargs
from rloo_pipeline.demo.character_model import END, START, tiny_qwen3
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout.engine_arguments import EngineSettings
from rloo_pipeline.rollout.requests import Completion, Request, SamplingConfig
from rloo_pipeline.rollout.sampler import Sampler

pytestmark = [pytest.mark.slow, pytest.mark.holds_vllm]

PROMPT, LONGEST = [5, 9, 12], 16
CHOICES = ["12+3", "17", "4-"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Policy:
    folder = tmp_path_factory.mktemp("model")
    tiny_qwen3(folder, 3, hidden_size=32, layers=1, heads=2, key_value_heads=1, head_dim=32, intermediate_size=32)
    return Policy(folder)


@pytest.fixture(scope="module")
def sample(policy) -> Callable[..., list[Completion]]:
    """Samples completions of one prompt with the keys of `rollout.generation_kwargs`."""
    sampler = Sampler(policy, EngineSettings("float32", 0.5, 1, 1), 64, 0)

    def sampled(**keys: Any) -> list[Completion]:
        how = SamplingConfig(1.0, 1.0, 0, None, LONGEST, GenerationKwargs.model_validate(keys).for_vllm)
        return sampler.sample([Request(PROMPT, seed, how) for seed in range(32)], "completions")

    return sampled


def test_a_stop_cuts_a_completion_and_changes_nothing_before(policy, sample) -> None:
    whole, stopped = sample(), sample(stop=["5", START])
    ends = {int(policy.tokenizer.convert_tokens_to_ids(text)) for text in ("5", START)}
    cut = 0
    for before, after in zip(whole, stopped, strict=True):
        place = next((place for place, token in enumerate(before.ids) if token in ends), None)
        count = len(before.ids) if place is None else place + 1
        assert after.ids == before.ids[:count]
        assert [*after.logps] == pytest.approx([*before.logps[:count]], abs=1e-5)
        if place is not None:
            cut += 1
            assert after.finish_reason == "stop"
            assert after.text.endswith(("5", START)), "a reward sees what ended the completion"
    assert 0 < cut < len(whole)
    end = int(policy.tokenizer.convert_tokens_to_ids("5"))
    by_token = [completion for completion in sample(stop_token_ids=[end]) if completion.ids[-1] == end]
    assert by_token
    assert all(one.finish_reason == "stop" and "5" not in one.text for one in by_token), "an end token has no text"


def test_a_completion_that_repeats_itself_ends_there_and_counts_as_truncated(sample) -> None:
    whole = sample(allowed_token_ids=[8, 9])
    ended = sample(allowed_token_ids=[8, 9], repetition_detection={"max_pattern_size": 2, "min_count": 3})
    for before, after in zip(whole, ended, strict=True):
        ids = before.ids
        repeats = (
            count
            for count in range(1, len(ids) + 1)
            for size in (1, 2)
            if count >= 3 * size and ids[count - 3 * size : count] == ids[count - size : count] * 3
        )
        count = next(repeats, None)
        assert after.ids == ids[:count]
        assert [*after.logps] == pytest.approx([*before.logps[:count]], abs=1e-5)
        assert after.finish_reason == ("length" if count is None or count == LONGEST else "repetition")
    assert sum(one.finish_reason == "repetition" for one in ended) > len(ended) / 2


def allowed(policy: Policy, keys: dict[str, Any], ids: list[int]) -> list[set[int]]:
    """The allowed tokens at each place of a completion."""
    every = set(range(policy.vocabulary))
    end = policy.tokenizer.convert_tokens_to_ids(END)
    if "min_tokens" in keys:
        return [every - {*policy.stop_ids} if place < keys["min_tokens"] else every for place in range(len(ids))]
    if "bad_words" in keys:
        return [every - {*policy.tokenizer.convert_tokens_to_ids(keys["bad_words"])}] * len(ids)
    if "allowed_token_ids" in keys:
        return [set(keys["allowed_token_ids"])] * len(ids)
    places = []
    for place in range(len(ids)):
        text = policy.tokenizer.decode(ids[:place])
        following = {choice[len(text)] for choice in CHOICES if choice.startswith(text) and choice != text}
        places.append({*policy.tokenizer.convert_tokens_to_ids([*following])} | ({end} if text in CHOICES else set()))
    return places


MASKS: list[dict[str, Any]] = [
    {"min_tokens": 6},
    {"bad_words": ["5", "+"]},
    {"allowed_token_ids": [2, 8, 9, 10, 15]},
    {"structured_outputs": {"choice": CHOICES}},
]


def test_a_mask_divides_the_whole_distribution_by_what_is_allowed(policy, sample) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy.folder, dtype=torch.float32)
    for keys, completion in [(mask, one) for mask in MASKS for one in sample(**mask)]:
        raised = 0.0
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *completion.ids]])).logits[0, len(PROMPT) - 1 : -1]
        logps = logits.double().log_softmax(-1)
        for place, tokens in enumerate(allowed(policy, keys, [*completion.ids])):
            token = completion.ids[place]
            assert token in tokens
            inside = float(logps[place, sorted(tokens)].logsumexp(-1))
            assert completion.logps[place] == pytest.approx(float(logps[place, token]) - inside, abs=2e-4)
            raised -= inside
        assert raised > 0.01, "else the mask would be no test"
        assert "structured_outputs" not in keys or completion.text in CHOICES


def test_what_vllm_cannot_read_gives_a_one_line_error(sample) -> None:
    with pytest.raises(UserError, match=r"^rollout.generation_kwargs: vLLM refuses a value \(.*\); correct it$"):
        sample(structured_outputs={"regex": "("})


def test_a_completion_that_no_token_may_continue_gives_a_one_line_error(sample) -> None:
    """The model has no token that spells x. What vLLM still samples after the error keeps this test the last one."""
    with pytest.raises(
        UserError, match=r"^rollout.generation_kwargs: vLLM ended .* masks that leave no token; correct"
    ):
        sample(structured_outputs={"choice": ["x"]})
