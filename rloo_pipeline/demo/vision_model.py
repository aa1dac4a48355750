"""A Qwen-VL with a quarter of a million random weights, a tokenizer of words and a processor of images.

Names of colours are one token each, and so are the placeholders of images, as in the models of Qwen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from rloo_pipeline.demo.character_model import END, PAD, START, UNKNOWN
from rloo_pipeline.demo.colours import COLOURS, QUESTION

VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
WORDS = ("system", "user", "assistant", "\n", QUESTION, *COLOURS)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with images as content parts, as in Qwen2.5-VL."""
PATCH = {"qwen2_5_vl": 14, "qwen3_vl": 16}
"""Side of a patch of an image in pixels, by type of model; an image token stands for two by two patches."""


def tiny_qwen_vl(
    folder: Path, seed: int, *, model_type: str = "qwen2_5_vl", context: int = 128, initializer_range: float = 0.1
) -> None:
    """Writes an untrained float32 model, its tokenizer and processor; the same arguments give the same bytes.

    Args:
        folder: folder to write to.
        seed: seed of the weights.
        model_type: `qwen2_5_vl` or `qwen3_vl`.
        context: longest prompt and completion in tokens.
        initializer_range: standard deviation of the weights.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokenizer = word_tokenizer(context)
    config = AutoConfig.for_model(model_type, **_sizes(model_type, tokenizer, context, initializer_range))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    side = 4 * PATCH[model_type]
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor" if model_type == "qwen2_5_vl" else "Qwen3VLProcessor",
        "size": {"shortest_edge": side**2, "longest_edge": 4 * side**2},
        "patch_size": PATCH[model_type],
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2, sort_keys=True) + "\n")


def _sizes(model_type: str, tokenizer: PreTrainedTokenizerFast, context: int, spread: float) -> dict[str, Any]:
    """What the configuration of the model sets."""
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    text: dict[str, Any] = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, **layers, **ends}
    text |= {"max_position_embeddings": context, "tie_word_embeddings": True, "initializer_range": spread}
    vision: dict[str, Any] = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
    vision |= {"out_hidden_size": 64, "patch_size": PATCH[model_type], "initializer_range": spread}
    if model_type == "qwen2_5_vl":
        vision |= {"fullatt_block_indexes": [1], "window_size": 56}
    else:
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        text |= {"head_dim": 32}
        rope |= {"mrope_interleaved": True}
    start, end, image, video = (tokenizer.convert_tokens_to_ids(token) for token in VISION)
    ids = {"vision_start_token_id": start, "vision_end_token_id": end, "image_token_id": image, "video_token_id": video}
    return {
        "text_config": {**text, "rope_parameters": rope},
        "vision_config": vision,
        "tie_word_embeddings": True,
        **ids,
    }


def word_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """Returns a tokenizer for which a role, the question and each colour is one token."""
    tokens = [PAD, START, END, UNKNOWN, *VISION, *WORDS]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNKNOWN))
    words = "|".join([*WORDS, r"[\s\S]"]).replace("?", r"\?")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(words), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[START, *VISION],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
        padding_side="left",
    )
