"""Completions are what vLLM itself gives: tokens, log-probs, and the text to the last character."""

import pytest

from rloo_pipeline.demo.text_model import text_qwen3
from rloo_pipeline.generation.sampler import Decoding, Engine, Request, Sampler

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 32, "layers": 1, "heads": 2, "key_value_heads": 1, "head_dim": 32, "intermediate_size": 64}


@pytest.fixture(scope="module")
def sampler(tmp_path_factory) -> Sampler:
    """Of random weights, so that completions are pieces of words and of characters of several bytes."""
    folder = tmp_path_factory.mktemp("model")
    corpus = folder / "corpus.jsonl"
    corpus.write_text('{"text": "naïve café, 日本語 and 😀 — and so on"}\n' * 20)
    text_qwen3(folder / "model", 0, corpus=str(corpus), columns=["text"], vocab_size=300, context=128, **SIZES)
    return Sampler(folder / "model", Engine("float32", False, 0.5, 1, 1), 128, 0)


def test_a_completion_is_what_vllm_says(sampler) -> None:
    from vllm import SamplingParams, TokensPrompt

    requests = [Request([5 + number % 250 for number in range(seed % 7 + 1)], seed) for seed in range(96)]
    made = sampler.sample(requests, Decoding(1.0, 1.0, 0, None, 24), "completions")
    # with a stop token that comes now and then, since it has no text
    sampler.stop_ids = [*sampler.stop_ids, *range(40, 50)]
    made += sampler.sample(requests, Decoding(1.0, 1.0, 0, None, 24), "completions")
    plain = [
        SamplingParams(max_tokens=24, seed=request.seed, logprobs=0, stop_token_ids=stop)
        for stop in ([2], sampler.stop_ids)
        for request in requests
    ]
    prompts = [TokensPrompt(prompt_token_ids=request.prompt_ids) for request in requests * 2]
    outputs = [output.outputs[0] for output in sampler.llm.generate(prompts, plain, use_tqdm=False)]
    assert [one.ids for one in made] == [list(output.token_ids) for output in outputs]
    assert [one.text for one in made] == [output.text for output in outputs]
    assert [one.logps for one in made] == [
        [place[token].logprob for token, place in zip(output.token_ids, output.logprobs, strict=True)]
        for output in outputs
    ]
    assert {one.finish_reason for one in made} == {"stop", "length"}
    assert any("\ufffd" in one.text for one in made), "else the prompts are no test of broken characters"
