"""The self-check runs once per configuration, and its result is copied with the policies."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from models import SIZES
from transformers import Gemma3Config, Llama4TextConfig, LlamaConfig
from transformers.models.llama import modeling_llama

from rloo_pipeline.artifacts import model_files
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import UserError
from rloo_pipeline.training import plain_model, policy_model, self_check, weight_files
from rloo_pipeline.training.kernels import attention
from rloo_pipeline.training.self_check import against_plain, small

LARGE = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.fixture
def no_results(monkeypatch) -> None:
    """No results in memory, as in a new process."""
    monkeypatch.setattr(self_check, "_results", {})


@pytest.fixture
def times(monkeypatch, no_results) -> list[str]:
    """Model types of the comparisons so far."""
    model_types = []
    plain = against_plain.PlainModel

    def counted(config, *rest):
        model_types.append(config.model_type)
        return plain(config, *rest)

    monkeypatch.setattr(against_plain, "PlainModel", counted)
    return model_types


def test_the_check_runs_once_and_its_result_is_read_from_beside_the_weights_afterwards(
    tiny_model, tmp_path, times, monkeypatch
) -> None:
    unchecked = Path(shutil.copytree(tiny_model, tmp_path / "unchecked"))
    (unchecked / model_files.SELF_CHECK).unlink()
    model = policy_model.load(Policy(unchecked), "float32")
    policy_model.load(Policy(unchecked), "bfloat16")
    assert times == ["qwen3"]
    assert model.self_check.logps < self_check.LOGPS / 10
    policy_model.save_beside(model, tmp_path, Policy(unchecked))
    weight_files.write_together(model, tmp_path)
    assert json.loads((tmp_path / model_files.SELF_CHECK).read_text())["model"] == "Qwen3ForCausalLM"
    monkeypatch.setattr(self_check, "_results", {})
    policy_model.load(Policy(tmp_path), "float32")
    assert times == ["qwen3"]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    policy_model.load(Policy(tmp_path), "float32")
    assert times == ["qwen3"] * 2, "the result does not apply to another model"


def test_a_large_model_is_tried_on_a_small_copy(tmp_path, no_results) -> None:
    config = LlamaConfig(**LARGE)
    copy = small.shrink(config, small.Shrink.HEADS)
    assert sum(weight.numel() for weight in small.build(copy, False, "eager").parameters()) < 4e6
    config.save_pretrained(tmp_path)
    assert self_check.load_or_run(Policy(tmp_path)).logps < self_check.LOGPS / 10


def test_each_kind_of_layer_is_in_the_copy() -> None:
    config = LlamaConfig(num_hidden_layers=9)
    config.layer_types = ["full_attention"] * 4 + ["chunked_attention"] * 5
    copy = small.shrink(config, small.Shrink.HEADS)
    assert (copy.num_hidden_layers, copy.layer_types) == (5, config.layer_types[:5])
    assert config.num_hidden_layers == 9


def test_a_model_whose_images_have_fewer_patches_than_tokens_has_a_copy_for_text() -> None:
    config = Gemma3Config(mm_tokens_per_image=256, vision_config={"image_size": 224, "patch_size": 16})
    copy = small.shrink(config, small.Shrink.HEADS)
    assert (copy.vision_config.image_size, copy.mm_tokens_per_image) == (32, 4)


LLAMA = {key: value for key, value in SIZES.items() if key != "attn_implementation"}


@pytest.mark.parametrize(
    ("name", "message"),
    [("attention", "asks for its own attention mask"), ("rotation", r"packed, log-probs differ by up to \d.*gradient")],
)
def test_a_model_that_computes_something_else_when_packed_is_trained_in_padded_batches(
    name, message, tmp_path, no_results, monkeypatch
) -> None:
    """Attention that makes a mask, and positions that are those in the row."""
    LlamaConfig(**LLAMA).save_pretrained(tmp_path)
    if name == "attention":
        plain = attention.packed_attention

        def masked(module, query, key, value, attention_mask, **named):
            return plain(module, query, key, value, torch.zeros(1), **named)

        monkeypatch.setattr(attention, "packed_attention", masked)
    else:
        _rotate_by_place(monkeypatch)
    checked = self_check.load_or_run(Policy(tmp_path))
    assert checked.form == "padded"
    assert re.search(message, checked.slow)
    assert "slower" in checked.slow


def _rotate_by_place(monkeypatch) -> None:
    plain = modeling_llama.LlamaRotaryEmbedding.forward

    def by_place(self, x, position_ids):
        return plain(self, x, torch.arange(x.shape[1])[None])

    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", by_place)


def _see_the_batch(monkeypatch) -> None:
    plain = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: plain(self, x) * (1 + len(x)))


def _see_the_end(monkeypatch) -> None:
    plain = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: plain(self, x + x.mean(1, keepdim=True)))


def test_a_model_that_counts_positions_along_the_row_is_trained_in_padded_batches() -> None:
    """Llama 4 scales queries in layers without rotary embedding, from `floor_scale` tokens on."""
    of_layers = {"no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"]}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}
    config = Llama4TextConfig(**{**SIZES, **of_layers, **experts, "attn_implementation": None}, attention_chunk_size=8)
    assert self_check.run(config, trust_remote_code=False).form == "padded"
    config.attn_temperature_tuning = False
    assert self_check.run(config, trust_remote_code=False).form == "packed"


def test_a_model_whose_sequences_see_each_other_in_a_batch_is_trained_one_at_a_time(
    tmp_path, no_results, monkeypatch
) -> None:
    LlamaConfig(**LLAMA).save_pretrained(tmp_path)
    _rotate_by_place(monkeypatch)
    _see_the_batch(monkeypatch)
    assert self_check.load_or_run(Policy(tmp_path)).form == "single"


def test_a_model_that_sees_later_tokens_is_refused(tmp_path, no_results, monkeypatch) -> None:
    LlamaConfig(**LLAMA).save_pretrained(tmp_path)
    _see_the_end(monkeypatch)
    with pytest.raises(UserError, match="llama: it does not attend causally"):
        self_check.load_or_run(Policy(tmp_path))


def test_the_check_uses_no_global_random_generator(tmp_path, no_results) -> None:
    LlamaConfig(**LARGE).save_pretrained(tmp_path)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    self_check.load_or_run(Policy(tmp_path))
    assert torch.equal(before, torch.random.get_rng_state())


def test_nothing_is_dropped_where_dropout_is_disabled() -> None:
    from cases import RIGHT, config

    model = small.build(config("opt", RIGHT["opt"]), False, "eager").train()
    ids = torch.tensor([[5, 6, 7, 8]])
    assert not torch.equal(model(ids).logits, model(ids).logits)
    plain_model.remove_dropout(model)
    assert torch.equal(model(ids).logits, model(ids).logits)
