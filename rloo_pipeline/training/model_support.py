"""Which models packed training covers, told from their config.json alone: no weights, no torch.

Packing keeps sequences apart inside full causal attention, as transformers' attention interface asks for it. A layer
that mixes tokens in another way, or attends to fewer of them, would be computed wrongly without a word. What is not
told by the keys of a config.json is found by `self_check`, which computes.
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
"""Kinds of rotary embedding whose angles depend on the longest sequence that is there at once."""


class Limit(NamedTuple):
    """The longest sequence that is computed right."""

    tokens: int
    key: str
    """Of config.json, and its value."""


def refuse_run(config: Config, folder: Path) -> None:
    """The same for the model of a run, whose configuration says how long its sequences may be, and for its adapter.

    Raises:
        UserError: as `refuse`, or vLLM would not serve the adapter that the run trains.
    """
    lora_support.refuse(folder, config.update.lora)
    completion = max(config.rollout.max_completion_length, config.evaluation.max_completion_length or 0)
    refuse(folder, config.dataset.max_prompt_length + completion)


def refuse(config: Mapping[str, Any] | Path, longest: int | None = None) -> None:
    """Makes sure that packed training covers a model, as far as its config.json tells.

    Args:
        config: what is in config.json, or that file, or a folder with it.
        longest: tokens of the run's longest sequence, prompt and completion; None where that is not known yet.

    Raises:
        UserError: what the model does that is not covered, or that it sees fewer tokens than `longest`.
    """
    place, facts = _read(config) if isinstance(config, Path) else ("config.json", config)
    kind = facts.get("model_type", "a model without a model_type")
    if (why := _outside(facts)) is not None:
        raise UserError(f"{place}: {kind} {why}; {OUTSIDE}, so take another model")
    found = limit(facts)
    if found is not None and longest is not None and longest > found.tokens:
        raise UserError(
            f"{place}: {kind} has {found.key}, and the longest prompt and completion together may have {longest} "
            f"tokens; {OUTSIDE}, so lower dataset.max_prompt_length or the max_completion_length of rollout and "
            f"evaluation until they have {found.tokens} at most, or take another model"
        )


def _read(path: Path) -> tuple[str, Mapping[str, Any]]:
    """A config.json, given by itself or by its folder: its name and what is in it."""
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise UserError(f"{file}: no such file, so this is no model folder; check the path")
    return str(file), read_json(file)


def limit(config: Mapping[str, Any]) -> Limit | None:
    """The shortest of the model's windows, or where its rotary embedding changes; None where there is no such thing.

    Attention that is cut to a window is full causal attention as long as no sequence is longer than it.
    """
    return min((*_windows(config), *_rotary(config)), default=None)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part on the language model, which composites of several models keep by itself."""
    found: Mapping[str, Any] = config.get("text_config") or config
    return found


def _outside(config: Mapping[str, Any]) -> str | None:
    """What a model does that is not covered, whatever the length of its sequences."""
    text = text_config(config)
    for kind in (config.get("model_type"), text.get("model_type")):
        if kind in REFUSED:
            return REFUSED[kind]
    if config.get("quantization_config") or text.get("quantization_config"):
        return "has quantized weights (quantization_config), which cannot be trained"
    if cap := text.get("attn_logit_softcapping", WINDOWS.get(text.get("model_type"), {}).get("attn_logit_softcapping")):
        return f"uses soft-capped attention (attn_logit_softcapping: {cap:g})"
    others = {str(kind) for kind in text.get("layer_types") or ()}
    others -= {"full_attention", "sliding_attention", "chunked_attention"}
    if others:
        return f"uses {', '.join(sorted(others))} (layer_types)"
    if text.get("is_causal") is False or text.get("use_bidirectional_attention") in {True, "all"}:
        return "does not attend causally"
    return None


def _windows(config: Mapping[str, Any]) -> Iterator[Limit]:
    """All windows that some layer has."""
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
            yield Limit(value, f"{key}: {value}")


def is_window(key: str) -> bool:
    """Whether a key of config.json names a length beyond which some layer does not attend."""
    if key in {"attention_chunk_size", "local_attention"}:
        return True
    return "window" in key and not key.endswith(("layers", "pattern"))


def _rotary(config: Mapping[str, Any]) -> Iterator[Limit]:
    """Lengths beyond which rotary embeddings of a sequence depend on the others that are computed with it."""
    text = text_config(config)
    whole = text.get("rope_parameters") or text.get("rope_scaling") or {}
    nested = [part for part in whole.values() if isinstance(part, Mapping)]
    for rope in [whole, *nested]:
        kind = rope.get("rope_type", rope.get("type"))
        if kind in DYNAMIC:
            key = "original_max_position_embeddings"
            tokens = rope.get(key) or text.get(key) or text.get("max_position_embeddings")
            yield Limit(int(tokens or 1), f"a rotary embedding ({kind}) that changes beyond {tokens} tokens")
