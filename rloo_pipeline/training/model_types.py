"""Facts about model types that are in their code and not in config.json; tests/families verifies them."""

from __future__ import annotations

from typing import Any

_RECURRENT = "mixes tokens in recurrent or convolutional layers as well"
_OWN = "computes attention in its own code"
_ENCODER = "is an encoder, or a decoder with one"
_SINKS = "has attention sinks"

REFUSED: dict[str, str] = {
    **dict.fromkeys(("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba"), _RECURRENT),
    **dict.fromkeys(("kimi_linear", "lfm2", "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h"), _RECURRENT),
    **dict.fromkeys(("olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"), _RECURRENT),
    **dict.fromkeys(("qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"), _RECURRENT),
    **dict.fromkeys(("nemotron", "stablelm"), "does not tell its attention where packed sequences begin"),
    **dict.fromkeys(("bloom", "falcon", "gpt_neox_japanese", "gptj", "mpt", "openai-gpt", "codegen", "xglm"), _OWN),
    **dict.fromkeys(("bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot"), _ENCODER),
    **dict.fromkeys(
        ("blenderbot-small", "camembert", "data2vec-text", "electra", "ernie", "marian", "mbart"), _ENCODER
    ),
    **dict.fromkeys(("megatron-bert", "mvp", "pegasus", "plbart", "prophetnet", "rembert", "roberta"), _ENCODER),
    **dict.fromkeys(("roberta-prelayernorm", "roc_bert", "roformer", "trocr", "whisper", "xlm"), _ENCODER),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod"), _ENCODER),
    **dict.fromkeys(("blt", "cpmant", "git", "gpt_neo", "reformer"), _OWN),
    "diffllama": "attends twice a layer",
    "doge": "has its own attention mask",
    "hrm_text": "goes through its layers several times",
    "moshi": "does not tell its attention where packed sequences begin",
    "phimoe": "draws its experts at random in training",
    **dict.fromkeys(("gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"), _SINKS),
}
"""Unsupported model types, with what their layers do that packing does not cover."""
SWITCHED = {"got_ocr2", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"}
"""Model types whose windows apply only with `use_sliding_window: true`."""
FROM_LAYER = {"dots1", "got_ocr2", "qwen2", "qwen2_moe", "qwen3"}
"""Model types whose windows begin at layer `max_window_layers`, unless `layer_types` is set."""
EVERY_LAYER = {"ministral3", "mistral", "mixtral", "moshi", "phi3", "phimoe", "qwen3_moe", "starcoder2"}
"""Model types that ignore `layer_types`: a window applies to every layer."""
WINDOWS: dict[Any, dict[str, Any]] = {
    "gemma2": {"sliding_window": 4096, "attn_logit_softcapping": 50.0},
    "vaultgemma": {"sliding_window": 4096, "attn_logit_softcapping": 50.0},
    "mistral": {"sliding_window": 4096},
    "ministral": {"sliding_window": 4096},
    "moshi": {"sliding_window": 3000},
}
"""Defaults for keys missing in config.json, by model type."""
