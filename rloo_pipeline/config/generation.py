"""The section `rollout.generation_kwargs`: vLLM's other sampling parameters, and their effect on the update.

The end of a completion does not change the distribution of its tokens, so `stop`, `stop_token_ids` and
`repetition_detection` work with every algorithm. The other keys mask tokens: from a set S of allowed tokens, which
depends on the context, the sampler draws q = π / π(S). The trainer knows π, and the sampler's log-probs are those of q
(`processed_logprobs`). With the weights π / q = π(S) of `algorithm.mismatch`, the update has the gradient of samples
from π in which those that leave S have advantage 0; without the weights it has neither that gradient nor that of
E_q[R]. So a mask needs such weights. Since log q ≥ log π, the proof that the right policy sampled counts only the
amount by which the trainer's log-probs exceed the sampler's (`training.sampler_proof`). Penalties and biases have no
such bound and are refused.
"""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, model_validator

from rloo_pipeline.config.section import JSON, OR_ONE, Section

STRUCTURES = ("json", "regex", "choice", "grammar")
"""Keys of vLLM's `StructuredOutputsParams`; a configuration has one of them."""
_RESHAPES = (
    "changes the probabilities of tokens by the text so far, which the trainer cannot compute, so an update could "
    "neither weight the samples nor prove that they are from its policy; leave it out"
)
STOPS = ("stop", "stop_token_ids", "repetition_detection")
"""Keys that end a completion; all others mask tokens."""
REFUSED = {
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), _RESHAPES),
    "logit_bias": "changes the probabilities of tokens, so that an update could not prove that the samples are of its "
    "policy; use bad_words or allowed_token_ids, or leave it out",
    "ignore_eos": "leaves completions without an end; leave it out, or set min_tokens",
    "max_tokens": "is set by the pipeline; set rollout.max_completion_length",
    "n": "is set by the pipeline; set rollout.num_generations",
    "seed": "is set by the pipeline; set `seed`",
    **{key: f"is set by the pipeline; set rollout.{key}" for key in ("temperature", "top_p", "top_k", "min_p")},
}
"""vLLM's parameters that users ask for, and why they cannot be set here. All others are unknown keys."""


class RepetitionDetection(Section):
    """Ends a completion whose last tokens repeat a pattern. It counts as truncated."""

    max_pattern_size: int = Field(ge=1)
    """Length of the longest pattern, in tokens."""
    min_pattern_size: int = Field(1, ge=1)
    """Length of the shortest pattern, in tokens."""
    min_count: int = Field(ge=2)
    """Number of consecutive repetitions of the pattern that end the completion."""

    def _problems(self) -> Iterator[str]:
        if self.min_pattern_size > self.max_pattern_size:
            yield f"min_pattern_size ({self.min_pattern_size}) exceeds max_pattern_size ({self.max_pattern_size})"


class GenerationKwargs(Section):
    """Other parameters of vLLM's `SamplingParams`, for rollouts and evaluations without tools. All but `stop`,
    `stop_token_ids` and `repetition_detection` mask tokens and need importance weights. See docs/algorithms.md.
    """

    stop: Annotated[list[str], OR_ONE] = []
    """Strings that end a completion. Rewards see them."""
    stop_token_ids: list[int] = Field([], max_length=64)
    """Further tokens that end a completion, at most 64. Rewards do not see them."""
    repetition_detection: RepetitionDetection | None = None
    """Ends completions that repeat themselves, so that they do not hold up a round."""
    min_tokens: int = Field(0, ge=0)
    """Minimum number of tokens before a token or string can end a completion."""
    bad_words: list[str] = Field([], max_length=64)
    """Words that are never sampled, at most 64: vLLM accepts 128, and counts each word with and without a leading
    space.
    """
    allowed_token_ids: list[int] = Field([], max_length=1024)
    """The only tokens that can be sampled, at most 1,024 (vLLM's limit on GPUs); include the EOS tokens."""
    structured_outputs: JSON = {}
    """Format of the completions: one of `json` (a schema), `regex`, `choice` (a list) and `grammar` (EBNF)."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, values: Any) -> Any:
        for key in values if isinstance(values, dict) else ():
            if key in REFUSED:
                raise ValueError(f"{key} {REFUSED[key]}")
        return values

    def _problems(self) -> Iterator[str]:
        for key in ("stop", "bad_words"):
            if "" in getattr(self, key):
                yield f"{key}: an empty string is in every text; leave it out"
        forms = self.structured_outputs.keys()
        if forms and (len(forms) > 1 or not forms <= set(STRUCTURES)):
            yield (f"structured_outputs has {', '.join(map(str, forms))}; give it one of {', '.join(STRUCTURES)}")

    def __bool__(self) -> bool:
        """True if a key is set; an empty section excludes no other keys."""
        return bool(self.for_vllm)

    @property
    def for_vllm(self) -> JSON:
        """The keys that are set, under vLLM's names."""
        return self.model_dump(exclude_defaults=True)

    @property
    def masked_by(self) -> str | None:
        """The key that masks tokens, if any."""
        return next((key for key in self.for_vllm if key not in STOPS), None)
