"""Builds a vision-language model with a quarter of a million random weights, a word tokenizer and an image processor.

Each name of a colour is one token, and so is each image placeholder, as in the models of Qwen and Google.
"""

import json
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from rloo_pipeline.config import JSON
from rloo_pipeline.demo.character_model import START, UNKNOWN, save, with_chat, word_level_tokenizer
from rloo_pipeline.demo.colours import COLOURS, QUESTION, SIDE

QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GEMMA_TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
"""Gemma's image tokens, by their names in the tokenizer."""
NEWLINES = ("\n\n\n\n", "\n\n\n", "\n\n")
"""Tokens for Gemma 3, whose processor puts an empty line before and after an image."""
WORDS = ("system", "user", "assistant", "\n", QUESTION, *COLOURS)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ 'IMAGE' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with images as content parts, as in Qwen2.5-VL. IMAGE is replaced by an image's placeholder."""
PATCH = {"qwen2_5_vl": 14, "qwen3_vl": 16, "gemma3": 7}
"""Side of an image patch in pixels, by model type. An image token stands for two by two patches."""
PROCESSORS = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor", "gemma3": "Gemma3Processor"}
GEMMA_PARTS = (SIDE // PATCH["gemma3"] // 2) ** 2
"""Number of tokens per image for Gemma 3, which resizes all images to the same size."""


def tiny_vision_model(
    folder: Path, seed: int, *, model_type: str = "qwen2_5_vl", context: int = 128, initializer_range: float = 0.1
) -> None:
    """Writes an untrained float32 model, its tokenizer and processor. The same arguments give the same bytes.

    Args:
        folder: folder to write to.
        seed: seed of the weights.
        model_type: `qwen2_5_vl`, `qwen3_vl` or `gemma3`.
        context: maximum length of prompt and completion together, in tokens.
        initializer_range: standard deviation of the weights.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokenizer = word_tokenizer(context, model_type)
    config = AutoConfig.for_model(model_type, **_sizes(model_type, tokenizer, context, initializer_range))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        if model_type == "gemma3":  # transformers initializes these with zeros, which would block the images
            torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=initializer_range)
    save(folder, model, tokenizer)
    _write(folder / "preprocessor_config.json", _image_processor(model_type))
    if model_type == "gemma3":
        _name_as_published(folder / "model.safetensors")
        processor = {"processor_class": PROCESSORS[model_type], "image_seq_length": GEMMA_PARTS}
        _write(folder / "processor_config.json", processor)


def _name_as_published(file: Path) -> None:
    """Renames the tensors of Gemma's vision encoder as in its published files, which is what vLLM reads."""
    from safetensors.torch import load_file, save_file

    named = {name.replace("vision_tower.", "vision_tower.vision_model."): it for name, it in load_file(file).items()}
    save_file(named, file, metadata={"format": "pt"})


def _write(file: Path, content: JSON) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _image_processor(model_type: str) -> JSON:
    """Content of preprocessor_config.json."""
    both = {"processor_class": PROCESSORS[model_type]}
    if model_type == "gemma3":
        return both | {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": SIDE, "width": SIDE}}
    side = 4 * PATCH[model_type]
    return both | {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": side**2, "longest_edge": 4 * side**2},
        "patch_size": PATCH[model_type],
        "temporal_patch_size": 2,
        "merge_size": 2,
    }


def _sizes(model_type: str, tokenizer: PreTrainedTokenizerFast, context: int, spread: float) -> JSON:
    """Settings for the model's configuration."""
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    text: JSON = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, **layers, **ends}
    text |= {"max_position_embeddings": context, "tie_word_embeddings": True, "initializer_range": spread}
    vision: JSON = {"hidden_size": 64, "intermediate_size": 128, "patch_size": PATCH[model_type]}
    vision |= {"initializer_range": spread}
    both = {"text_config": text, "vision_config": vision, "tie_word_embeddings": True}
    if model_type == "gemma3":
        return both | _of_gemma(tokenizer, text, vision)
    return both | _of_qwen(model_type, tokenizer, text, vision)


def _of_qwen(model_type: str, tokenizer: PreTrainedTokenizerFast, text: JSON, vision: JSON) -> JSON:
    """Completes the settings whose names differ between Qwen2.5-VL and Qwen3-VL. Returns the ids of placeholders."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision |= {"depth": 2, "num_heads": 2, "out_hidden_size": text["hidden_size"]}
    if model_type == "qwen2_5_vl":
        vision |= {"fullatt_block_indexes": [1], "window_size": 56}
    else:
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        text |= {"head_dim": 32}
        rope |= {"mrope_interleaved": True}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    text |= {"rope_parameters": rope}
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in zip(names, QWEN_TOKENS, strict=True)}


def _of_gemma(tokenizer: PreTrainedTokenizerFast, text: JSON, vision: JSON) -> JSON:
    """The counterpart of `_of_qwen` for Gemma 3, with one sliding-window layer and one full-attention layer."""
    vision |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE, "vision_use_head": False}
    text |= {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": GEMMA_PARTS + 4}
    text |= {"layer_types": ["sliding_attention", "full_attention"]}
    names = {"boi_token": "boi_token_index", "eoi_token": "eoi_token_index", "image_token": "image_token_index"}
    ids = {names[name]: tokenizer.convert_tokens_to_ids(token) for name, token in GEMMA_TOKENS.items()}
    return ids | {"mm_tokens_per_image": GEMMA_PARTS, "initializer_range": text["initializer_range"]}


def word_tokenizer(context: int, model_type: str = "qwen2_5_vl") -> PreTrainedTokenizerFast:
    """Returns a tokenizer in which each role, the question and each colour is one token."""
    gemma = model_type == "gemma3"
    placeholders = tuple(GEMMA_TOKENS.values()) if gemma else QWEN_TOKENS
    words = (*(NEWLINES if gemma else ()), *WORDS)
    tokenizer = word_level_tokenizer([*placeholders, *words], [word.replace("?", r"\?") for word in words])
    image = GEMMA_TOKENS["boi_token"] if gemma else "<|vision_start|><|image_pad|><|vision_end|>"
    special = {"start_token": START, **GEMMA_TOKENS} if gemma else [START, *placeholders]
    return with_chat(tokenizer, context, CHAT_TEMPLATE.replace("IMAGE", image), special, unk_token=UNKNOWN)
