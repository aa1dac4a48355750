"""How DeepSpeed is told to work: its configuration, how gradients are clipped, the bytes of a saved state, and what is
not to be compiled.
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


BUCKET = 50_000_000
"""Gradients that ZeRO sums up over the processes at once."""
NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""DeepSpeed's names of number formats."""


def stage_of(dtype: str, zero_stage: int) -> int:
    """The ZeRO stage that DeepSpeed is told: in 16 bits 1 at least. What it has without ZeRO adds gradients in 16 bits,
    takes a step of the optimizer on zeros when it is made, so that the first real one is a quarter too short, and does
    not scale a float16 loss.
    """
    return zero_stage if dtype == "float32" else max(zero_stage, 1)


def configuration(dtype: str, zero_stage: int, max_grad_norm: float, communication: str) -> dict[str, Any]:
    """DeepSpeed's configuration. The caller's `step()` is the only accumulation boundary, and gradients add up in
    float32: over micro-batches always, over processes where `communication` is float32 and not `model`.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage_of(dtype, zero_stage),
            "overlap_comm": False,
            "reduce_bucket_size": BUCKET,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "data_types": {"grad_accum_dtype": "fp32"},
        # DeepSpeed's default is the model's format, whatever gradients add up in
        "communication_data_type": NAMES[dtype if communication == "model" else communication],
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16", "hysteresis": 1},
        "steps_per_print": 10**9,
    }


def clip_plainly(engine: DeepSpeedEngine, max_grad_norm: float) -> None:
    """Has gradients in plain float32 (ZeRO 0) clipped as DeepSpeed does, which is the same on all ranks, but where
    there is nothing to clip they are left alone, and DeepSpeed remembers the norm as it does with ZeRO.
    """
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    def clip() -> None:
        trained = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
        norm = get_total_norm([parameter.grad for parameter in trained if parameter.grad is not None])
        engine._global_grad_norm = float(norm)
        if max_grad_norm / (engine._global_grad_norm + 1e-6) < 1:
            clip_grads_with_norm_(trained, max_grad_norm, norm)

    engine.clip_fp32_gradients = clip


def sums_by_itself(engine: DeepSpeedEngine) -> bool:
    """Whether the optimizer gets its gradients by the sums over processes, and so with one process too: ZeRO, but for
    that of stage 1 in bfloat16.
    """
    return hasattr(engine.optimizer, "reduce_gradients") or bool(engine.zero_optimization_partition_gradients())


def scales_down(engine: DeepSpeedEngine) -> bool:
    """Whether a step that was left out is another one now: float16 with a scale of the loss that can still fall."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return bool(engine.fp16_enabled()) and scaler is not None and scaler.cur_scale > scaler.min_scale


def save_by_content(state_dict: object, path: str) -> None:
    """torch.save whose bytes follow from the values alone, without checksums, which the manifest has better ones of.

    A pickle says of an equal string or tuple whether it is the same object as one before it; that differs between a
    trainer that went on and one that was loaded.
    """
    import torch

    class Pickler(pickle.Pickler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.fast = True

    torch.serialization.set_crc32_options(False)
    torch.save(state_dict, path, pickle_module=SimpleNamespace(__name__="pickle", Pickler=Pickler))


def compile_nothing() -> None:
    """Tells DeepSpeed to leave its compiled operations alone.

    On a CPU it would build one for all-reduces of inference, which training never calls: half a minute of a compiler,
    and 69 MB of shared memory that no process ever gives back.
    """
    from deepspeed import ops

    ops.__compatible_ops__ = {}
