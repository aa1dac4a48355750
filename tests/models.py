"""Very small models with random weights, in memory only."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rloo_pipeline.training.kernels import attention

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "attn_implementation": attention.NAME,
}


def qwen3(tied: bool = True, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """A Qwen3 model that is the same in every call."""
    attention.register()
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied)).to(dtype)


def gradient(model: torch.nn.Module) -> torch.Tensor:
    """The gradient of all weights as one vector; resets it in the model."""
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return gradient
