"""Dimensions of a model, read from its config.json and the headers of its safetensors files without torch."""

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from rloo_pipeline.artifacts import model_files
from rloo_pipeline.errors import UserError

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CONTEXT_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
"""Keys of config.json that give the longest sequence, as vLLM reads them; the smallest value counts."""
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
"""Keys of config.json that give the number of experts per layer."""
RECURRENT = re.compile(r"mamba|ssm_|linear_(attn|conv|num|key|value)|conv_L_cache|lru_width|state_size")
"""Matches the beginnings of config.json's keys that only models with recurrent or convolutional layers have."""
VISION = re.compile(r"(^|\.)(visual|vision_tower|multi_modal_projector)\.")
"""Matches names of tensors of the vision encoder and its projector."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    }
}
"""Keys that some config.json files leave out, by the type of the language model, with the values of transformers."""
TYPES: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(
        ("text_config", "vision_config", "quantization_config", "rope_parameters", "rope_scaling"), (dict, "an object")
    ),
    **dict.fromkeys(("architectures", "layer_types", "layers_block_type"), (list, "a list")),
    **dict.fromkeys(("model_type", "rope_type", "type"), (str, "a string")),
    **dict.fromkeys(
        ("num_attention_heads", "model_max_length", "factor", "original_max_position_embeddings", *EXPERT_KEYS),
        ((int, float), "a number"),
    ),
}
"""Types of the keys of config.json that this package reads itself."""
SCALED_ROPE = {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default"}
"""Types of rotary embedding whose scaling factor is already included in CONTEXT_KEYS."""
ORIGINAL = "original_max_position_embeddings"
"""Key of config.json: the longest sequence of the first training."""
DYNAMIC = {"dynamic", "longrope", "su"}
"""Kinds of rotary embedding whose angles depend on the longest sequence in the batch."""


class ModelDims(NamedTuple):
    """The dimensions that memory and compute depend on."""

    hidden: int
    layers: int
    heads: int
    """Width of all query heads together."""
    key_value: int
    """Width of all key (or value) heads together."""
    intermediate: int
    vocabulary: int
    parameters: int
    """Number of parameters; tied ones count once."""
    source: str = ""
    """Folder that the dimensions were read from."""
    vision: int = 0
    """Number of parameters in the vision encoder and its projector."""
    query_heads: int = 1
    """Number of query heads, which limits `deepspeed.sequence_parallel` and `vllm.tensor_parallel_size`."""
    holds_scores: bool = False
    """True if training holds the attention weights of whole sequences, since no kernel has soft caps or sinks."""

    def in_sampler(self, dtype: str, quantized: bool) -> int:
        """Bytes of the weights in vLLM. Quantized ones take a byte; embeddings, head and vision encoder are not."""
        whole = min(self.parameters, 2 * self.vocabulary * self.hidden + self.vision) if quantized else self.parameters
        return whole * BYTES[dtype] + self.parameters - whole

    def cached(self, dtype: str) -> int:
        """Bytes of KV cache that one token takes."""
        return 2 * self.layers * self.key_value * BYTES[dtype]


class LengthLimit(NamedTuple):
    """The longest sequence that training computes correctly."""

    tokens: int
    cause: str
    """The reason for the limit, phrased to follow "MODEL has"."""


def check_types(hf_config: Mapping[str, Any], file: Path) -> None:
    """Checks the keys in TYPES, at every level of a config.json; a value that is null, 0 or empty counts as absent.

    Raises:
        UserError: a value has another type.
    """
    for key, value in hf_config.items():
        kind, name = TYPES.get(key, (object, ""))
        if value and not isinstance(value, kind):
            raise UserError(f"{file}: {key} is {value!r:.40}, not {name}; {model_files.remedy(file.parent)}")
        if isinstance(value, dict):
            check_types(value, file)


def text_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's section of a config.json; composite models have a separate one."""
    text: Mapping[str, Any] = hf_config.get("text_config") or hf_config
    return {**DEFAULTS.get(str(text.get("model_type")), {}), **text}


def experts_key(hf_config: Mapping[str, Any]) -> str | None:
    """The key of a config.json that gives its number of experts; None if layers have only one."""
    text = text_config(hf_config)
    return next((key for key in EXPERT_KEYS if int(text.get(key) or 0) > 1), None)


def context(hf_config: dict[str, Any]) -> int | None:
    """The context length in tokens that a config.json declares; None if it declares none."""
    text = text_config(hf_config)
    lengths = [text[key] for key in CONTEXT_KEYS if isinstance(text.get(key), int)]
    longest = text.get("model_max_length") or min(lengths, default=None)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if longest is None or kind in SCALED_ROPE or "gemma3" in str(hf_config.get("model_type")):
        return longest
    return int(longest * (rope.get("factor") or 1))


def length_limit(hf_config: Mapping[str, Any]) -> LengthLimit | None:
    """The length beyond which the rotary embedding of a sequence depends on the other sequences in the batch; None
    without a limit.
    """
    text, limits = text_config(hf_config), []
    for rope in rotary_embeddings(text):
        kind = rope.get("rope_type", rope.get("type"))
        if kind in DYNAMIC:
            tokens = rope.get(ORIGINAL) or text.get(ORIGINAL) or text.get("max_position_embeddings")
            cause = f"a rotary embedding ({kind}) that changes beyond {tokens} tokens"
            limits.append(LengthLimit(int(tokens or 1), cause))
    return min(limits, default=None)


def rotary_embeddings(text: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Settings of the rotary embedding, and those of single kinds of layers in it."""
    whole = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return [whole, *(part for part in whole.values() if isinstance(part, Mapping))]


def is_recurrent(hf_config: dict[str, Any]) -> bool:
    """True if a config.json describes layers with a state (Mamba, DeltaNet, short convolutions)."""
    text = text_config(hf_config)
    kinds = [str(kind) for kind in text.get("layer_types") or text.get("layers_block_type") or ()]
    return any(RECURRENT.match(key) for key in text) or any("mamba" in kind or "linear" in kind for kind in kinds)


def is_tied(hf_config: Mapping[str, Any]) -> bool:
    """True if a config.json says that embedding and vocabulary projection share their weights."""
    return bool(text_config(hf_config).get("tie_word_embeddings", hf_config.get("tie_word_embeddings", False)))


def read(folder: Path, hf_config: Mapping[str, Any]) -> ModelDims:
    """The dimensions of the model in a folder, from its config.json and the headers of its weights.

    Raises:
        UserError: config.json does not give the sizes of a transformer.
    """
    text = text_config(hf_config)
    try:
        hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
        head = int(text.get("head_dim") or hidden // heads)
        dims = ModelDims(
            hidden=hidden,
            layers=int(text["num_hidden_layers"]),
            heads=heads * head,
            key_value=int(text.get("num_key_value_heads") or heads) * head,
            intermediate=int(text.get("intermediate_size") or 4 * hidden),
            vocabulary=int(text["vocab_size"]),
            parameters=0,
            source=str(folder),
            query_heads=heads,
            holds_scores=bool(text.get("attn_logit_softcapping")) or text.get("model_type") == "gpt_oss",
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'}: does not give the sizes of a transformer ({error})") from error
    tied = is_tied(hf_config)
    vision = _estimate_vision(hf_config.get("vision_config") or {}, dims.hidden)
    counted, counted_vision = _count_parameters(folder)
    if counted:
        return dims._replace(parameters=counted, vision=counted_vision if vision else 0)
    return dims._replace(parameters=_estimate_parameters(dims, tied) + vision, vision=vision)


def _count_parameters(folder: Path) -> tuple[int, int]:
    """Counts the parameters in the headers of safetensors files: all of them, and those of a vision encoder. 0 if a
    file is missing.
    """
    if model_files.missing_shards(folder):
        return 0, 0
    total, vision = 0, 0
    for file in folder.glob("*.safetensors"):
        for name, entry in model_files.tensors_in(file).items():
            if ".weight." not in name:  # such names hold the scales of 4-bit weights
                count = prod(entry["shape"]) * (2 if entry["dtype"] == "U8" else 1)
                total += count
                vision += count if VISION.search(name) else 0
    return total, vision


def _estimate_vision(hf_config: dict[str, Any], hidden: int) -> int:
    """Parameters of the vision encoder of a Qwen-VL or Gemma 3, by its section of config.json; 0 for other models."""
    if hf_config.get("model_type") == "siglip_vision_model":
        return _estimate_siglip(hf_config, hidden)
    if "depth" not in hf_config or "spatial_merge_size" not in hf_config:
        return 0
    width = int(hf_config["hidden_size"])
    merged = width * int(hf_config["spatial_merge_size"]) ** 2
    layer = 4 * width**2 + 3 * width * int(hf_config["intermediate_size"])
    return int(hf_config["depth"]) * layer + merged**2 + merged * hidden


def _estimate_siglip(hf_config: dict[str, Any], hidden: int) -> int:
    """Parameters of a SigLIP encoder and of a projector onto `hidden`."""
    width, patch = int(hf_config["hidden_size"]), int(hf_config["patch_size"])
    layer = 4 * width**2 + 2 * width * int(hf_config["intermediate_size"])
    embeddings = 3 * patch**2 + (int(hf_config["image_size"]) // patch) ** 2
    return int(hf_config["num_hidden_layers"]) * layer + embeddings * width + width * hidden


def _estimate_parameters(dims: ModelDims, tied: bool) -> int:
    """Parameters of a Llama or Qwen model with these dimensions."""
    attention = 2 * dims.hidden * (dims.heads + dims.key_value)
    layer = attention + 3 * dims.hidden * dims.intermediate + 2 * dims.hidden
    return dims.layers * layer + dims.vocabulary * dims.hidden * (1 if tied else 2) + dims.hidden
