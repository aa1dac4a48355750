"""Very small models of several classes as folders, with weights large enough that each of them matters."""

from pathlib import Path
from typing import Any

CONTEXT = 256
EXPERTS = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
HALF = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "num_key_value_heads": 2, "head_dim": 64, "moe_intermediate_size": 32, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "untied": {"tie_word_embeddings": False},
    "wide": {"tie_word_embeddings": False, "hidden_size": 64, "intermediate_size": 128},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32},
    "mixtral": {**EXPERTS, "num_local_experts": 4, "sliding_window": None},
    "olmo2": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "mistral": {"sliding_window": 16, "tie_word_embeddings": False},
    "gemma2": {**HALF, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 32},
    "gemma3_text": {**HALF, "query_pre_attn_scalar": 32},
    "gpt_oss": {
        **EXPERTS, **HALF, "num_local_experts": 8, "intermediate_size": 64, "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
    "deepseek_v3": {**EXPERTS, **LATENT},
    "stablelm": {"num_key_value_heads": 2, "hidden_size": 64, "tie_word_embeddings": False},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "granitemoehybrid": {
        **EXPERTS, "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16,
        "num_local_experts": 4, "shared_intermediate_size": 48, "num_attention_heads": 1,
    },
    "qwen3_next": {
        **EXPERTS, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2,
        "linear_num_key_heads": 1, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    },
}  # fmt: skip
"""What the configuration of a kind has beside the common sizes."""


def build(folder: Path, seed: int, kind: str, **_: Any) -> Path:
    """Writes a model of this kind with the demo's tokenizer; models of different seeds differ in every weight."""
    import torch
    from transformers import AutoModelForCausalLM

    from rloo_pipeline.demo.character_model import character_tokenizer, save

    tokenizer = character_tokenizer(CONTEXT)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(configuration(kind, tokenizer), dtype=torch.float32)
    save(folder, model, tokenizer)
    return folder


def build_in_nf4(folder: Path, seed: int, in_16_bits: str = "up_proj", **_: Any) -> Path:
    """Writes a model as a checkpoint in NF4 with quantized scales, as `-bnb-4bit` ones are; one kind of layer and the
    output layer stay in 16 bits.
    """
    import shutil

    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    build(folder / "plain", seed, "wide")
    quantization: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    options = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["lm_head", in_16_bits], **quantization)
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype="bfloat16", quantization_config=options)
    model.save_pretrained(folder)
    for file in (folder / "plain").iterdir():
        if not (folder / file.name).exists():
            shutil.copy(file, folder)
    shutil.rmtree(folder / "plain")
    return folder


def adapter(base: Path, folder: Path, seed: int, **options: Any) -> Path:
    """Writes a LoRA adapter on a model, by default on all linear layers, with an effect as large as that of the model's
    own weights.
    """
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    adapter = peft.get_peft_model(model, peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    for name, weights in adapter.named_parameters():
        if "lora_" in name:
            weights.data = torch.randn(weights.shape, generator=generator) / 4
    adapter.peft_config["default"].base_model_name_or_path = str(base)
    adapter.save_pretrained(folder)
    return folder


def configuration(kind: str, tokenizer: Any) -> Any:
    """The configuration of a kind: `untied` and `wide` (Qwen3), `olmo2`, which vLLM runs with the layers of
    transformers, or a type of model in transformers.
    """
    from transformers import AutoConfig

    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": CONTEXT}
    common = {**ends, **sizes, **heads, "initializer_range": 0.3}
    return AutoConfig.for_model("qwen3" if kind in {"untied", "wide"} else kind, **{**common, **KINDS[kind]})
