"""QLoRA: policy 0 is the model rounded to NF4, and the trainer's 4-bit form has exactly its numbers."""

import model_folders
import pytest
import torch
from helpers import mini
from trainers import trainer_settings
from transformers import AutoModelForCausalLM

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Config, Lora
from rloo_pipeline.demo.character_model import tiny_qwen3
from rloo_pipeline.errors import UserError
from rloo_pipeline.training import forward_only, plain_model, policy_model, quantized, trainer_state
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences
from rloo_pipeline.training.settings import TrainerSettings

pytestmark = pytest.mark.usefixtures("engines")

SIZES = {"hidden_size": 64, "layers": 2, "heads": 2, "key_value_heads": 1, "head_dim": 32, "intermediate_size": 128}
IDS = torch.randint(4, 20, (4, 16), generator=torch.Generator().manual_seed(1)).tolist()
SEQUENCES = Sequences([row[:6] for row in IDS], [row[6:] for row in IDS])


def settings(dtype: str, zero_stage: int = 0) -> TrainerSettings:
    lora = Lora(r=4, target_modules=["q_proj", "up_proj"])
    return trainer_settings(1e-2, dtype=dtype, zero_stage=zero_stage, lora=lora, quantization="nf4")


def step(engine: Engine) -> None:
    engine.step(SEQUENCES, range(4), lambda _, logps, mask, __: -(logps * mask).sum() / 9)


def logps(folder, dtype: str) -> torch.Tensor:
    model = TokenLogProbs(forward_only.load(Policy(folder), dtype), 1.0)
    return torch.tensor(forward_only.score(model, SEQUENCES, 100, "log-probs").logps)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trainer_in_4_bits_and_policy_in_its_format_have_the_same_weights(tmp_path, dtype) -> None:
    tiny_qwen3(tmp_path / "model", 0, **SIZES)
    zero, base = tmp_path / "zero", tmp_path / "model"
    zero.mkdir()
    quantized.write_rounded(Policy(base), zero, dtype)
    policy_model.copy_side_files(base, zero)
    Policy(zero).weights
    engine = Engine(Policy(zero), settings(dtype, 1), 0)
    names = {type(module).__name__ for module in engine.model.modules()}
    assert "Linear4bit" in names
    close = {"atol": 1e-4 if dtype == "float32" else 0.05, "rtol": 0.0}
    torch.testing.assert_close(engine.logps(SEQUENCES), logps(zero, dtype), **close)
    assert (logps(zero, dtype) - logps(base, dtype)).abs().max() > 3 * close["atol"], "rounding to 4 bits is visible"
    for _ in range(3):
        step(engine)
    engine.save_policy(tmp_path / "one")
    trainer_state.TrainerState(engine, {}).write(tmp_path / "state")
    trained = logps(tmp_path / "one", dtype)
    torch.testing.assert_close(engine.logps(SEQUENCES), trained, **close)
    assert (trained - logps(zero, dtype)).abs().max() > 3 * close["atol"], "the adapter has learned"
    again = Engine(Policy(tmp_path / "one"), settings(dtype, 1), 0)
    trainer_state.load(again, tmp_path / "state")
    for number, trainer in enumerate((engine, again)):
        step(trainer)
        trainer.save_policy(tmp_path / f"policy{number}")
    assert Policy(tmp_path / "policy0").digest == Policy(tmp_path / "policy1").digest


def test_a_checkpoint_in_4_bits_keeps_its_codes_and_its_layers_in_16_bits(tmp_path) -> None:
    base, zero = model_folders.build_in_nf4(tmp_path / "model", 0), tmp_path / "zero"
    zero.mkdir()
    quantized.write_rounded(Policy(base), zero, "float32")
    checkpoint = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).dequantize()
    policy_0 = plain_model.load_plain(Policy(zero), "float32")
    in_trainer = dict(plain_model.load_nf4(Policy(zero), "float32").named_modules())
    for name, weight in checkpoint.named_parameters():
        assert torch.equal(policy_0.get_parameter(name).bfloat16(), weight), name
        layer = name.removesuffix(".weight")
        in_4_bits = layer.endswith("_proj") and not layer.endswith("up_proj")
        assert (type(in_trainer[layer]).__name__ == "Linear4bit") == in_4_bits, name
    quantized.write_rounded(Policy(base), zero, "bfloat16")
    for name, weight in plain_model.load_plain(Policy(zero), "bfloat16").named_parameters():
        torch.testing.assert_close(weight.float(), checkpoint.get_parameter(name).float(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_twice_is_rounding_once(dtype) -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    once = quantized.round_to_nf4(weight, dtype)
    assert torch.equal(quantized.round_to_nf4(once, dtype), once)
    assert len(once[0].unique()) <= 16
    assert 0.01 < float((once - weight).float().norm() / weight.float().norm()) < 0.15


def test_rows_that_bitsandbytes_computes_wrongly_are_refused(tmp_path) -> None:
    tiny_qwen3(tmp_path / "model", 0, **{**SIZES, "intermediate_size": 96})
    with pytest.raises(UserError, match=r"down_proj.weight have 96 numbers, not a multiple of 64"):
        quantized.write_rounded(Policy(tmp_path / "model"), tmp_path, "float32")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"warmstart": {"sft": None}}, "model.quantization needs update.lora"),
        ({"update": {"lora": {}}, "deepspeed": {"zero_stage": 3}}, "nf4 cannot be used with deepspeed.zero_stage: 3"),
    ],
)
def test_what_cannot_be_held_in_4_bits_is_refused(changes, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        Config(**mini(model={"quantization": "nf4"}, **changes))
