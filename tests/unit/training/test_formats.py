"""A number format that a machine does not train in is one sentence, before anything is loaded or sampled."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import MINI, mini

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.commands import doctor
from rloo_pipeline.config import Config
from rloo_pipeline.config.loading import ConfigArguments
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import groups
from rloo_pipeline.training import engine, formats


@pytest.fixture
def unable(monkeypatch) -> None:
    """A machine that trains in float32 alone, by the word of DeepSpeed's accelerator."""
    from deepspeed import accelerator

    accelerator_stub = SimpleNamespace(is_fp16_supported=lambda: False, is_bf16_supported=lambda: False)
    monkeypatch.setattr(accelerator, "get_accelerator", lambda: accelerator_stub)
    monkeypatch.setattr(formats.devices, "has_gpu", lambda: False)
    monkeypatch.setattr(formats.devices, "device_type", lambda: "cpu")


def sampler_in(dtype: str, monkeypatch) -> None:
    """Loads a sampler; fails the test if an engine starts."""
    monkeypatch.setattr(Policy, "digest", "")
    monkeypatch.setattr(groups.plain_model, "check_tensors", lambda *_: None)
    monkeypatch.setattr(groups, "Sampler", lambda *_: pytest.fail("started"))
    config = Config(**mini(model={"dtype": dtype}))
    groups.load_sampler(Policy(Path("policy")), config, SimpleNamespace(longest=10, about_images=None), 10)


@pytest.mark.usefixtures("unable")
@pytest.mark.parametrize(("dtype", "other"), [("float16", "bfloat16"), ("bfloat16", "float16")])
def test_what_deepspeed_does_not_train_in_is_refused(dtype, other) -> None:
    with pytest.raises(UserError, match=rf"{dtype} cannot be trained on this machine; set model.dtype to {other} or"):
        formats.check_dtype(dtype)
    formats.check_dtype("float32")


@pytest.mark.parametrize(
    ("capabilities", "right"),
    [(["7.5"], False), (["8.0", "8.0"], True), (["8.0", "7.5"], False), (["7.5", "8.0"], False), ([], True)],
)
def test_an_old_gpu_has_no_bfloat16_which_deepspeed_would_emulate(capabilities, right, monkeypatch) -> None:
    monkeypatch.setattr(formats.devices, "device_type", lambda: "cuda")
    monkeypatch.setattr(formats.devices, "gpu_facts", {"compute_cap": capabilities}.__getitem__)
    assert formats.trains_in("bfloat16") == right
    assert formats.remedy("bfloat16") == f"set model.dtype to float16 or float32, or use {formats.NEWER_GPU}"


SUPPORTED = ["sm_75", "sm_80", "sm_90a", "sm_100", "compute_120"]
"""An arch list of torch, as in its wheels."""
TOO_OLD = r"capability 7.0, .* needs 7.5; use a newer GPU .*CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("capabilities", "right"),
    [(["7.0"], False), (["7.0", "8.0"], False), (["7.5"], True), (["12.0"], True), ([], True)],
)
def test_a_gpu_for_which_torch_has_no_kernels_is_refused_in_every_format(capabilities, right, monkeypatch) -> None:
    monkeypatch.setattr(formats.devices, "device_type", lambda: "cuda")
    monkeypatch.setattr(formats.devices, "gpu_facts", {"compute_cap": capabilities}.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: SUPPORTED)
    with nullcontext() if right else pytest.raises(UserError, match=TOO_OLD):
        formats.check_dtype("float32")


def test_a_gpu_whose_driver_tells_nothing_is_not_refused(monkeypatch) -> None:
    monkeypatch.setattr(formats.devices, "device_type", lambda: "cuda")
    monkeypatch.setattr(formats.devices, "gpu_facts", lambda _: [])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
    formats.check_dtype("bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_no_rollout_begins_on_a_gpu_for_which_torch_has_no_kernels(dtype, monkeypatch) -> None:
    monkeypatch.setattr(formats.devices, "has_gpu", lambda: True)
    monkeypatch.setattr(formats.devices, "device_type", lambda: "cuda")
    monkeypatch.setattr(formats.devices, "gpu_facts", lambda _: ["7.0"])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: SUPPORTED)
    with pytest.raises(UserError, match=TOO_OLD):
        sampler_in(dtype, monkeypatch)


def test_a_gpu_that_is_not_used_takes_no_format_away(monkeypatch) -> None:
    """With the packages for CPUs, or an empty CUDA_VISIBLE_DEVICES."""
    monkeypatch.setattr(formats.devices, "has_gpu", lambda: True)
    monkeypatch.setattr(formats.devices, "device_type", lambda: "cpu")
    monkeypatch.setattr(formats.devices, "gpu_facts", lambda _: ["7.5"])
    assert formats.trains_in("bfloat16")


@pytest.mark.parametrize(("dtype", "has_gpu"), [("float16", False), ("bfloat16", True)])
def test_no_engine_is_started_and_no_policy_loaded_for_it(dtype, has_gpu, unable, monkeypatch) -> None:
    monkeypatch.setattr(formats.devices, "has_gpu", lambda: has_gpu)
    monkeypatch.setattr(formats.devices, "device_type", lambda: "cuda" if has_gpu else "cpu")
    monkeypatch.setattr(formats.devices, "gpu_facts", lambda _: ["7.5"])
    with pytest.raises(UserError, match=f"{dtype} cannot be trained"):
        sampler_in(dtype, monkeypatch)
    monkeypatch.setattr(engine.policy_model, "load_trainable", lambda *_: pytest.fail("loaded"))
    with pytest.raises(UserError, match=f"{dtype} cannot be trained"):
        engine.Engine(Policy(Path("policy")), SimpleNamespace(dtype=dtype), 0)


@pytest.mark.usefixtures("unable")
def test_doctor_says_so(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(UserError):
        doctor.doctor(ConfigArguments(MINI, ["model={dtype: float16}"]), tmp_path, None, False)
    output = capsys.readouterr().out
    assert "float16 cannot be trained on this machine" in output
    assert "set model.dtype to bfloat16 or float32" in output
