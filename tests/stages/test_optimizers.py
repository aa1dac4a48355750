"""Steps of each optimizer are its library's in a plain loop, and go on from a saved state as if never stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import mini
from torch import Tensor
from trainers import trainer_settings

from rloo_pipeline.artifacts import manifest
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Config, Offload
from rloo_pipeline.demo.character_model import tiny_qwen3
from rloo_pipeline.runtime import devices
from rloo_pipeline.training import policy_model, trainer_state
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences
from rloo_pipeline.training.settings import LearningRate, TrainerSettings

pytestmark = pytest.mark.usefixtures("engines")

RATE, BETAS, DECAY, STEPS = 1e-3, (0.9, 0.99), 0.1, 3
SIZES = {"hidden_size": 64, "layers": 2, "heads": 2, "key_value_heads": 1, "head_dim": 32, "intermediate_size": 96}
"""Some weights have more than the 4096 numbers from which 8-bit states are used, some fewer; none is square."""
IDS = torch.randint(4, 20, (4, 16), generator=torch.Generator().manual_seed(1)).tolist()
SEQUENCES = Sequences([row[:6] for row in IDS], [row[6:] for row in IDS])
HERE, STATE, ALL = Offload(), Offload(optimizer="cpu"), Offload(optimizer="cpu", parameters="cpu")
CASES = [
    *[(name, "float32", 0, HERE) for name in ("adamw_8bit", "adafactor", "muon")],
    *[(name, "bfloat16", 2, HERE) for name in ("adamw_8bit", "adafactor", "muon")],
    *[("muon", "float32", 1, HERE), ("adamw_8bit", "bfloat16", 1, HERE), ("adafactor", "float16", 0, HERE)],
    *[
        ("adamw", dtype, stage, offload)
        for dtype in ("float32", "bfloat16")
        for stage, offload in ((1, STATE), (2, STATE), (3, STATE), (3, ALL))
    ],
]


def settings(optimizer: str, dtype: str, zero_stage: int, offload: Offload = HERE) -> TrainerSettings:
    falling = {"learning_rate": LearningRate(RATE, "linear", 0, 6, 0.0), "adam_betas": BETAS, "weight_decay": DECAY}
    of_stage = {"zero_stage": zero_stage, "offload": offload, "max_tokens_per_micro_batch": 16}
    return trainer_settings(dtype=dtype, optimizer=optimizer, **of_stage, **falling)


def loss_of(rows: Any, logps: Tensor, mask: Tensor, _: Tensor) -> Tensor:
    """A loss whose gradient is clipped, with rows of opposite gradients."""
    weights = torch.tensor([-0.5 if row % 3 else 1.0 for row in rows], device=logps.device)
    return -((logps * mask).sum(-1) * weights).sum() / 2


def plain_optimizers(name: str, weights: dict[str, torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    """The library's optimizers over float32 weights, as their documentation has them; norms do not decay."""
    import bitsandbytes
    from transformers.optimization import Adafactor

    groups = {
        key: {"params": [value], "weight_decay": 0.0 if "norm" in key else DECAY} for key, value in weights.items()
    }
    all_weights, adam = list(groups.values()), {"lr": RATE, "betas": BETAS}
    if name == "adamw":
        return [torch.optim.AdamW(all_weights, **adam)]
    if name == "adamw_8bit":
        return [bitsandbytes.optim.AdamW8bit(all_weights, **adam)]
    if name == "adafactor":
        options = {"scale_parameter": False, "relative_step": False}
        return [Adafactor(all_weights, lr=RATE, **options)]
    inner = {key for key, value in weights.items() if value.ndim == 2 and "embed" not in key and "lm_head" not in key}
    muon = torch.optim.Muon([groups[key] for key in inner], RATE, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW([group for key, group in groups.items() if key not in inner], **adam)]


def plain_loop(folder: Path, name: str, dtype: str) -> dict[str, Tensor]:
    """Weights after STEPS steps on float32 copies, with gradients of the model in its own format."""
    model = policy_model.load(Policy(folder), dtype).to(devices.device_type())
    module = TokenLogProbs(model, 1.0)
    copies = {key: torch.nn.Parameter(value.detach().float()) for key, value in model.named_parameters()}
    optimizers = plain_optimizers(name, copies)
    for step in range(STEPS):
        total = {key: torch.zeros_like(value) for key, value in copies.items()}
        for row in range(len(IDS)):
            module.zero_grad()
            module(
                SEQUENCES.pick([row]).to(model.device), lambda _, *others, row=row: loss_of([row], *others)
            ).backward()
            for key, value in model.named_parameters():
                total[key] += value.grad.float()
        norm = float(torch.stack([gradient.norm() for gradient in total.values()]).norm())
        assert norm > 1
        for key, copy in copies.items():
            copy.grad = total[key] / norm
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = RATE * (1 - step / 6)
            optimizer.step()
        with torch.no_grad():
            for key, value in model.named_parameters():
                value.copy_(copies[key])
    return {key: copy.detach() for key, copy in copies.items()}


def orthogonalize_in_float32(monkeypatch) -> None:
    """Muon's iteration, which torch does in bfloat16, where its result differs by percents between kinds of CPU."""
    from torch.optim import _muon

    class Float32(Tensor):
        def bfloat16(self, *_: object, **__: object) -> Tensor:
            return self.as_subclass(Tensor).clone()

    iterate = _muon._zeropower_via_newtonschulz
    monkeypatch.setattr(
        _muon, "_zeropower_via_newtonschulz", lambda grad, *rest: iterate(grad.float().as_subclass(Float32), *rest)
    )


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step(SEQUENCES, range(len(IDS)), loss_of)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    tiny_qwen3(folder, 0, **SIZES)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "zero_stage", "offload"), CASES)
def test_steps_are_the_librarys_and_a_resumed_state_has_the_same_bytes(
    model, tmp_path, monkeypatch, name, dtype, zero_stage, offload
) -> None:
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param

    monkeypatch.setattr(zero.Init, "param_id", 0)
    orthogonalize_in_float32(monkeypatch)
    options = settings(name, dtype, zero_stage, offload)
    engine = Engine(Policy(model), options, 0)
    steps(engine, STEPS)
    if dtype != "float16":  # whose loss is scaled: the plain loop would have to do the same
        expected, distance, length = plain_loop(model, name, dtype), 0.0, 0.0
        for (key, value), old in zip(
            engine.model.named_parameters(),
            policy_model.load(Policy(model), dtype).to(engine.device).parameters(),
            strict=True,
        ):
            copy = value if engine.zero_stage == 0 else safe_get_full_fp32_param(value).view(old.shape)
            distance += float((copy.detach() - expected[key]).norm() ** 2)
            length += float((expected[key] - old.float()).norm() ** 2)
        # Muon scales small directions of a gradient up, with their rounding; ZeRO 3 rounds a gradient near 0 in another
        # way, with or without offload
        in_16_bits = 3e-2 if name == "muon" else 2e-3
        tolerance = in_16_bits if dtype == "bfloat16" else 2e-3 if zero_stage == 3 else 1e-4
        assert (distance / length) ** 0.5 < tolerance
    engine.save_policy(tmp_path / "policy")
    trainer_state.TrainerState(engine, {}).write(tmp_path / "state")
    engine.policy = Policy(tmp_path / "policy")  # as the next update sets it
    monkeypatch.setattr(zero.Init, "param_id", 0)  # which counts the weights of a process, as of one engine
    again = Engine(Policy(tmp_path / "policy"), options, 0)
    trainer_state.load(again, tmp_path / "state")
    for number, trainer in enumerate((engine, again)):
        steps(trainer, 1)
        trainer.save_policy(tmp_path / str(number) / "policy")
        trainer_state.TrainerState(trainer, {}).write(tmp_path / str(number) / "state")
    for kind in ("policy", "state"):
        first, second = (manifest.digest(tmp_path / rank / kind / manifest.MANIFEST) for rank in ("0", "1"))
        assert first == second


@pytest.mark.parametrize(
    ("name", "deepspeed", "dtype", "sentence"),
    [
        ("muon", {"processes": 2}, "bfloat16", "update.optimizer: muon needs whole matrices"),
        ("adafactor", {"processes": 2, "zero_stage": 1}, "float32", "adafactor needs whole matrices"),
        ("adamw_8bit", {"zero_stage": 3}, "float32", "adamw_8bit cannot be used with deepspeed.zero_stage: 3"),
        ("muon", {"zero_stage": 2, "offload": {"optimizer": "cpu"}}, "float32", "used with deepspeed.offload"),
        ("adamw", {"offload": {"optimizer": "cpu"}}, "float32", "offload.optimizer needs zero_stage 1, 2 or 3"),
        ("adamw", {"zero_stage": 3, "offload": {"parameters": "cpu"}}, "float32", "offload.parameters needs"),
        ("adamw", {"zero_stage": 2, "offload": {"optimizer": "nvme"}}, "float32", "nvme needs zero_stage: 3"),
        (
            "adamw",
            {"zero_stage": 3, "offload": {"optimizer": "cpu", "parameters": "nvme"}},
            "bfloat16",
            "optimizer: nv",
        ),
        (
            "adamw",
            {"zero_stage": 3, "offload": {"optimizer": "nvme", "parameters": "nvme"}},
            "float32",
            "dtype: float32",
        ),
        ("adamw", {"zero_stage": 3, "offload": {"optimizer": "nvme"}}, "float16", "dtype: float16 cannot"),
        ("adamw", {"nvme_path": "/scratch"}, "float32", "nvme_path has no effect"),
    ],
)
def test_what_an_optimizer_cannot_do_is_refused(name, deepspeed, dtype, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        Config(**mini(update={"optimizer": name}, deepspeed=deepspeed, model={"dtype": dtype}))


def test_matrices_need_one_process_only_where_zero_splits_them() -> None:
    for name in ("adafactor", "muon"):
        Config(**mini(update={"optimizer": name}, deepspeed={"processes": 2}, model={"dtype": "float32"}))
        Config(**mini(update={"optimizer": name}, deepspeed={"zero_stage": 2}, model={"dtype": "bfloat16"}))
