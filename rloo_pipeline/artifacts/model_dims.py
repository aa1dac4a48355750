"""Sizes of a model, from its folder's config.json and the headers of its weights; no torch is needed."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.errors import UserError

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CONTEXT = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
"""Keys of config.json that say how long a sequence may be, as vLLM reads them; the smallest holds."""
ALREADY_SCALED = {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default"}
"""Kinds of rotary embedding whose factor is in these keys already."""


class Shape(NamedTuple):
    """What memory and work depend on."""

    hidden: int
    layers: int
    heads: int
    """Width of all query heads together."""
    key_value: int
    """Width of all key (or value) heads together."""
    intermediate: int
    vocabulary: int
    parameters: int
    """Tied ones once."""
    source: str = ""
    """Where it was read."""

    def cached(self, dtype: str) -> int:
        """Bytes of the KV cache a token."""
        return 2 * self.layers * self.key_value * BYTES[dtype]


def context(facts: dict[str, Any]) -> int | None:
    """Tokens of the longest sequence that a model with this config.json is made for; None where that does not say."""
    text = facts.get("text_config") or facts
    known = [text[key] for key in CONTEXT if isinstance(text.get(key), int)]
    longest = text.get("model_max_length") or min(known, default=None)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if longest is None or kind in ALREADY_SCALED or "gemma3" in str(facts.get("model_type")):
        return longest
    return int(longest * (rope.get("factor") or 1))


def read(folder: Path) -> Shape:
    """The shape of the model in a folder.

    Raises:
        UserError: config.json is missing, or has no sizes of a transformer.
    """
    whole = read_json(folder / "config.json")
    facts: dict[str, Any] = whole.get("text_config") or whole
    try:
        hidden, heads = int(facts["hidden_size"]), int(facts["num_attention_heads"])
        head = int(facts.get("head_dim") or hidden // heads)
        shape = Shape(
            hidden=hidden,
            layers=int(facts["num_hidden_layers"]),
            heads=heads * head,
            key_value=int(facts.get("num_key_value_heads") or heads) * head,
            intermediate=int(facts.get("intermediate_size") or 4 * hidden),
            vocabulary=int(facts["vocab_size"]),
            parameters=0,
            source=str(folder),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'}: no sizes of a transformer in it ({error})") from error
    tied = bool(facts.get("tie_word_embeddings", whole.get("tie_word_embeddings", False)))
    return shape._replace(parameters=_counted(folder) or _by_formula(shape, tied))


def _counted(folder: Path) -> int:
    """Parameters by the headers of all safetensors files; 0 where one is missing."""
    total, files = 0, sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists() and not {file.name for file in files} >= set(read_json(index)["weight_map"].values()):
        return 0
    for file in files:
        with file.open("rb") as handle:
            header = json.loads(handle.read(struct.unpack("<Q", handle.read(8))[0]))
        for name, entry in header.items():
            if name != "__metadata__":
                count = 1
                for size in entry["shape"]:
                    count *= size
                total += count
    return total


def _by_formula(shape: Shape, tied: bool) -> int:
    """Parameters of a Llama or Qwen of this shape."""
    attention = 2 * shape.hidden * (shape.heads + shape.key_value)
    layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    return shape.layers * layer + shape.vocabulary * shape.hidden * (1 if tied else 2) + shape.hidden
