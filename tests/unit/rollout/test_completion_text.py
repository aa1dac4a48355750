"""The text that rewards see of a completion: special tokens that a model speaks, and none that ends or fills a turn;
and the memory that a completion takes.
"""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import AddedToken
from transformers import ByT5Tokenizer

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.tables import EXPERTS, WITH_EXPERTS
from rloo_pipeline.demo.character_model import character_tokenizer
from rloo_pipeline.demo.text_model import bpe_tokenizer
from rloo_pipeline.rollout import vllm_internals
from rloo_pipeline.rollout.requests import Request, SamplingConfig, params_of
from rloo_pipeline.rollout.sampler import _byte_text, completion_of

TAGS = ("[THINK]", "[/THINK]")
SAID = "[THINK]1+1[/THINK]2"


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Policy:
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, special=True) for tag in TAGS], special_tokens=True)
    policy = Policy(tmp_path_factory.mktemp("policy"))
    vars(policy).update(tokenizer=tokenizer, stop_ids=[tokenizer.eos_token_id])
    return policy


def sampled(policy: Policy, text: str, finish_reason: str) -> str:
    tokenizer: Any = policy.tokenizer
    vllm_internals.import_vllm()
    ids = tokenizer(text)["input_ids"]
    request = Request(tokenizer("1+1=")["input_ids"], 0, SamplingConfig(1.0, 1.0, 0, None, 99))
    logprobs = SimpleNamespace(token_ids=ids, logprobs=[0.0] * len(ids))
    output = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=finish_reason, routed_experts=None)
    params = params_of(request, [tokenizer.eos_token_id])
    result = SimpleNamespace(outputs=[output], prompt_token_ids=request.prompt_ids)
    return completion_of(policy, request, params, result).text


def test_rewards_see_the_special_tokens_that_a_model_speaks_but_no_end_and_no_padding(policy) -> None:
    tokenizer = policy.tokenizer
    assert set(TAGS) <= set(tokenizer.all_special_tokens) | {
        token.content for token in tokenizer.added_tokens_decoder.values() if token.special
    }
    assert sampled(policy, SAID + tokenizer.eos_token, "stop") == SAID
    assert sampled(policy, SAID + tokenizer.pad_token + "3", "length") == SAID + "3"
    assert sampled(policy, f"12{tokenizer.eos_token}", "stop") == "12"


def test_a_completion_that_vllm_gave_up_is_an_error(policy) -> None:
    for reason in ("error", "abort", None):
        with pytest.raises(RuntimeError, match=f"ended a completion with '{reason}'"):
            sampled(policy, "12", reason)


def test_an_episode_shows_the_same_tokens(policy) -> None:
    tokenizer = policy.tokenizer
    ids = tokenizer(f"4{tokenizer.eos_token}{SAID}")["input_ids"]
    shown = [id_ for id_ in ids if id_ not in policy.hidden_ids]
    assert tokenizer.decode(shown, skip_special_tokens=False) == f"4{SAID}"


def test_the_text_of_bytes_in_one_call_is_vllms_token_by_token() -> None:
    """Random ids, so that characters are broken anywhere, beside special tokens that are shown or left out."""
    vllm_internals.import_vllm()
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    tokenizer = bpe_tokenizer(["naïve café, 日本語 and 😀 — and so on"] * 20, 300, 128)
    tokenizer.add_tokens([AddedToken(tag, special=True) for tag in TAGS], special_tokens=True)
    draw, at_once = random.Random(0), 0
    for seed in range(600):
        prompt, ids = ([draw.randrange(5, len(tokenizer)) for _ in range(draw.randint(1, 12))] for _ in range(2))
        params = params_of(Request(prompt, seed, SamplingConfig(1.0, 1.0, 0, None, 99)), [])
        params.skip_special_tokens = seed % 2 == 0
        request: Any = SimpleNamespace(
            request_id="", prompt_token_ids=prompt, prompt_embeds=None, sampling_params=params
        )
        detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
        detokenizer.update(ids, stop_terminated=False)
        text = _byte_text(tokenizer, prompt, ids, params.skip_special_tokens)
        assert text in (None, detokenizer.output_text)
        at_once += text is not None and "\ufffd" in text
    assert at_once > 100, "texts with broken characters are among them"
    assert _byte_text(character_tokenizer(), [5], [5], False) is None


def test_a_tokenizer_in_python_lists_its_special_tokens_once_and_not_for_each_token(tmp_path) -> None:
    listed = []

    class Listed(ByT5Tokenizer):
        @property
        def all_special_tokens(self) -> list[str]:
            listed.append(1)
            return super().all_special_tokens

    policy = Policy(tmp_path)
    vars(policy).update(tokenizer=Listed(extra_ids=0), stop_ids=[1])
    assert sampled(policy, "12345678" * 10, "length") == "12345678" * 10
    assert len(listed) < 20


def test_a_sampled_token_takes_8_bytes_and_not_those_of_objects(policy) -> None:
    count = 10_000
    ids, logps = [4 + number % 10 for number in range(count)], [-1 / number for number in range(1, count + 1)]
    logprobs = SimpleNamespace(token_ids=ids, logprobs=logps)
    output = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason="length")
    output.routed_experts = np.arange(2 * (count + 2)).reshape(-1, 1, 2) % 300
    request = Request([4, 5], 0, SamplingConfig(1.0, 1.0, 0, None, count))
    result = SimpleNamespace(outputs=[output], prompt_token_ids=[4, 5])
    completion = completion_of(policy, request, params_of(request, [2]), result)
    assert completion.experts is not None
    held = sum(memoryview(numbers).nbytes for numbers in (completion.ids, completion.logps, completion.experts))
    assert held == 8 * count + 2 * 2 * (count + 1)
    row = completion.columns() | {"prompt_id": "a", "sample": 0, "prompt_ids": [4, 5], "seed": 0}
    lists = row | {"completion_ids": ids, "sampling_logps": logps, EXPERTS: [*completion.experts]}
    of_arrays, of_lists = (pa.Table.from_pylist([one], schema=WITH_EXPERTS) for one in (row, lists))
    assert of_arrays.equals(of_lists)
