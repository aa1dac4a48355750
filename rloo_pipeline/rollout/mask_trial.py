"""Tries `rollout.generation_kwargs` for `rloo check`, with vLLM but without an engine.

vLLM refuses some values when it gets a request. Masks that leave no token at some place of a completion are found only
there: vLLM then gives the completion up, or samples token 0 with a log-prob of NaN. So completions are drawn here under
the masks alone, each allowed token with the same probability.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import sampler, vllm_internals
from rloo_pipeline.rollout.requests import Request, SamplingConfig

if TYPE_CHECKING:
    from jaxtyping import Bool
    from torch import Tensor
    from vllm import SamplingParams

COMPLETIONS, TOKENS = 16, 64
"""Number of completions that are drawn, and their largest length."""
BACKENDS = {"xgrammar": "XgrammarBackend", "guidance": "GuidanceBackend", "outlines": "OutlinesBackend"}
"""vLLM's classes that compile structured outputs, by their names."""


def check(policy: Policy, sampling: SamplingConfig) -> None:
    """Checks sampling parameters with `kwargs`.

    Raises:
        UserError: vLLM refuses a value, or masks leave no token.
    """
    vllm_internals.import_vllm()
    from vllm.config import StructuredOutputsConfig
    from vllm.tokenizers.hf import get_cached_tokenizer

    own: Any = policy.tokenizer
    tokenizer: Any = get_cached_tokenizer(own)
    model: Any = SimpleNamespace(max_logprobs=0, get_vocab_size=lambda: policy.vocabulary, is_diffusion=False)
    with sampler.refusals_told(of_kwargs=True):
        params = sampler.params_of(Request([], 0, sampling), policy.stop_ids, policy.placeholder_ids)
        params.update_from_tokenizer(tokenizer)
        params.verify(model, None, StructuredOutputsConfig(), tokenizer)
        structure = Structure(params, tokenizer, policy.vocabulary) if params.structured_outputs else None
        for seed in range(COMPLETIONS):
            ids = _draw(params, structure, policy.vocabulary, seed)
            if ids is not None:
                raise UserError(
                    f"rollout.generation_kwargs: no token may follow {policy.tokenizer.decode(ids)!r:.80}: masks leave "
                    "none, or none spells what comes next; correct them"
                )


class Structure:
    """The tokens that `structured_outputs` allows."""

    def __init__(self, params: SamplingParams, tokenizer: Any, vocabulary: int) -> None:
        from vllm.config import StructuredOutputsConfig
        from vllm.v1.structured_output.request import get_structured_output_key

        assert params.structured_outputs is not None
        name = str(params.structured_outputs._backend)
        vllm_config = SimpleNamespace(
            structured_outputs_config=StructuredOutputsConfig(), model_config=None, speculative_config=None
        )
        module: Any = import_module(f"vllm.v1.structured_output.backend_{name}")
        self.backend = getattr(module, BACKENDS[name])(vllm_config, tokenizer=tokenizer, vocab_size=vocabulary)
        self.key, self.ends = get_structured_output_key(params.structured_outputs), params.all_stop_token_ids
        self.bits = self.backend.allocate_token_bitmask(1)

    def begin(self) -> None:
        """Begins a completion.

        Raises:
            ValueError: the form cannot be compiled.
        """
        try:
            self.grammar = self.backend.compile_grammar(*self.key, stop_token_ids=self.ends)
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    def allowed(self) -> Bool[Tensor, " vocabulary"]:
        """True for the tokens that may come next."""
        import torch

        self.grammar.fill_bitmask(self.bits, 0)  # 32 tokens in each integer
        allowed: Tensor = ((self.bits[0, :, None] >> torch.arange(32)) & 1).flatten().bool()
        return allowed[: self.backend.vocab_size]

    def take(self, token: int) -> bool:
        """Takes the next token; False if the completion cannot have it."""
        return bool(self.grammar.accept_tokens("", [token]))


def _draw(params: SamplingParams, structure: Structure | None, vocabulary: int, seed: int) -> list[int] | None:
    """Draws a completion; returns the tokens that no other may follow, or None if there are no such tokens."""
    import torch

    draw, ids, ends = torch.Generator().manual_seed(seed), list[int](), [*params.all_stop_token_ids]
    if structure is not None:
        structure.begin()
    for _ in range(min(params.max_tokens or TOKENS, TOKENS)):
        allowed = torch.ones(vocabulary, dtype=torch.bool) if structure is None else structure.allowed()
        if params.allowed_token_ids:
            allowed &= torch.zeros_like(allowed).index_fill(0, torch.tensor(params.allowed_token_ids), value=True)
        allowed[[*_bad(params, ids), *(params.logit_bias or ())]] = False
        if len(ids) < params.min_tokens:
            longer = allowed.index_fill(0, torch.tensor(ends), value=False)
            if structure is None or longer.any():  # vLLM lets a form end that cannot go on
                allowed = longer
        tokens = allowed.nonzero().flatten()
        if not len(tokens):
            return ids
        ids.append(int(tokens[torch.randint(len(tokens), (1,), generator=draw)]))
        if structure is not None and not structure.take(ids[-1]):
            return ids[:-1]
        if ids[-1] in ends:
            return None
    return None


def _bad(params: SamplingParams, ids: list[int]) -> Iterator[int]:
    """The tokens that would end one of `bad_words`."""
    for word in params.bad_words_token_ids or ():
        if ids[len(ids) - len(word) + 1 :] == word[:-1]:
            yield word[-1]
