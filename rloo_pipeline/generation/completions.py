"""What is asked of vLLM, and what comes of it, in the order in which it was asked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine


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


class Decoding(NamedTuple):
    """How to sample; 0 as temperature is greedy."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float | None
    max_completion_length: int


class UnderWay:
    """Requests that an engine has, its only ones. It has not begun with them before the first step is done."""

    def __init__(
        self,
        requests: Sequence[Request],
        decoding: Decoding,
        params: Sequence[SamplingParams],
        names: Sequence[str],
    ) -> None:
        """Args: what is asked, what vLLM is told of each, and the names by which it knows them."""
        self.requests, self.decoding, self.params, self.names = list(requests), decoding, params, list(names)
        self._places = {name.partition("-")[0]: place for place, name in enumerate(names)}
        self.done: dict[int, Completion] = {}
        """Those that are finished, by their places among the requests."""
        self._ready = 0
        """All before this place are finished."""
        self.begun = False
        self.seconds = 0.0
        """That its steps took."""

    @property
    def finished(self) -> bool:
        """Whether all of them are."""
        return len(self.done) == len(self.requests)

    def step(self, engine: LLMEngine) -> None:
        """Has the engine do a step, and notes what that has finished."""
        began, self.begun = time.monotonic(), True
        outputs = [output for output in engine.step() if output.finished]
        tokenizer = engine.get_tokenizer()
        for output in outputs:
            self.done[self._places[output.request_id]] = completion_of(tokenizer, self.params[0], output)
        self.seconds += time.monotonic() - began

    def next_from(self, first: int, least: int) -> list[Completion]:
        """The completions from this place on, up to the first that is not finished; none while they are fewer than
        `least` and others are to come.
        """
        while self._ready in self.done:
            self._ready += 1
        if self._ready - first < least and not self.finished:
            return []
        return [self.done[place] for place in range(first, self._ready)]


def params_of(request: Request, decoding: Decoding, stop_ids: list[int]) -> SamplingParams:
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
