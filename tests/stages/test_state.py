"""A trainer resumed from policy and state takes the same step as one that was not interrupted, to the last bit."""

import errno
import os
from pathlib import Path
from unittest import mock

import model_folders
import pytest
import torch
from trainers import trainer_settings

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Lora
from rloo_pipeline.errors import IncompatibleEngine, UserError, explain
from rloo_pipeline.training import trainer_state
from rloo_pipeline.training.deepspeed_internals import deepspeed_config
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.packing import Sequences
from rloo_pipeline.training.settings import TrainerSettings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engines")]

STEPS = [Sequences([[4, 5, 6 + number]] * 2, [[7, 8, 9, 2], [10, 11 + number]]) for number in range(3)]


def settings(zero_stage: int, dtype: str) -> TrainerSettings:
    return trainer_settings(1e-2, dtype=dtype, weight_decay=0.01, zero_stage=zero_stage)


def step(engine: Engine, number: int) -> None:
    engine.step(STEPS[number], [0, 1], lambda _, logps, mask, __: -(logps * mask).sum())


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("zero_stage", "dtype", "kind"),
    [
        *((stage, dtype, None) for dtype in ("float32", "bfloat16") for stage in (0, 2)),
        *((1, "float32", None), (0, "float16", None), (0, "float32", "qwen3_moe")),
    ],
)
def test_a_trainer_continues_from_its_state_and_policy_alone(tmp_path, tiny_model, zero_stage, dtype, kind) -> None:
    model = model_folders.build(tmp_path / "model", 0, kind) if kind else tiny_model
    uninterrupted = Engine(Policy(model), settings(zero_stage, dtype), 0)
    step(uninterrupted, 0)
    uninterrupted.save_policy(tmp_path / "policy")
    trainer_state.TrainerState(uninterrupted, {"number": 1}).write(tmp_path / "state")
    later = Engine(Policy(tmp_path / "policy"), settings(zero_stage, dtype), 0)
    assert trainer_state.load(later, tmp_path / "state") == {"number": 1}
    weights = sum(file.stat().st_size for file in (tmp_path / "policy").glob("*.safetensors"))
    state = sum(file.stat().st_size for file in (tmp_path / "state").rglob("*") if file.is_file())
    # of each weight in float32 two moments; with 16 bits, or where ZeRO keeps its own, the master weight too
    copies = 2 if (zero_stage, dtype) == (0, "float32") else 3 if dtype == "float32" else 6
    assert state < copies * weights + 60_000
    for number in (1, 2):
        for engine in (uninterrupted, later):
            step(engine, number)
    assert uninterrupted.step_count == later.step_count == 3
    expected = dict(uninterrupted.weights())
    for name, values in later.weights():
        assert torch.equal(values, expected[name]), name


@pytest.mark.parametrize(
    ("zero_stage", "dtype", "lora"),
    [
        *((stage, "float32", None) for stage in (0, 1, 2)),
        *((0, "bfloat16", None), (2, "bfloat16", None), (0, "float16", None), (0, "bfloat16", Lora(r=2))),
    ],
)
def test_a_trainer_that_left_the_gpu_and_returned_takes_the_same_steps(
    tmp_path, tiny_model, zero_stage, dtype, lora
) -> None:
    """On a CPU both places are host memory; storages are emptied and filled as on a GPU."""
    of_both = settings(zero_stage, dtype)._replace(lora=lora)
    unmoved, moved = (Engine(Policy(tiny_model), of_both, 0) for _ in range(2))
    if (zero_stage, dtype) == (0, "float32"):
        for weights in moved.model.parameters():
            weights.data = weights.data.clone()  # out of the file that they are mapped from
    for number in range(3):
        step(unmoved, number)
        step(moved, number)
        moved.leave_gpu()
        stays = all(weights.untyped_storage().nbytes() for weights in moved.model.parameters())
        assert stays == (moved.device.type == "cpu"), "on a CPU it is on no GPU"
        moved.offload()
        tensors = [*moved.model.parameters(), *moved.engine.basic_optimizer.param_groups[0]["params"]]
        assert not any(weights.untyped_storage().nbytes() for weights in tensors)
        moved.offload()
        moved.enter_gpu()
        moved.enter_gpu()
    expected = dict(unmoved.weights())
    for name, values in moved.weights():
        assert torch.equal(values, expected[name]), name
    here, away = (trainer_state.TrainerState(engine, {"number": 1}) for engine in (unmoved, moved))
    moved.offload()
    here.write(tmp_path / "here" / "1")
    away.write(tmp_path / "away" / "1")  # from host memory
    assert files_of(tmp_path / "here") == files_of(tmp_path / "away")


def test_a_trainer_that_cannot_leave_says_so(tiny_model) -> None:
    engine = Engine(Policy(tiny_model), settings(3, "bfloat16"), 0)
    with pytest.raises(IncompatibleEngine):
        engine.offload()
    step(engine, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_of_zero_3_has_the_weights_too(tmp_path, tiny_model, dtype) -> None:
    saved, loaded = (Engine(Policy(tiny_model), settings(3, dtype), 0) for _ in range(2))
    step(saved, 0)
    trainer_state.TrainerState(saved, {"number": 1}).write(tmp_path / "state")
    trainer_state.load(loaded, tmp_path / "state")
    expected = dict(saved.weights())
    for name, values in loaded.weights():
        assert torch.equal(values, expected[name]), name


def test_code_in_a_trainer_state_is_not_run_even_if_its_manifest_is_right(tmp_path, tiny_model) -> None:
    from rloo_pipeline.artifacts import files, manifest

    class Code:
        def __reduce__(self) -> tuple:
            return (tmp_path / "ran").write_text, ("code",)

    engine = Engine(Policy(tiny_model), settings(0, "float32"), 0)
    trainer_state.TrainerState(engine, {"number": 1}).write(tmp_path / "state")
    for file in (tmp_path / "state").rglob("*.pt"):
        torch.save({"module": Code()}, file)
    about = files.read_json(tmp_path / "state" / manifest.MANIFEST)["about"]
    manifest.write_manifest(tmp_path / "state", **about)
    with pytest.raises(UserError, match=r"mp_rank_00_model_states\.pt: .* not a DeepSpeed state"):
        trainer_state.load(engine, tmp_path / "state")
    assert not (tmp_path / "ran").exists()


def test_a_disk_that_turns_read_only_while_a_state_is_written_names_the_state_and_leaves_none(
    tmp_path, tiny_model, monkeypatch
) -> None:
    state = trainer_state.TrainerState(Engine(Policy(tiny_model), settings(0, "float32"), 0), {"number": 1})
    without_a_name = OSError(errno.EROFS, os.strerror(errno.EROFS))
    monkeypatch.setattr(deepspeed_config, "save_reproducibly", mock.Mock(side_effect=without_a_name))
    with pytest.raises(OSError, match="Read-only") as raised:
        state.write(tmp_path / "state")
    assert explain(raised.value).startswith(f"{tmp_path / 'state'}: Read-only file system; run again once it can")
    assert list(tmp_path.iterdir()) == []
