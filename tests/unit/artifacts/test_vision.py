"""Models of images: their tokens, sizes and processors."""

import json
from typing import Any

import pytest

from rloo_pipeline.artifacts import model_dims, vision
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.demo.vision_model import tiny_vision_model
from rloo_pipeline.errors import UserError

PUBLISHED = {
    "model_type": "gemma3",
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    | {"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304}
    | {"image_size": 896, "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14},
}
"""The keys of a published config.json of Gemma 3 4B, which leaves others out."""


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Any:
    """Folder of a very small Gemma 3."""
    folder = tmp_path_factory.mktemp("gemma")
    tiny_vision_model(folder, 0, model_type="gemma3")
    return folder


def test_tokens_are_found_under_both_names_of_their_keys() -> None:
    renamed = {key.replace("_index", "_id"): value for key, value in PUBLISHED.items()}
    for hf_config in (PUBLISHED, renamed):
        assert vision.tokens_of(hf_config) == (262144, 255999, "token_type_ids")
        assert vision.placeholder_ids(hf_config) == [262144]
    qwen = {"model_type": "qwen3_vl", "image_token_id": 1, "video_token_id": 2}
    assert vision.tokens_of(qwen) == (1, 1, "mm_token_type_ids")
    assert vision.placeholder_ids(qwen) == [1, 2]
    assert vision.placeholder_ids({"model_type": "qwen3"}) == []


def test_a_published_config_json_has_the_sizes_that_it_leaves_out(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    dims = Policy(tmp_path).dimensions
    assert (dims.heads, dims.key_value, dims.vocabulary) == (8 * 256, 4 * 256, 262_208)
    assert dims.vision == pytest.approx(0.42e9, rel=0.05)
    assert dims.parameters == pytest.approx(4.3e9, rel=0.02)
    assert model_dims.context(PUBLISHED) == 131_072


def test_the_sizes_left_out_are_those_of_transformers() -> None:
    from transformers import Gemma3TextConfig

    defaults = Gemma3TextConfig()
    for key, value in model_dims.DEFAULTS["gemma3_text"].items():
        assert getattr(defaults, key) == value


def test_the_vision_encoder_is_counted_by_the_names_of_its_tensors(gemma) -> None:
    dims = Policy(gemma).dimensions
    assert 0.3 < dims.vision / dims.parameters < 0.7


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("preprocessor_config.json", {"do_pan_and_scan": True}, "do_pan_and_scan is true .* set it to false"),
        (
            "preprocessor_config.json",
            {"size": {"height": 28, "width": 28}},
            "makes images of 28 by 28 .* takes 56 by 56",
        ),
        (
            "processor_config.json",
            {"image_seq_length": 256},
            "into 256 tokens, .* set image_seq_length: 16",
        ),
        ("config.json", {"text_config": {"sliding_window": 8}}, r"an image has 16 tokens .* window \(8\)"),
    ],
)
def test_a_processor_that_does_not_belong_to_the_model_is_refused(gemma, tmp_path, file, change, message) -> None:
    for source in gemma.iterdir():
        (tmp_path / source.name).hardlink_to(source)
    assert Policy(tmp_path).processor.image_seq_length == 16
    content = json.loads((tmp_path / file).read_text())
    (tmp_path / file).unlink()
    (tmp_path / file).write_text(json.dumps(content | change))
    with pytest.raises(UserError, match=message):
        Policy(tmp_path).processor


def test_a_text_has_no_token_that_stands_for_a_part_of_an_image(gemma) -> None:
    from rloo_pipeline.config import Dataset
    from rloo_pipeline.data.images import encode

    sources = {"train": {"path": "a.jsonl"}, "eval": {"path": "a.jsonl"}, "image_column": "x"}
    processor = Policy(gemma).processor
    for text, meant in [("<image_soft_token>", "has <image_soft_token>"), ("<start_of_image>", "shows 1 images")]:
        for split, message in ((None, f"spells the special token '{text}'"), (False, meant)):
            dataset = Dataset.model_validate(sources | {"split_special_tokens": split})
            with pytest.raises(UserError, match=f"^a row: .*{message}"):
                encode([{"role": "user", "content": text}], [], dataset, processor, "a row")
