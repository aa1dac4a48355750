"""What is asked of vLLM, and what comes of it, in the order in which it was asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm import SamplingParams


class Request(NamedTuple):
    """One completion to sample."""

    prompt_ids: list[int]
    seed: int


class Completion(NamedTuple):
    """One sampled completion."""

    ids: list[int]
    """Its tokens, the end token included where it stopped by itself."""
    text: str
    logps: list[float]
    """Log-prob of each token under the distribution it was sampled from."""
    finish_reason: str
    """`stop`, `length` or `abort`."""


class SamplingConfig(NamedTuple):
    """How to sample; 0 as temperature is greedy."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float | None
    max_completion_length: int


def params_of(request: Request, decoding: SamplingConfig, stop_ids: list[int]) -> SamplingParams:
    """What vLLM is told of one request."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=decoding.temperature,
        top_p=decoding.top_p,
        top_k=decoding.top_k,
        min_p=decoding.min_p or 0.0,
        max_tokens=decoding.max_completion_length,
        seed=request.seed,
        logprobs=0,
        # Together they spare an object a token, and the text of each token by itself, which nobody reads.
        flat_logprobs=True,
        detokenize=False,
        stop_token_ids=stop_ids,
    )


def completion_of(tokenizer: Any, params: SamplingParams, output: Any) -> Completion:
    """vLLM's output as ours; with logprobs=0 each place holds exactly the sampled token. The seed among the parameters
    does not matter any more.
    """
    (made,) = output.outputs
    ids = list(made.token_ids)
    assert made.logprobs.token_ids == ids
    text = _text(tokenizer, params, output.prompt_token_ids, made)
    return Completion(ids, text, made.logprobs.logprobs, made.finish_reason or "abort")


def _text(tokenizer: Any, params: SamplingParams, prompt_ids: list[int], made: Any) -> str:
    """What vLLM's own detokenizer says, letter by letter the same as had it come along with the tokens."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    request: Any = SimpleNamespace(
        request_id="", prompt_token_ids=prompt_ids, prompt_embeds=None, sampling_params=params
    )
    detokenizer: Any = IncrementalDetokenizer.from_new_request(tokenizer, request)
    detokenizer.update(list(made.token_ids), made.finish_reason == "stop")
    return str(detokenizer.output_text)
