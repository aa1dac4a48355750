"""After a swap an engine proves itself: log-probs of a few fixed prompts, against those of plain transformers.

vLLM's layers may keep copies of their weights in forms and places of their own, which a reload must renew, each of
them; an engine in which one of them is old samples from no policy at all, and nothing else would say so. Transformers
read the policy's files by another way. The longest prompt has more than a block of the KV cache, and is sent before the
swap as well, so that a cache that was not emptied shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.artifacts import policy
from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.config import Dtype
from rloo_pipeline.errors import IncompatibleEngine
from rloo_pipeline.runtime import import_shims
from rloo_pipeline.runtime.progress import say

if TYPE_CHECKING:
    import torch
    from vllm import LLM
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest

LIMITS: Mapping[Dtype, float] = {"float32": 1e-4, "bfloat16": 0.2, "float16": 0.05}
"""Mean nats between engine and transformers, by number format: well beyond rounding, well below another model."""
ALWAYS = 2**30
"""Bytes of weights up to which each swap is proven; beyond them the first one in an engine's life, since transformers
take seconds there.
"""
SHORT, MORE, TOP = 16, 8, 20


Prompts = Sequence[Sequence[int]]


class Seen(NamedTuple):
    """What an engine says to the fixed prompts."""

    logps: list[dict[int, float]]
    """Of each prompt, log-probs of the likeliest next tokens."""
    cached: int
    """Tokens of prompts that it had in its cache."""
    engine: VllmConfig | None = None
    """How it is configured."""


def prompts_of(vocabulary: int, block: int, longest: int) -> list[list[int]]:
    """The fixed prompts: two short ones, and one longer than a block of the cache, where the context allows that.

    Args:
        vocabulary: tokens that there are.
        block: tokens of a block of the cache.
        longest: tokens of the engine's context.
    """
    lengths = (SHORT, SHORT, block + MORE)
    return [
        [(7919 * (place + 1) * (number + 1) + 13 * number) % vocabulary for place in range(min(length, longest - 1))]
        for number, length in enumerate(lengths)
    ]


def ask(llm: LLM, prompts: Prompts, lora: LoRARequest | None) -> Seen:
    """Sends the prompts to an engine that has nothing else to do."""
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(max_tokens=1, logprobs=TOP, seed=0, detokenize=False)
    asked = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
    found = llm.generate(asked, params, lora_request=lora, use_tqdm=False)
    logps = []
    for output in found:
        places = output.outputs[0].logprobs or []
        logps.append({token: entry.logprob for place in places if place for token, entry in place.items()})
    return Seen(logps, sum(output.num_cached_tokens or 0 for output in found), llm.llm_engine.vllm_config)


def by_transformers(
    folder: Path, dtype: Dtype, trust_remote_code: bool, prompts: Prompts, engine: VllmConfig | None = None
) -> torch.Tensor:
    """Log-probs of all next tokens, [prompts, vocabulary], by the policy as transformers load it.

    Args:
        folder: of the policy.
        dtype: to compute in.
        trust_remote_code: whether code that comes with the model is run.
        prompts: to be continued.
        engine: the configuration of the engine in this process, if there is one.
    """
    import_shims.before_transformers()
    import torch
    from transformers import AutoModelForCausalLM

    with _uncompiled(engine):
        model: Any = AutoModelForCausalLM.from_pretrained(
            policy.base_of(folder),
            dtype=getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
        )
    if policy.is_adapter(folder):
        import peft

        model = peft.PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False)
    model.eval()
    with torch.inference_mode():
        logits = [model(torch.tensor([list(prompt)]), use_cache=False).logits[0, -1] for prompt in prompts]
    return torch.stack(logits).float().log_softmax(-1)


@contextmanager
def _uncompiled(engine: VllmConfig | None) -> Iterator[None]:
    """A block in which transformers make models that nobody compiles: a class whose layers vLLM runs as they are has
    been changed by it, and asks the engine's configuration for how.
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


def is_cheap(folder: Path) -> bool:
    """Whether transformers take a moment only."""
    return sum(file.stat().st_size for file in policy.base_of(folder).glob("*.safetensors")) <= ALWAYS


def check_cache(said: Seen) -> None:
    """Makes sure that what an engine said after a swap came from no cache: the same was asked before the swap.

    Raises:
        IncompatibleEngine: it did.
    """
    if said.cached:
        raise IncompatibleEngine("a cache of another policy's prompts")


def check_weights(said: Seen, folder: Path, dtype: Dtype, trust_remote_code: bool, prompts: Prompts) -> None:
    """Makes sure that an engine computes with the weights in `folder`, and says so where it does not.

    Args:
        said: by the engine, to the prompts.
        folder: of the policy that it was given.
        dtype: of the engine.
        trust_remote_code: whether code that comes with the model is run.
        prompts: the fixed ones.

    Raises:
        IncompatibleEngine: it does not, or transformers cannot say.
    """
    try:
        expected = by_transformers(folder, dtype, trust_remote_code, prompts, said.engine)
    except Exception as why:  # of whatever kind: a fresh engine needs no proof
        raise IncompatibleEngine(f"weights that transformers could not be asked about ({why})") from why
    nats = apart(said, expected)
    if nats <= LIMITS[dtype]:
        return
    config = read_json(policy.base_of(folder) / "config.json")
    kind = next(iter(config.get("architectures") or ["this model"]))
    say(
        f"a swap of weights leaves vLLM's {kind} {nats:.2g} nats a token from the policy (transformers' log-probs), "
        "so the policy gets a new engine"
    )
    raise IncompatibleEngine(f"weights that are not all those of {folder.name}")


def apart(said: Seen, expected: torch.Tensor) -> float:
    """Mean nats between what an engine said and what was expected, [prompts, vocabulary]."""
    differences = [
        abs(value - float(row[token]))
        for logps, row in zip(said.logps, expected, strict=True)
        for token, value in logps.items()
    ]
    return sum(differences) / len(differences)
