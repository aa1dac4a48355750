"""Checks an engine after a weight swap, by comparing its log-probs of a few fixed prompts with those of transformers.

vLLM's layers may keep copies of their weights in other layouts, and a reload must renew all of them. If one copy is
stale, the engine samples from a mixture of two policies, and nothing else would show it. transformers reads the
policy's files independently. The longest prompt fills more than one block of the KV cache and is also sent before the
swap, so that a cache that was not emptied shows too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import FP8, Dtype
from rloo_pipeline.errors import IncompatibleEngine, UserError
from rloo_pipeline.rollout import vllm_internals
from rloo_pipeline.runtime.progress import say

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from vllm import LLM
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest

LIMITS: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 0.2, "float16": 0.05, FP8: 0.7}
"""Largest mean difference in nats between engine and transformers, by number format: far above rounding, far below the
difference between two models.
"""
ALWAYS_CHECKED_BYTES = 2**30
"""Bytes of weights up to which every swap is checked. For larger models, only the first swap of an engine is checked,
since transformers takes seconds to load them.
"""
SHORT_PROMPT = 16
"""Tokens of the short prompts."""
TOKENS_AFTER_BLOCK = 8
"""Tokens by which the long prompt exceeds one block of the KV cache."""
TOP_LOGPROBS = 20


Prompts = Sequence[Sequence[int]]


class Probe(NamedTuple):
    """The parts of a model that the fixed prompts depend on."""

    vocabulary: int
    """Number of tokens."""
    banned_ids: Sequence[int]
    """Ids that no text has, such as placeholders of images."""
    placeholder: int | None
    """Id of the token that stands for an image in a prompt; None if prompts have none."""


class EngineReply(NamedTuple):
    """An engine's answer to the fixed prompts."""

    logps: list[dict[int, float]]
    """Log-probs of the most likely next tokens, for each prompt."""
    cached: int
    """Number of prompt tokens that came from its prefix cache."""
    engine: VllmConfig | None = None
    """Configuration of the engine."""
    prompts: Prompts = ()
    """The prompts as read by the engine: with a placeholder for each part of an image."""


def fixed_prompts(vocabulary: int, block: int, longest: int, banned_ids: Sequence[int] = ()) -> list[list[int]]:
    """The fixed prompts: two short ones, and one longer than a block of the KV cache if the context allows it.

    Args:
        vocabulary: number of tokens.
        block: tokens per block of the KV cache.
        longest: context length of the engine in tokens.
        banned_ids: ids that no text has, such as placeholders of images; replaced by 0.
    """
    lengths = (SHORT_PROMPT, SHORT_PROMPT, block + TOKENS_AFTER_BLOCK)
    prompts = [
        [(7919 * (place + 1) * (number + 1) + 13 * number) % vocabulary for place in range(min(length, longest - 1))]
        for number, length in enumerate(lengths)
    ]
    return [[0 if token in banned_ids else token for token in prompt] for prompt in prompts]


def fixed_image() -> Image:
    """A gradient, as the image of the last prompt for engines that take images."""
    from PIL import Image

    return Image.linear_gradient("L").resize((60, 80)).convert("RGB")


def ask(llm: LLM, probe: Probe, lora: LoRARequest | None) -> EngineReply:
    """Sends the fixed prompts to an idle engine, and another one with an image if prompts can have images."""
    from vllm import SamplingParams, TokensPrompt

    config = llm.llm_engine.vllm_config
    block, longest = int(config.cache_config.block_size), config.model_config.max_model_len
    prompts = fixed_prompts(probe.vocabulary, block, longest, probe.banned_ids)
    top = min(TOP_LOGPROBS, config.model_config.get_vocab_size())
    params = SamplingParams(max_tokens=1, logprobs=top, seed=0, detokenize=False)
    inputs = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
    if probe.placeholder is not None:
        inputs.append(TokensPrompt(prompt_token_ids=[probe.placeholder], multi_modal_data={"image": fixed_image()}))
    outputs: Any = llm.generate(inputs, params, lora_request=lora, use_tqdm=False)
    most_likely = [output.outputs[0].logprobs[0] for output in outputs]
    logps = [{token: entry.logprob for token, entry in position.items()} for position in most_likely]
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    return EngineReply(logps, cached, config, [output.prompt_token_ids for output in outputs])


def transformers_logps(
    policy: Policy, dtype: Dtype, prompts: Prompts, engine: VllmConfig | None = None
) -> torch.Tensor:
    """Log-probs of all possible next tokens under the policy, as loaded by transformers.

    Args:
        policy: the policy.
        dtype: number format to compute in.
        prompts: token ids to continue.
        engine: configuration of the vLLM engine in this process, if there is one.

    Returns:
        [prompts, vocabulary], float32.
    """
    import torch

    from rloo_pipeline.training import plain_model

    with _uncompiled(engine):  # eager attention, since SDPA ignores soft caps
        model: Any = plain_model.load_plain(policy, dtype, attn_implementation="eager")
    if policy.is_adapter:
        model = plain_model.load_adapter(model, policy)
    model.eval()
    with torch.inference_mode():
        inputs = [torch.tensor([list(prompt)]) for prompt in prompts]
        logits = [model(ids, use_cache=False, **_image_of(policy, ids)).logits[0, -1] for ids in inputs]
    return torch.stack(logits).float().log_softmax(-1)


def _image_of(policy: Policy, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Arguments of the model's forward for the fixed image in a prompt; empty for a prompt without it."""
    if policy.image_kind is None or policy.image_tokens.part not in ids:
        return {}
    return policy.pixels(fixed_image()) | policy.image_tokens.marked(ids)


@contextmanager
def _uncompiled(engine: VllmConfig | None) -> Iterator[None]:
    """Turns compilation off in the block: vLLM has patched the transformers classes whose layers it runs unchanged, and
    they read the engine's configuration.
    """
    if engine is None:
        yield
        return
    from vllm.config import CompilationMode, set_current_vllm_config

    plain = copy(engine)
    plain.compilation_config = copy(engine.compilation_config)
    plain.compilation_config.mode = CompilationMode.NONE
    with set_current_vllm_config(plain):
        yield


def check_change(before: EngineReply, reply: EngineReply, policy: Policy) -> None:
    """Checks that loading `policy` has changed the engine's answers, however coarse its number format is.

    Raises:
        IncompatibleEngine: the answers have not changed, or come from the engine's cache.
    """
    if reply.cached:
        raise IncompatibleEngine("a cache of another policy's prompts")
    if reply.logps == before.logps:
        say(f"vLLM's answers did not change when it loaded {policy}, so the policy gets a new engine")
        raise IncompatibleEngine("the weights of another policy")


def check_weights(reply: EngineReply, policy: Policy, dtype: Dtype, number_format: str | None = None) -> None:
    """Checks that an engine computes with the weights of a policy.

    Args:
        reply: the engine's reply to the prompts.
        policy: the policy that the engine was given.
        dtype: number format of the policy.
        number_format: number format of the engine's weights, if it differs.

    Raises:
        IncompatibleEngine: the engine does not, or transformers cannot load the policy.
        UserError: the engine does not apply the adapter, and neither would a new engine.
    """
    try:
        expected = transformers_logps(policy, dtype, reply.prompts, reply.engine)
    except Exception as error:  # any exception: the stage then gets a new engine, which needs no check
        raise IncompatibleEngine(f"weights that transformers could not check ({error})") from error
    nats = mean_difference(reply, expected)
    if nats <= LIMITS[number_format or dtype]:
        return
    architecture = next(iter(policy.config.get("architectures") or ["this model"]))
    if policy.is_adapter:
        raise UserError(
            f"{policy}: vLLM's {architecture} with this adapter is {nats:.2g} nats a token from the policy "
            f"(PEFT's log-probs), and a new engine would load it in the same way; {vllm_internals.ADVICE}"
        )
    say(
        f"a swap of weights leaves vLLM's {architecture} {nats:.2g} nats a token from the policy (transformers' "
        "log-probs), so the policy gets a new engine"
    )
    raise IncompatibleEngine(f"weights that are not all those of {policy.folder.name}")


def mean_difference(reply: EngineReply, expected: torch.Tensor) -> float:
    """Mean absolute difference in nats between an engine's log-probs and `expected` [prompts, vocabulary]."""
    differences = [
        abs(value - float(row[token]))
        for logps, row in zip(reply.logps, expected, strict=True)
        for token, value in logps.items()
    ]
    return sum(differences) / len(differences)
