"""Families of models, very small: what their configurations are, and weights at which attention matters."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
}
ABSENT = object()
"""Of a key of `SIZES` that a family does not know."""
DROPOUT = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
RIGHT: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": EXPERTS,
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None, **EXPERTS},
    "phi3": {},
    "smollm3": {},
    "olmo2": {},
    "gemma": {},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.3},
    "glm4": {},
    "deepseek_v3": {**LATENT, **EXPERTS},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256, **DROPOUT},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.3, "attention_dropout": 0.3, "layerdrop": 0.3},
    "gemma2": {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 8,
        "layer_types": ["full_attention"] * 2,
    },
}
"""Packed, they are what they are in plain transformers; the values are what config.json says beside `SIZES`."""
WINDOW = {"sliding_window": 8}
WRONG: dict[str, dict[str, Any]] = {
    "mistral": WINDOW,
    "mixtral": {**WINDOW, **EXPERTS},
    "phi3": WINDOW,
    "phimoe": {**WINDOW, **EXPERTS},
    "starcoder2": WINDOW,
    "ministral3": WINDOW,
    "gemma3_text": WINDOW,
    "gemma2": {},
    "gpt_oss": {**WINDOW, **EXPERTS},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"head_dim": ABSENT},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "gptj": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256, "rotary_dim": 4},
    "gpt_neox_japanese": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
    "nemotron": {},
    "openai-gpt": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], **EXPERTS},
    "stablelm": {},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
}
"""Packed, they would be other models."""


def config(kind: str, facts: dict[str, Any]) -> Any:
    """What transformers make of it."""
    given = {**SIZES, **facts}
    return AutoConfig.for_model(kind, **{key: value for key, value in given.items() if value is not ABSENT})


def write(folder: Path, kind: str, facts: dict[str, Any]) -> Path:
    """A model folder with weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(kind, facts))
    spread(model)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def spread(model: torch.nn.Module) -> None:
    """At the weights that models start from all tokens are about alike to attention, and no mask matters."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 1.2 * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
