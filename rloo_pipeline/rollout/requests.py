"""Requests to vLLM and the completions it returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rloo_pipeline.artifacts import policy, tables
from rloo_pipeline.errors import UserError

if TYPE_CHECKING:
    from vllm import SamplingParams, TokensPrompt


class Request(NamedTuple):
    """One completion to sample."""

    prompt_ids: list[int]
    seed: int
    sampling: SamplingConfig
    shown: ShownImages | None = None
    """Images of the prompt."""
    begun: Begun | None = None
    """Tokens of the completion that earlier rounds have sampled."""
    expected: float | None = None
    """Tokens that the completion is likely to have; None if nothing is known."""

    @property
    def for_vllm(self) -> TokensPrompt:
        """The prompt as vLLM takes it, with placeholders that it expands itself."""
        from vllm import TokensPrompt

        if self.shown is None:
            return TokensPrompt(prompt_token_ids=[*self.prompt_ids, *(self.begun.ids if self.begun else ())])
        return TokensPrompt(
            prompt_token_ids=self.shown.placeholder_ids,
            multi_modal_data={"image": self.shown.images},
            multi_modal_uuids={"image": self.shown.ids},
        )


class Begun(NamedTuple):
    """The first tokens of a completion, and their log-probs under the policies that sampled them."""

    ids: list[int]
    logps: list[float]


class ShownImages(NamedTuple):
    """The images of a prompt."""

    images: list[Any]
    """PIL images."""
    ids: list[str]
    """Digests, by which vLLM recognizes them."""
    placeholder_ids: list[int]
    """Token ids of the prompt with one placeholder for each image."""


class Completion(NamedTuple):
    """One sampled completion."""

    ids: list[int]
    """Token ids, including the end token where it stopped by itself."""
    text: str
    logps: list[float]
    """Log-prob of each token under the distribution that it was sampled from."""
    finish_reason: str
    """`stop` or `length`."""
    experts: list[int] | None = None
    """Experts, layer by layer, of every token of prompt and completion but the last; None unless requested."""

    def columns(self) -> dict[str, Any]:
        """The completion's columns in the rollouts table, except the keys and the prompt."""
        return {
            "completion_ids": self.ids,
            "completion": self.text,
            "sampling_logps": self.logps,
            "finish_reason": self.finish_reason,
            tables.EXPERTS: self.experts,
        }


class Turns(Protocol):
    """Requests that follow from each other: what the sampler plays until nothing is left."""

    total: int
    """Number of completions in the end."""

    def requests(self, wait: bool) -> Iterable[tuple[int, Request]]:
        """Requests that can be sampled now, each with its index; with `wait` at least one, if there will be any."""

    def take(self, index: int, completion: Completion) -> bool:
        """Takes what was sampled for a index; returns whether its completion is whole."""


class SingleTurns:
    """Completions of one turn each: all requests can be sampled at once."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.total = len(requests)
        self.waiting = list(enumerate(requests))
        self.done: dict[int, Completion] = {}

    def requests(self, wait: bool) -> Iterable[tuple[int, Request]]:  # noqa: ARG002
        """All requests, at the first call."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def take(self, index: int, completion: Completion) -> bool:
        """Keeps the completion."""
        self.done[index] = completion
        return True


class SamplingConfig(NamedTuple):
    """Sampling parameters, as in vLLM; temperature 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float | None
    max_completion_length: int
    kwargs: Mapping[str, Any] | None = None
    """Further parameters of vLLM, from `rollout.generation_kwargs`; None for none."""


NEVER = -100.0
"""Logit bias of a token that is never sampled: vLLM's smallest, and in float32 a probability of 0."""


def params_of(request: Request, stop_ids: list[int], never: Sequence[int] = ()) -> SamplingParams:
    """vLLM's parameters for one request; the tokens `never` are not sampled."""
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    sampling = request.sampling
    further = dict(sampling.kwargs or {})
    ends = [*stop_ids, *further.pop("stop_token_ids", ())]
    structure, repetition = further.pop("structured_outputs", None), further.pop("repetition_detection", None)
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p or 0.0,
        max_tokens=sampling.max_completion_length,
        seed=request.seed,
        logprobs=0,
        # These two avoid one object per token, and the text of each single token, which only stop strings need.
        flat_logprobs=True,
        detokenize="stop" in further,
        skip_special_tokens=False,  # a stop string may be one
        stop_token_ids=ends,
        logit_bias=dict.fromkeys(never, NEVER) or None,
        structured_outputs=StructuredOutputsParams(**structure) if structure else None,
        repetition_detection=RepetitionDetectionParams(**repetition) if repetition else None,
        **further,
    )


def completion_of(tokenizer: Any, request: Request, params: SamplingParams, output: Any) -> Completion:
    """Converts vLLM's output; with logprobs=0, each position holds exactly the sampled token.

    Args:
        tokenizer: vLLM's.
        request: the request.
        params: parameters of the request; its seed is not read.
        output: a finished RequestOutput with one completion.

    Raises:
        UserError: vLLM has made another prompt of the images than the model's processor.
        RuntimeError: vLLM has given the completion up, such as one whose grammar it could not compile.
    """
    if request.shown is not None and output.prompt_token_ids != request.prompt_ids:
        raise UserError(
            f"vLLM makes {len(output.prompt_token_ids)} tokens of a prompt with images and the model's processor "
            f"{len(request.prompt_ids)}: look at preprocessor_config.json of the model, which both read, and at "
            "newlines beside images"
        )
    (sampled,) = output.outputs
    if sampled.finish_reason not in ("stop", "length", "repetition"):
        raise RuntimeError(f"vLLM ended a completion with '{sampled.finish_reason}'; its log has the cause")
    new_ids = list(sampled.token_ids)
    assert sampled.logprobs.token_ids == new_ids
    begun = request.begun or Begun([], [])
    ids = [*begun.ids, *new_ids]
    text = _text(tokenizer, params, request.prompt_ids, ids)
    experts = _experts_of(sampled.routed_experts, len(output.prompt_token_ids) + len(new_ids) - 1)
    return Completion(ids, text, [*begun.logps, *sampled.logprobs.logprobs], sampled.finish_reason, experts)


def _experts_of(chosen: Any, tokens: int) -> list[int] | None:
    """vLLM's experts, [tokens, layers, choices], as a flat list; None if it returned none."""
    if chosen is None:
        return None
    if len(chosen) < tokens:
        raise UserError(
            f"vLLM returns the experts of {len(chosen)} of {tokens} tokens; set rollout.router_replay: false"
        )
    return list(chosen[:tokens].flatten().tolist())


def _text(tokenizer: Any, params: SamplingParams, prompt_ids: list[int], ids: list[int]) -> str:
    """The text of `policy.shown_ids`; without special tokens, identical to vLLM's own text (detokenize=True)."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    shown = policy.shown_ids(tokenizer, params.stop_token_ids or (), ids)
    params.skip_special_tokens = policy.special_ids(tokenizer).isdisjoint(shown)
    if (text := _byte_text(tokenizer, prompt_ids, shown, params.skip_special_tokens)) is not None:
        return text
    params.stop = []  # else the text would end before the stop string
    request: Any = SimpleNamespace(
        request_id="", prompt_token_ids=prompt_ids, prompt_embeds=None, sampling_params=params
    )
    detokenizer: Any = IncrementalDetokenizer.from_new_request(tokenizer, request)
    detokenizer.update(shown, stop_terminated=False)
    return str(detokenizer.output_text)


BROKEN = "\ufffd"
"""Replaces bytes that are not a whole character."""


def _byte_text(tokenizer: Any, prompt_ids: list[int], ids: list[int], skip_special: bool) -> str | None:
    """The text that vLLM's detokenizer would make token by token, from one call of a tokenizer whose tokens are bytes.

    Like vLLM, it leaves out the last tokens if the text ends within a character. None for other tokenizers, and after
    a prompt that ends within a character.
    """
    from tokenizers.decoders import ByteLevel

    backend: Any = getattr(tokenizer, "_tokenizer", None)
    if not isinstance(getattr(backend, "decoder", None), ByteLevel):
        return None
    if backend.decode(prompt_ids, skip_special_tokens=skip_special).endswith(BROKEN):
        return None
    text, count = BROKEN, len(ids) + 1
    while text.endswith(BROKEN):
        count -= 1
        text = str(backend.decode(ids[:count], skip_special_tokens=skip_special))
    return text
