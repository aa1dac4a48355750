"""Which modules of an adapter vLLM is asked to serve, and which it left out."""

from types import SimpleNamespace

import model_folders
import pytest

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Lora
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import engine_arguments, vllm_internals

ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]
ALL = sorted([*ATTENTION, "down_proj", "gate_proj", "up_proj"])


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("all-linear", ALL),
        (["q_proj", "layers.1.mlp.up_proj"], ["q_proj", "up_proj"]),
        (r".*self_attn\.\w+_proj", ATTENTION),
    ],
)
def test_vllm_gets_the_last_names_of_the_modules_that_the_adapter_has(tmp_path, tiny_model, targets, names) -> None:
    """By which it finds fused layers; PEFT's adapter_config.json may have whole paths, or a regular expression."""
    folder = model_folders.adapter(tiny_model, tmp_path / "adapter", 1, target_modules=targets, r=4)
    assert engine_arguments.adapter_arguments(Policy(folder)) == {
        "enable_lora": True,
        "max_lora_rank": 8,
        "lora_target_modules": names,
    }


def test_a_module_that_is_trained_as_a_whole_is_refused(tmp_path, tiny_model) -> None:
    folder = model_folders.adapter(tiny_model, tmp_path / "adapter", 1, modules_to_save=["lm_head"])
    with pytest.raises(UserError, match=r"replaces lm_head \(1 times\) as a whole \(modules_to_save\)"):
        engine_arguments.adapter_arguments(Policy(folder))


def engine(refuses: str = "", wrapped: tuple[str, ...] = ()) -> SimpleNamespace:
    """An engine whose model has wrapped some layers for adapters, and has loaded one for q_proj and o_proj."""
    loras = {f"layers.{layer}.{name}": object() for layer in (0, 1) for name in ("q_proj", "o_proj")}
    manager = SimpleNamespace(
        modules=dict.fromkeys(wrapped),
        get_adapter={7: SimpleNamespace(loras=loras)}.get,
        _get_lora_layer_weights=lambda adapter, name: adapter.loras.get(name),
    )

    def add_lora(_: object) -> None:
        if refuses:
            raise ValueError(refuses)

    model = SimpleNamespace(lora_manager=manager)
    return SimpleNamespace(
        llm_engine=SimpleNamespace(add_lora=add_lora), apply_model=lambda function: [function(model)]
    )


REQUEST = SimpleNamespace(lora_path="policies/00001", lora_int_id=7)
OUTER = ("layers.0.o_proj", "layers.1.o_proj")


def test_modules_that_no_layer_of_the_engine_takes_are_named() -> None:
    with pytest.raises(UserError) as error:
        vllm_internals.load_adapter(engine(wrapped=OUTER), REQUEST)
    assert "policies/00001: vLLM has no layers for the adapter's q_proj (2 times)" in str(error.value)
    assert "update.lora.target_modules" in str(error.value)
    vllm_internals.load_adapter(
        engine(wrapped=(*OUTER, "layers.0.q_proj", "layers.1.q_proj", "layers.0.up_proj")), REQUEST
    )


def test_what_vllm_itself_refuses_gives_a_one_line_error() -> None:
    with pytest.raises(UserError, match="vLLM does not serve this adapter \\(expected target modules"):
        vllm_internals.load_adapter(engine(refuses="expected target modules"), REQUEST)


def test_every_rank_that_the_configuration_allows_is_one_of_vllms_or_below() -> None:
    for rank in (1, 9, 511, 512):
        assert engine_arguments.vllm_lora_rank(Lora(r=rank).r) >= rank
    with pytest.raises(ValueError, match="less than or equal to 512"):
        Lora(r=513)


def test_names_patterns_and_all_linear_are_ways_to_choose_modules() -> None:
    assert not Lora().is_pattern
    assert Lora(target_modules=r".*\.q_proj").is_pattern
    with pytest.raises(ValueError, match="not a regular expression"):
        Lora(target_modules="(q_proj")
