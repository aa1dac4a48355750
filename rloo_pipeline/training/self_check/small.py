"""Builds a small model from a configuration: enough layers for one of each kind, few heads, a small vocabulary.

What a model computes depends on its code and configuration, not on its size or weights, so a model of any size is
checked in well under a second. The random weights are scaled so that attention is not uniform.
"""

import copy
import re
from enum import Enum
from typing import Any

import torch
from torch import nn

from rloo_pipeline.artifacts import vision
from rloo_pipeline.training import model_support, plain_model

LAYERS = 12
"""Maximum number of layers of a copy; a longer pattern of layer kinds is cut."""
PERIOD = re.compile(r"(step|interval|period|pattern|freq)$")
"""Keys that hold the number of layers after which the pattern of layer kinds repeats."""
EXPERTS = re.compile(r"^(moe_)?n(um)?_(routed_|local_)?experts$")
WIDE = re.compile(r"intermediate|ffn|n_inner|d_ff")
WIDTH, VOCABULARY, WINDOW = 96, 384, 8
MAX_WEIGHTS = 2**28
"""Maximum number of weights of a copy: 1 GB in float32."""
SPREAD = 1.5
"""Standard deviation of a projection's outputs for inputs of size 1; that of attention scores is about its square."""


class Unsuitable(Exception):  # noqa: N818
    """The reason a small copy or a form of batch is not used, in a clause."""


class Shrink(Enum):
    """Ways to shrink a copy; not every model supports every kind. The smallest copy comes first."""

    HEADS = "layers, experts, intermediate widths, heads and hidden size"
    WIDTHS = "layers, experts and intermediate widths"
    LAYERS = "layers"


def shrink(config: Any, kind: Shrink) -> Any:
    """The configuration of a small copy, with attention windows that are shorter than its sequences."""
    small = copy.deepcopy(config)
    for part in [small.get_text_config(), *_sub_configurations(small)]:
        _few_layers(part)
    if kind is Shrink.HEADS:
        _few_heads(small.get_text_config())
    if kind is not Shrink.LAYERS:
        _narrow(small.get_text_config())
    _short_windows(small.get_text_config())
    _short_vocabulary(small)
    if vision.takes_images(small.to_dict()):
        _few_vision_layers(small)
    return small


def placeholders(config: Any) -> tuple[str, ...]:
    """Attributes of a configuration that hold the ids of placeholder tokens for images and videos."""
    kind = vision.kind_of(config.to_dict())
    return tuple(name for name in (kind.begin, kind.end, kind.video, kind.part) if name is not None)


def words(config: Any) -> int:
    """Number of ids that a text can have: the first ones, since placeholders are the last ids of a copy."""
    taken = len(placeholders(config)) if vision.takes_images(config.to_dict()) else 0
    return int(config.get_text_config().vocab_size) - taken


def _few_vision_layers(config: Any) -> None:
    """Keeps two layers of the vision encoder, one of each kind, makes images a few tokens large, and gives placeholders
    the last ids of the short vocabulary.
    """
    part = config.vision_config
    if hasattr(part, "depth"):
        part.depth = min(part.depth, 2)
        for name in ("fullatt_block_indexes", "deepstack_visual_indexes"):
            if getattr(part, name, None):
                setattr(part, name, [part.depth - 1])
        part.out_hidden_size = config.get_text_config().hidden_size
    if hasattr(config, "mm_tokens_per_image"):  # two by two tokens, each with as many patches as before
        patches = part.image_size // part.patch_size // int(config.mm_tokens_per_image**0.5)
        part.image_size, config.mm_tokens_per_image = 2 * max(patches, 1) * part.patch_size, 4
    names = placeholders(config)
    for token, name in enumerate(names, config.get_text_config().vocab_size - len(names)):
        setattr(config, name, token)


def _sub_configurations(config: Any) -> list[Any]:
    """Sub-configurations of a composite other than its language model."""
    text = config.get_text_config()
    parts = [getattr(config, name, None) for name in config.sub_configs]
    return [part for part in parts if part is not None and part is not text]


def _few_layers(config: Any) -> None:
    """Keeps the first layers, enough to include each kind."""
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int):
        return
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == count}
    needed = 2
    for value in lists.values():
        kinds = [str(entry) for entry in value]
        needed = max(needed, 1 + max(kinds.index(kind) for kind in set(kinds)))
    for name, value in vars(config).items():
        if PERIOD.search(name) and type(value) is int:
            needed = max(needed, value)
    needed = min(needed, LAYERS, count)
    if getattr(config, "first_k_dense_replace", 0):
        config.first_k_dense_replace = 1
    for name, value in lists.items():
        setattr(config, name, value[:needed])
    config.num_hidden_layers = needed


def _few_heads(config: Any) -> None:
    """Reduces the number of heads and the hidden size; keeps the head size."""
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if isinstance(heads, int) and isinstance(hidden, int):
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        few_kv_heads = _smallest_factor(kv_heads)
        few_heads = few_kv_heads * _smallest_factor(heads // kv_heads) if heads % kv_heads == 0 else heads
        config.num_attention_heads = few_heads
        if hasattr(config, "num_key_value_heads"):
            config.num_key_value_heads = few_kv_heads
        if hidden % heads == 0 and few_heads < heads:
            config.hidden_size = hidden // heads * few_heads
            for name in ("word_embed_proj_dim", "embedding_size"):
                if getattr(config, name, None) == hidden:
                    setattr(config, name, config.hidden_size)


def _narrow(config: Any) -> None:
    """Reduces intermediate widths and the number of experts."""
    for name, value in list(vars(config).items()):
        if WIDE.search(name) and type(value) is int and value > WIDTH:
            setattr(config, name, WIDTH)
        elif WIDE.search(name) and isinstance(value, list) and all(type(width) is int for width in value):
            setattr(config, name, [min(width, WIDTH) for width in value])
        elif EXPERTS.search(name) and type(value) is int:
            setattr(config, name, min(value, _experts(config)))


def _experts(config: Any) -> int:
    """Smallest number of experts at which the router still leaves out some experts, and some groups of experts."""
    per_token = next(
        (n for name in ("num_experts_per_tok", "top_k", "moe_topk") if type(n := getattr(config, name, None)) is int), 2
    )
    groups = getattr(config, "n_group", None) or 1
    groups_per_token = getattr(config, "topk_group", None) or 1
    return max(2 * per_token, groups * max(2, -(-per_token // groups_per_token)))


def _short_windows(config: Any) -> None:
    """Shortens windows, so that a token attends to only some tokens, by position or by an index (`index_topk`). Scaling
    of scores by position then begins at the first tokens (`floor_scale` of Llama 4).
    """
    shortened = {"index_topk", "floor_scale"}
    for name, value in list(vars(config).items()):
        if (model_support.is_window(name) or name in shortened) and type(value) is int and value > WINDOW:
            setattr(config, name, WINDOW)


def _short_vocabulary(config: Any) -> None:
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in list(vars(part).items()):
            if name.startswith("vocab_size") and type(value) is int:
                setattr(part, name, min(value, VOCABULARY))
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if getattr(part, name, None) is not None:
                setattr(part, name, 0)


def _smallest_factor(number: int) -> int:
    """The smallest prime factor."""
    return next((n for n in range(2, number + 1) if number % n == 0), 1)


def build(config: Any, trust_remote_code: bool, attention: str | None) -> Any:
    """Builds a model in float32 on the CPU; the same arguments give the same weights.

    Args:
        config: transformers configuration.
        trust_remote_code: allows the model's own code to run.
        attention: name of the attention implementation; None for the model's default.

    Raises:
        Unsuitable: the model has more than MAX_WEIGHTS weights.
    """
    auto_class = plain_model.auto_class(config.to_dict())

    def create() -> Any:
        return auto_class.from_config(
            copy.deepcopy(config),
            dtype=torch.float32,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
        )

    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in create().parameters())
    if weights > MAX_WEIGHTS:
        raise Unsuitable(f"a copy has {weights:,} weights")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = create()
        _randomize(model)
    return model


@torch.no_grad()
def _randomize(model: nn.Module) -> None:
    """Randomizes the weights: projections keep inputs of size 1 at about SPREAD, norms and biases vary."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, SPREAD * min(parameter.shape[-2:]) ** -0.5)
        else:
            parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
