"""A small copy of a model, made from its configuration alone: as many layers as it takes to have each kind, few heads,
short vocabularies, random weights of a spread at which attention matters.

What a model computes follows from its code and configuration, not from its size. So a model of any size is tried in
well under a second, and whatever its weights are.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn

from rloo_pipeline.training import model_support

LAYERS = 12
"""At most; a pattern of kinds that is longer is cut."""
EVERY = re.compile(r"(step|interval|period|pattern|freq)$")
"""Keys that say how many layers a pattern of kinds has."""
EXPERTS = re.compile(r"^(moe_)?n(um)?_(routed_|local_)?experts$")
WIDE = re.compile(r"intermediate|ffn|n_inner|d_ff")
WIDTH, VOCABULARY, WINDOW = 96, 384, 8
MOST = 2**28
"""Weights of a copy: 1 GB in float32."""
SPREAD = 1.5
"""Standard deviation of what a projection makes of tokens of size 1; scores of attention then have about its square."""


class TooLargeError(Exception):
    """A copy has more weights than are tried."""


def copy_of(config: Any, narrow: bool, window: bool) -> Any:
    """The configuration of a copy.

    Args:
        config: of transformers.
        narrow: whether its layers are made narrow as well as few, which not every model can be.
        window: whether windows are cut too, so that a short sequence reaches beyond them.
    """
    small = copy.deepcopy(config)
    for part in [small.get_text_config(), *_others(small)]:
        _few_layers(part)
    if narrow:
        _narrow(small.get_text_config())
    if window:
        _short_windows(small.get_text_config())
    _short_vocabulary(small)
    return small


def _others(config: Any) -> list[Any]:
    """The parts of a composite that are not its language model."""
    text = config.get_text_config()
    parts = [getattr(config, name, None) for name in config.sub_configs]
    return [part for part in parts if part is not None and part is not text]


def _few_layers(config: Any) -> None:
    """The first layers, so many that each kind is among them."""
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int):
        return
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == count}
    enough = 2
    for value in lists.values():
        kinds = [str(one) for one in value]
        enough = max(enough, 1 + max(kinds.index(kind) for kind in set(kinds)))
    for name, value in vars(config).items():
        if EVERY.search(name) and type(value) is int:
            enough = max(enough, value)
    enough = min(enough, LAYERS, count)
    if getattr(config, "first_k_dense_replace", 0):
        config.first_k_dense_replace = 1
    for name, value in lists.items():
        setattr(config, name, value[:enough])
    config.num_hidden_layers = enough


def _narrow(config: Any) -> None:
    """Fewer heads of the same size, as many tokens of hidden size a head as before, few and narrow experts."""
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if isinstance(heads, int) and isinstance(hidden, int):
        keys = getattr(config, "num_key_value_heads", None) or heads
        few = _least(keys)
        fewer = few * _least(heads // keys) if heads % keys == 0 else heads
        config.num_attention_heads = fewer
        if hasattr(config, "num_key_value_heads"):
            config.num_key_value_heads = few
        if hidden % heads == 0 and fewer < heads:
            config.hidden_size = hidden // heads * fewer
            for name in ("word_embed_proj_dim", "embedding_size"):
                if getattr(config, name, None) == hidden:
                    setattr(config, name, config.hidden_size)
    for name, value in list(vars(config).items()):
        if WIDE.search(name) and type(value) is int and value > WIDTH:
            setattr(config, name, WIDTH)
        elif WIDE.search(name) and isinstance(value, list) and all(type(one) is int for one in value):
            setattr(config, name, [min(one, WIDTH) for one in value])
        elif EXPERTS.search(name) and type(value) is int:
            setattr(config, name, min(value, _experts(config)))


def _experts(config: Any) -> int:
    """So many that some are left out, and groups of experts too."""
    chosen = next(
        (n for name in ("num_experts_per_tok", "top_k", "moe_topk") if type(n := getattr(config, name, None)) is int), 2
    )
    groups = getattr(config, "n_group", None) or 1
    taken = getattr(config, "topk_group", None) or 1
    return max(2 * chosen, groups * max(2, -(-chosen // taken)))


def _short_windows(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if model_support.is_window(name) and type(value) is int and value > WINDOW:
            setattr(config, name, WINDOW)


def _short_vocabulary(config: Any) -> None:
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in list(vars(part).items()):
            if name.startswith("vocab_size") and type(value) is int:
                setattr(part, name, min(value, VOCABULARY))
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if getattr(part, name, None) is not None:
                setattr(part, name, 0)


def _least(number: int) -> int:
    """The least prime factor."""
    return next((n for n in range(2, number + 1) if number % n == 0), 1)


def build(config: Any, trust_remote_code: bool, attention: str) -> Any:
    """A model of a configuration in float32 on the CPU, of weights that are always the same.

    Raises:
        TooLargeError: it is.
    """
    from transformers import AutoModelForCausalLM

    def make() -> Any:
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=torch.float32,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
        )

    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in make().parameters())
    if weights > MOST:
        raise TooLargeError(f"a copy has {weights:,} weights")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make()
        _spread(model)
    return model


@torch.no_grad()
def _spread(model: nn.Module) -> None:
    """Random weights: products of about size 1 of what is of size 1, norms and biases that are not all alike."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, SPREAD * min(parameter.shape[-2:]) ** -0.5)
        else:
            parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
