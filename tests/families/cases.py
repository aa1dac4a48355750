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
WINDOW = {"sliding_window": 8}
HALF = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}
PACKED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": EXPERTS,
    "mistral": WINDOW,
    "mixtral": {**WINDOW, **EXPERTS},
    "phi3": WINDOW,
    "smollm3": {},
    "olmo2": {},
    "olmo3": HALF,
    "gemma": {},
    "gemma2": {**HALF, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": HALF,
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {**HALF, "logit_scale": 0.3},
    "exaone4": HALF,
    "ministral": HALF,
    "starcoder2": WINDOW,
    "glm4": {},
    "gpt_oss": {**HALF, **EXPERTS},
    "deepseek_v3": {**LATENT, **EXPERTS},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 8, **EXPERTS},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256, **DROPOUT},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.3, "attention_dropout": 0.3, "layerdrop": 0.3},
}
"""Packed, they are what they are in plain transformers; the values are what config.json says beside `SIZES`."""
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
PADDED: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon_h1": {"mamba_d_ssm": 64, **MAMBA},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 48, **MAMBA, **EXPERTS},
    "gpt_neox_japanese": {},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48},
    "nemotron": {},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], **MAMBA},
    "openai-gpt": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256},
    "qwen3_next": {**DELTA, **EXPERTS},
    "qwen3_5_text": DELTA,
    "stablelm": {},
}
"""Right in padded batches: they recur, or do not tell their attention where sequences begin."""
RIGHT = {**PACKED, **PADDED}
INDEXED = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 16}
SHALLOW = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256}
OTHERS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], **MAMBA},
    "blenderbot": {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 4},
    "codegen": {**SHALLOW, "n_head": 16, "n_embd": 64, "rotary_dim": 4, "head_dim": ABSENT},
    "deepseek_v2": {**LATENT, **EXPERTS, "topk_method": "greedy", "head_dim": ABSENT},
    "deepseek_v32": {**LATENT, **EXPERTS, **INDEXED, "layer_types": ["indexed_attention", "indexed_attention"]},
    "deepseek_v4": {
        **EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
    },
    "dots1": {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "falcon": {"head_dim": ABSENT, "num_kv_heads": 2},
    "glm_moe_dsa": {**LATENT, **EXPERTS, **INDEXED},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16},
}
"""Sizes of further types whose default is too large for the sweep, or no model."""
OFTEN = {
    *("llama", "qwen3_moe", "mistral", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "cohere2", "gpt2", "opt"),
    *("llama4_text", "falcon_h1", "qwen3_5_text", "stablelm", "openai-gpt"),
}
"""Those that every run of the tests takes: one of each kind."""


def config(kind: str, facts: dict[str, Any]) -> Any:
    """What transformers make of it."""
    options = {**SIZES, **facts}
    return AutoConfig.for_model(kind, **{key: value for key, value in options.items() if value is not ABSENT})


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
