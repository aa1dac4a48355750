"""Very small models of several classes as folders, with weights large enough that each of them matters."""

from pathlib import Path
from typing import Any

CONTEXT = 256


def build(folder: Path, seed: int, kind: str, **_: Any) -> Path:
    """Writes a model of this kind with the demo's tokenizer; models of different seeds differ in every weight."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from rloo_pipeline.demo.character_model import character_tokenizer

    tokenizer = character_tokenizer(CONTEXT)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(configuration(kind, tokenizer), dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def adapter(base: Path, folder: Path, seed: int) -> Path:
    """Writes a LoRA adapter on a model, with an effect as large as that of the model's own weights."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    made = peft.get_peft_model(
        model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "o_proj", "up_proj"])
    )
    chance = torch.Generator().manual_seed(seed)
    for name, weights in made.named_parameters():
        if "lora_" in name:
            weights.data = torch.randn(weights.shape, generator=chance) / 4
    made.peft_config["default"].base_model_name_or_path = str(base)
    made.save_pretrained(folder)
    return folder


def configuration(kind: str, tokenizer: Any) -> Any:
    """The configuration of a kind: `untied` (Qwen3), `qwen3_moe`, `mixtral`, whose experts vLLM pads, or `olmo2`, which
    vLLM runs with the layers of transformers.
    """
    import transformers

    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": CONTEXT}
    common = {**ends, **sizes, **heads, "initializer_range": 0.3}
    experts = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
    if kind == "untied":
        return transformers.Qwen3Config(**common, tie_word_embeddings=False)
    if kind == "qwen3_moe":
        return transformers.Qwen3MoeConfig(**common, **experts, num_experts=4, moe_intermediate_size=32)
    if kind == "olmo2":
        return transformers.Olmo2Config(**{**common, "num_key_value_heads": 2}, tie_word_embeddings=False)
    return transformers.MixtralConfig(**common, **experts, num_local_experts=4, sliding_window=None)
