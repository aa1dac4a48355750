"""Requests to the sampler and the completions it returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from rloo_pipeline.artifacts import tables
from rloo_pipeline.config import Rollout

if TYPE_CHECKING:
    from vllm import SamplingParams, TokensPrompt

NEVER = -100.0
"""Logit bias of a token that is never sampled: the smallest that vLLM allows, for a probability of 0 in float32."""


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
    """Likely number of tokens of the completion; None if unknown."""

    @property
    def for_vllm(self) -> TokensPrompt:
        """The prompt in vLLM's form, with placeholders that vLLM expands itself."""
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
    """Digests, which identify the images to vLLM."""
    placeholder_ids: list[int]
    """Token ids of the prompt with one placeholder for each image."""


class Completion(NamedTuple):
    """One sampled completion. The sampler's numbers are in arrays: in lists, a token would take 70 bytes."""

    ids: Sequence[int]
    """Token ids, including the end token if it stopped by itself."""
    text: str
    logps: Sequence[float]
    """Log-prob of each token under the distribution that it was sampled from."""
    finish_reason: str
    """`stop` or `length`."""
    experts: Sequence[int] | None = None
    """Experts, layer by layer, of every token of prompt and completion except the last; None unless requested."""

    def columns(self) -> dict[str, Any]:
        """The completion's columns in the rollouts table, without those of its prompt and its index."""
        return {
            "completion_ids": self.ids,
            "completion": self.text,
            "sampling_logps": self.logps,
            "finish_reason": self.finish_reason,
            tables.EXPERTS: self.experts,
        }


class RequestSource(Protocol):
    """Requests that may follow from each other; the sampler plays them until none is left."""

    total: int
    """Total number of completions."""

    def requests(self, wait: bool) -> Iterable[tuple[int, Request]]:
        """Requests that can be sampled now, each with its index; with `wait` at least one, if there will be any."""

    def take(self, index: int, completion: Completion) -> bool:
        """Takes what was sampled for an index; returns True if its completion is whole."""


class SingleTurnRequests:
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
    """Further parameters of vLLM, from `rollout.generation_kwargs`; None if there are none."""

    @classmethod
    def of_rollouts(cls, rollout: Rollout) -> Self:
        """The parameters of the rollouts."""
        further = {} if rollout.generation_kwargs is None else rollout.generation_kwargs.for_vllm
        keys = (rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p, rollout.max_completion_length)
        return cls(*keys, further)

    @classmethod
    def of_evaluations(cls, rollout: Rollout, temperature: float, max_completion_length: int) -> Self:
        """The parameters of held-out completions, which are not truncated to likely tokens."""
        return cls(temperature, 1.0, 0, None, max_completion_length, cls.of_rollouts(rollout).kwargs)


def params_of(request: Request, stop_ids: list[int], banned_ids: Sequence[int] = ()) -> SamplingParams:
    """vLLM's parameters for one request; the tokens `banned_ids` are never sampled."""
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
        # These two avoid an object per token, and the text of each token, which only stop strings need.
        flat_logprobs=True,
        detokenize="stop" in further,
        skip_special_tokens=False,  # a stop string may be one
        stop_token_ids=ends,
        logit_bias=dict.fromkeys(banned_ids, NEVER) or None,
        structured_outputs=StructuredOutputsParams(**structure) if structure else None,
        repetition_detection=RepetitionDetectionParams(**repetition) if repetition else None,
        **further,
    )
