"""Which models packed training covers, decided from their config.json alone, without weights or torch.

Packing separates sequences inside full causal attention, behind transformers' attention interface. A layer that mixes
tokens in another way, or attends to fewer of them, would be computed wrongly without an error. What the keys of
config.json do not show, `self_check` finds by computing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.errors import UserError
from rloo_pipeline.training import lora_support
from rloo_pipeline.training.model_types import EVERY_LAYER, FROM_LAYER, REFUSED, SWITCHED, WINDOWS

if TYPE_CHECKING:
    from rloo_pipeline.config import Config

OUTSIDE = "packed training covers full causal attention only"
DYNAMIC = {"dynamic", "longrope", "su"}
"""Kinds of rotary embedding whose angles depend on the longest sequence in the batch."""


class LengthLimit(NamedTuple):
    """The longest sequence that packed training computes correctly."""

    tokens: int
    cause: str
    """Key of config.json that sets the limit, with its value."""


def check_run(config: Config, folder: Path) -> None:
    """Checks the model of a run, for the length of its sequences, and the LoRA adapter that it trains.

    Raises:
        UserError: as `check_model`, or vLLM cannot serve the adapter.
    """
    lora_support.check_lora(folder, config.update.lora)
    completion = max(config.rollout.max_completion_length, config.evaluation.max_completion_length or 0)
    check_model(folder, config.dataset.max_prompt_length + completion)


def check_model(config: Mapping[str, Any] | Path, longest: int | None = None) -> None:
    """Checks that packed training covers a model.

    Args:
        config: contents of config.json, the file, or the folder with it.
        longest: tokens of the run's longest sequence, prompt and completion; None skips that check.

    Raises:
        UserError: the model does something that packing does not cover, or `longest` exceeds its limit.
    """
    file, facts = _read(config) if isinstance(config, Path) else ("config.json", config)
    kind = facts.get("model_type", "a model without a model_type")
    if (reason := _unsupported(facts)) is not None:
        raise UserError(f"{file}: {kind} {reason}; {OUTSIDE}, so use another model")
    limit = length_limit(facts)
    if limit is not None and longest is not None and longest > limit.tokens:
        raise UserError(
            f"{file}: {kind} has {limit.cause}, and the longest prompt and completion together may have {longest} "
            f"tokens; {OUTSIDE}, so lower dataset.max_prompt_length or the max_completion_length of rollout and "
            f"evaluation until they have {limit.tokens} at most, or use another model"
        )


def _read(path: Path) -> tuple[str, Mapping[str, Any]]:
    """Name and contents of a config.json; `path` is the file or its folder."""
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise UserError(f"{file}: no such file, so this is not a model folder; check the path")
    return str(file), read_json(file)


def length_limit(config: Mapping[str, Any]) -> LengthLimit | None:
    """The shortest attention window, or the length from which the rotary embedding changes; None without a limit.

    Windowed attention is full causal attention for sequences that are no longer than the window.
    """
    return min((*_windows(config), *_rotary(config)), default=None)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section of the language model; composite models have one of their own for it."""
    section: Mapping[str, Any] = config.get("text_config") or config
    return section


def _unsupported(config: Mapping[str, Any]) -> str | None:
    """What a model does that packing never covers; None if nothing."""
    text = text_config(config)
    for kind in (config.get("model_type"), text.get("model_type")):
        if kind in REFUSED:
            return REFUSED[kind]
    if config.get("quantization_config") or text.get("quantization_config"):
        return "has quantized weights (quantization_config), which cannot be trained"
    if cap := text.get("attn_logit_softcapping", WINDOWS.get(text.get("model_type"), {}).get("attn_logit_softcapping")):
        return f"uses soft-capped attention (attn_logit_softcapping: {cap:g})"
    layer_types = {str(kind) for kind in text.get("layer_types") or ()}
    uncovered = layer_types - {"full_attention", "sliding_attention", "chunked_attention"}
    if uncovered:
        return f"uses {', '.join(sorted(uncovered))} (layer_types)"
    if text.get("is_causal") is False or text.get("use_bidirectional_attention") in {True, "all"}:
        return "does not attend causally"
    return None


def _windows(config: Mapping[str, Any]) -> Iterator[LengthLimit]:
    """Attention windows that apply to at least one layer."""
    text = text_config(config)
    kind = text.get("model_type")
    facts = {**WINDOWS.get(kind, {}), **text}
    layers = () if kind in EVERY_LAYER else facts.get("layer_types") or ()
    if layers and not {"sliding_attention", "chunked_attention"} & set(layers):
        return
    if kind in SWITCHED and not facts.get("use_sliding_window"):
        return
    if kind in FROM_LAYER and not layers and facts.get("max_window_layers", 0) >= facts.get("num_hidden_layers", 0):
        return
    for key, value in facts.items():
        if is_window(key) and type(value) is int and value > 0:
            yield LengthLimit(value, f"{key}: {value}")


def is_window(key: str) -> bool:
    """Whether a key of config.json holds an attention window in tokens."""
    if key in {"attention_chunk_size", "local_attention"}:
        return True
    return "window" in key and not key.endswith(("layers", "pattern"))


def _rotary(config: Mapping[str, Any]) -> Iterator[LengthLimit]:
    """Lengths beyond which the rotary embedding of a sequence depends on the other sequences in the batch."""
    text = text_config(config)
    whole = text.get("rope_parameters") or text.get("rope_scaling") or {}
    nested = [part for part in whole.values() if isinstance(part, Mapping)]
    for rope in [whole, *nested]:
        kind = rope.get("rope_type", rope.get("type"))
        if kind in DYNAMIC:
            key = "original_max_position_embeddings"
            tokens = rope.get(key) or text.get(key) or text.get("max_position_embeddings")
            yield LengthLimit(int(tokens or 1), f"a rotary embedding ({kind}) that changes beyond {tokens} tokens")
