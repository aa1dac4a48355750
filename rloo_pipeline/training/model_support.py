"""Decides from config.json, without torch, which models cannot be trained and which adapters vLLM cannot serve.

`self_check` computes with a small copy to find what config.json does not show; it also chooses the form of batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isclose, log, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_pipeline.artifacts.model_dims import ORIGINAL, experts_key, length_limit, rotary_embeddings, text_config
from rloo_pipeline.artifacts.model_files import ADAPTER
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.installation import csv_rows

if TYPE_CHECKING:
    from rloo_pipeline.config import Config, Dtype, Lora

COUNTS, MOST = ("layers", "n_layer", "experts"), 10_000
"""Suffixes of config.json's keys that count parts of a model, and the largest count: transformers lists the parts."""
ALWAYS_TIED = {"lfm2", "lfm2_moe"}
"""Model types whose LM head is the embedding in vLLM, whatever config.json says."""
MINISTRAL_ROPE = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16384}
"""The values of transformers for a Ministral 3 whose config.json has no rotary embedding."""
LISTS = csv_rows("training/model_support.csv")
"""Names of models that config.json cannot tell from others."""
ENCODERS = frozenset(row["name"] for row in LISTS if row["list"] == "encoders")
"""Model types that attend in both directions unless config.json has `is_decoder: true`. Only their code says so;
tests/families verifies it.
"""
WITHOUT_LORA = frozenset(row["name"] for row in LISTS if row["list"] == "without_lora")
"""Architectures whose adapters vLLM cannot serve."""
RENAMED = {"Glm4ForCausalLM": {"gate_up_proj"}}
"""Modules whose names in vLLM differ from those in transformers, by architecture."""
LM_HEAD = frozenset(row["name"] for row in LISTS if row["list"] == "lm_head")
"""Architectures of which vLLM serves adapters on the LM head."""
WITHOUT_EMBEDDING = frozenset(row["name"] for row in LISTS if row["list"] == "without_embed_tokens")
"""Architectures of which vLLM serves no adapters on the embedding."""
EMBEDDING = re.compile(r"embed|^(lm_head|wte|wpe|output|output_layer)$")
"""Found in the names of embeddings and LM heads, without the names of the modules around them."""
EMBEDDING_NAMES = {"ExaoneForCausalLM": "wte"}
"""Names of embeddings that vLLM serves adapters on, by architecture; embed_tokens in the others."""
ATTENTION_MODULES = {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"}
"""Modules whose adapters vLLM serves in models with experts, by the last part of their names."""

EXAMPLE = "[q_proj, k_proj, v_proj, o_proj]"


def check_run(config: Config, policy: Policy) -> None:
    """Checks the model of a run, the length of its sequences, and the LoRA adapter that it trains.

    Raises:
        UserError: the folder has an adapter instead of a model, `check_model` or `check_heads` fails, or vLLM cannot
            serve the adapter or computes the model differently.
    """
    if not (file := policy.folder / "config.json").exists():
        raise UserError(f"{file}: no such file, so this is not a model folder; check the path")
    if policy.is_adapter:  # some trainers write it beside a config.json
        raise UserError(
            f"{policy.folder / ADAPTER}: this is an adapter on another model; merge it into that model and use the "
            "result"
        )
    check_lora(policy, config.update.lora)
    parts = config.deepspeed.sequence_parallel
    check_heads(int(policy.text_config.get("num_attention_heads") or parts), parts, policy.config_file)
    if config.model.quantization is None and comes_in_nf4(policy.config):
        raise UserError(
            f"{policy.config_file}: the weights are in 4 bits (NF4); set model.quantization: nf4 and update.lora, "
            "or use the model that they were made from"
        )
    if config.rollout.router_replay and not policy.has_experts:
        raise UserError(f"{policy.config_file}: the model has no experts; set rollout.router_replay: false")
    completion = max(config.rollout.max_completion_length, config.evaluation.max_completion_length or 0)
    longest = config.dataset.max_prompt_length + completion
    check_model(policy.config, longest, policy.config_file)
    if (difference := _difference_in_vllm(policy.config, longest)) is not None:
        raise UserError(f"{policy.config_file}: {difference}, or use another model")


def check_heads(
    heads: int,
    parts: int,
    file: Path | str = "config.json",
    shared_by: str = "processes of deepspeed.sequence_parallel",
) -> None:
    """Raises UserError if a model's query heads cannot be divided among the processes or GPUs that share them."""
    if heads % parts:
        raise UserError(
            f"{file}: {heads} attention heads cannot be divided among the {parts} {shared_by}; set it to a divisor of "
            "that number"
        )


def check_model(hf_config: Mapping[str, Any], longest: int | None = None, file: Path | str = "config.json") -> None:
    """Checks that a model can be trained.

    Args:
        hf_config: the content of config.json.
        longest: tokens of the run's longest sequence, prompt and completion; None skips that check.
        file: the file, for messages.

    Raises:
        UserError: the model cannot be trained, or `longest` exceeds its limit.
    """
    kind = hf_config.get("model_type", "a model without a model_type")
    if (reason := _unsupported(hf_config)) is not None:
        raise UserError(f"{file}: {kind} {reason}; use another model")
    kernel = str(text_config(hf_config).get("attn_implementation"))
    if "/" in kernel:
        raise UserError(f"{file}: attn_implementation is {kernel:.80}, which is code from the Hub; remove the key")
    limit = length_limit(hf_config)
    if limit is not None and longest is not None and longest > limit.tokens:
        raise UserError(
            f"{file}: {kind} has {limit.cause}, but a prompt and its completion may have {longest} tokens, and would "
            "change the others of their batch; lower dataset.max_prompt_length or the max_completion_length of rollout "
            f"and evaluation so that together they have at most {limit.tokens}, or use another model"
        )


def comes_in_nf4(hf_config: Mapping[str, Any]) -> bool:
    """True if a config.json describes a bitsandbytes checkpoint in NF4."""
    quantization = hf_config.get("quantization_config") or {}
    return bool(quantization.get("load_in_4bit")) and quantization.get("bnb_4bit_quant_type") == "nf4"


def _unsupported(hf_config: Mapping[str, Any]) -> str | None:
    """The reason a model is never trained, phrased to follow "FILE: TYPE …"; None if there is none."""
    text = text_config(hf_config)
    for kind in (hf_config.get("model_type"), text.get("model_type")):
        if kind in ENCODERS and not text.get("is_decoder"):
            return "is an encoder, which attends to later tokens too (is_decoder is not true)"
    if any(part.get("quantization_config") and not comes_in_nf4(part) for part in (hf_config, text)):
        return "has quantized weights (quantization_config) other than bitsandbytes NF4, which cannot be trained"
    for key, value in text.items():
        if key.endswith(COUNTS) and isinstance(value, int) and value > MOST:
            return f"has {key} {value!s:.20}, more than {MOST:,}"
    if text.get("is_causal") is False or text.get("use_bidirectional_attention") in {True, "all"}:
        return "does not attend causally"
    return None


def _difference_in_vllm(hf_config: Mapping[str, Any], longest: int) -> str | None:
    """A part of the model that vLLM computes differently from transformers, and advice; None if nothing is known.

    Args:
        hf_config: the content of config.json.
        longest: tokens of the longest prompt with its completion.
    """
    text = text_config(hf_config)
    kind = text.get("model_type")
    tied = "tie_embedding" if "tie_embedding" in text else "tie_word_embeddings"
    if kind in ALWAYS_TIED and not text.get(tied, True):
        return (
            f"{tied} is false, but vLLM takes the embedding of {kind} as its LM head; copy the embedding over the LM "
            f"head in the weights and set {tied}: true"
        )
    if kind != "ministral3":
        return next(_scaled_otherwise(text), None) if kind != "phimoe" else None  # its own class reads vLLM's keys
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    rope = MINISTRAL_ROPE if rope is None else rope
    first = rope.get(ORIGINAL)
    if first and rope.get("llama_4_scaling_beta") and longest > first:
        return (
            f"llama_4_scaling_beta scales attention from {first} tokens on, but not in vLLM, and a prompt and its "
            f"completion may have {longest} tokens; lower dataset.max_prompt_length or the max_completion_length of "
            f"rollout and evaluation so that together they have at most {first}"
        )
    return None


def _scaled_otherwise(text: Mapping[str, Any]) -> Iterator[str]:
    """Differences between the scales of a rotary embedding `longrope`, which transformers and vLLM read from different
    keys.
    """
    for rope in rotary_embeddings(text):
        first = rope.get(ORIGINAL) or text.get(ORIGINAL)
        if rope.get("rope_type", rope.get("type")) not in {"longrope", "su"} or not first:
            continue
        ratio = text.get("max_position_embeddings", first) / first

        def scale(factor: float, first: int = first) -> float:
            return sqrt(1 + log(factor) / log(first)) if factor > 1 else 1.0

        trained = rope.get("attention_factor") or scale(rope.get("factor") or ratio)
        sampled = rope.get("short_mscale") or scale(ratio)
        if not isclose(trained, sampled):
            yield (
                f"a rotary embedding (longrope) scales attention by {trained:.4g} (attention_factor or factor), but by "
                f"{sampled:.4g} in vLLM (short_mscale or {ORIGINAL}); add short_mscale: {trained} and long_mscale: "
                f"{trained} to it"
            )


def is_window(key: str) -> bool:
    """True if a key of config.json holds an attention window in tokens."""
    named_otherwise = key in {"attention_chunk_size", "local_attention"}
    return named_otherwise or ("window" in key and not key.endswith(("layers", "pattern")))


def check_lora(policy: Policy, lora: Lora | None) -> None:
    """Checks that vLLM can serve the adapter that a run would train.

    PEFT can put an adapter on any layer. vLLM serves only some layers, under its own names, and would fail only when it
    loads the first adapter: in round 2, after round 1 has been paid for.

    Args:
        policy: the full model.
        lora: the section `update.lora`.

    Raises:
        UserError: vLLM cannot serve the adapter.
    """
    if lora is not None and (problem := _lora_problem(policy.config, lora)):
        raise UserError(f"{policy.config_file}: {problem}")


def check_dtype_on_gpu(dtype: Dtype) -> None:
    """Checks the number format of a sampler that serves an adapter, if it is on a GPU.

    Raises:
        UserError: vLLM cannot sample in this format.
    """
    if dtype == "float32":
        raise UserError(
            "model.dtype: float32 cannot be used with update.lora on a GPU, where vLLM computes adapters in 16 bits "
            "only; set model.dtype: bfloat16, or remove update.lora"
        )


def _serves_embedding(kind: str, name: str) -> bool:
    """True if vLLM serves an adapter on this embedding or LM head of an architecture."""
    embedding = EMBEDDING_NAMES.get(kind, "embed_tokens")
    return kind in LM_HEAD if name == "lm_head" else name == embedding and kind not in WITHOUT_EMBEDDING


def _lora_problem(hf_config: Mapping[str, Any], lora: Lora) -> str | None:
    """The part that vLLM cannot serve, and advice; None if it serves the adapter."""
    kind = str(next(iter(hf_config.get("architectures") or ()), hf_config.get("model_type", "this model")))
    if kind in WITHOUT_LORA:
        return f"vLLM serves no LoRA adapters for {kind}; remove update.lora, or use another model"
    renamed = RENAMED.get(kind, set())
    if lora.is_pattern:  # `policy_model.check_layers` finds the names
        return None
    targets = renamed | {"all-linear"} if lora.target_modules == "all-linear" else set(lora.target_modules)
    unserved = [
        name
        for name in sorted(targets)
        if (last := name.rpartition(".")[2]) in renamed
        or (EMBEDDING.search(last) and not _serves_embedding(kind, last))
    ]
    if unserved:
        return (
            f"vLLM does not serve an adapter on {', '.join(unserved)} of {kind}; name the modules in "
            f"update.lora.target_modules without {'it' if len(unserved) == 1 else 'them'}, such as {EXAMPLE}"
        )
    experts, text = experts_key(hf_config), text_config(hf_config)
    others = sorted(name for name in targets if name.rpartition(".")[2] not in ATTENTION_MODULES)
    if experts and others:
        return (
            f"{kind} has experts ({experts}: {text[experts]}), but vLLM does not serve an adapter on its "
            f"{', '.join(others)} in PEFT's format; name attention modules in update.lora.target_modules, such as "
            f"{EXAMPLE}"
        )
    return None
