"""A run that vLLM cannot sample on a GPU ends before anything is paid for, and the same run goes on on CPUs."""

import pytest
from helpers import mini

from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.stages import warmstart as stage
from rloo_pipeline.training import model_support

REFUSED = "model.dtype: float32 cannot be used with update.lora on a GPU, .* set model.dtype: bfloat16, or remove"
LORA = {"lora": {"target_modules": ["q_proj"]}}


def test_an_adapter_in_float32_is_refused_and_others_are_not() -> None:
    with pytest.raises(UserError, match=REFUSED):
        model_support.check_dtype_on_gpu("float32")
    for dtype in ("bfloat16", "float16"):
        model_support.check_dtype_on_gpu(dtype)


@pytest.mark.parametrize(
    ("device", "update", "message"),
    [
        ("cuda", LORA, REFUSED),
        ("cuda", {}, "has no manifest.json"),
        ("cpu", LORA, "has no manifest.json"),
    ],
)
def test_warmstart_refuses_it_before_it_reads_the_model_where_there_is_a_gpu(
    tmp_path, monkeypatch, device, update, message
) -> None:
    monkeypatch.setattr(stage.devices, "device_type", lambda: device)
    config = Config(**mini(update=update))
    with pytest.raises((UserError, OSError), match=message):
        stage.warmstart(config, tmp_path, tmp_path, tmp_path / "policy")
