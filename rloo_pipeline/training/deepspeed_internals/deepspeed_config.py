"""DeepSpeed's configuration, replacements for its gradient clipping, checkpoint writer and compiled operations, and the
move of its tensors from the GPU to host memory.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, cast

from rloo_pipeline.config import JSON, merge
from rloo_pipeline.errors import IncompatibleEngine, UserError
from rloo_pipeline.runtime import devices, guard, ranks
from rloo_pipeline.runtime.import_shims import hidden_packages

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from torch import Tensor, nn

    from rloo_pipeline.runtime.host_copies import HostCopies
    from rloo_pipeline.training.settings import TrainerSettings


BUCKET = 50_000_000
"""Number of gradient elements that ZeRO all-reduces at once."""
NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""DeepSpeed's names for number formats."""


def import_deepspeed() -> ModuleType:
    """Imports DeepSpeed without MLflow, which only its tuner uses.

    Raises:
        UserError: the installed DeepSpeed is not the version whose internals training/ uses.
    """
    guard.require("deepspeed")
    if devices.device_type() == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with hidden_packages("mlflow"):
        return import_module("deepspeed")


def accelerator() -> Any:
    """DeepSpeed's accelerator object, which knows what this machine can compute."""
    import_deepspeed()
    return import_module("deepspeed.accelerator").get_accelerator()


def effective_zero_stage(dtype: str, zero_stage: int) -> int:
    """The ZeRO stage that DeepSpeed runs with: at least 1 for 16-bit formats.

    DeepSpeed's 16-bit optimizers without ZeRO add up gradients in 16 bits, do not scale a float16 loss, and take an
    optimizer step on zeros at construction, which makes the first real step a quarter too short.
    """
    return zero_stage if dtype == "float32" else max(zero_stage, 1)


def overlaps(settings: TrainerSettings) -> bool:
    """True if gradients are reduced during the backward pass; the buckets, and so the sums, stay the same.

    On CPUs nothing can overlap, since gloo has no streams. ZeRO 1 reduces once, after the last micro-batch. A single
    process has nothing to reduce, yet DeepSpeed would wait for the GPU after each micro-batch.
    """
    several = ranks.current().world > 1 and devices.device_type() == "cuda"
    return several and settings.deepspeed.zero_stage >= 2 and settings.deepspeed.offload.optimizer is None


def configuration(settings: TrainerSettings, on_disk: JSON | None = None) -> JSON:
    """DeepSpeed's configuration, merged with the user's own keys.

    The caller's `step()` is the only boundary of gradient accumulation. Gradients are accumulated in float32.

    Args:
        settings: the trainer's settings.
        on_disk: further keys of `zero_optimization` for an offload to a disk (`split_model.on_disk`).
    """
    dtype, section = settings.dtype, settings.deepspeed
    communication = section.communication_data_type
    devices_of = {"offload_optimizer": section.offload.optimizer, "offload_param": section.offload.parameters}
    zero: JSON = {
        "stage": effective_zero_stage(dtype, section.zero_stage),
        "overlap_comm": overlaps(settings),
        "reduce_bucket_size": BUCKET,
        **{key: {"device": device} for key, device in devices_of.items() if device is not None},
        **(on_disk or {}),
    }
    ours = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": settings.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        # torch's fused AdamW is as fast on CPUs as DeepSpeed's, which needs a compiler and rounds more
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "data_types": {"grad_accum_dtype": "fp32"},
        # DeepSpeed's default is the model's format, even if gradients are accumulated in float32
        "communication_data_type": NAMES[dtype if communication == "model" else communication],
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16", "hysteresis": 1},
        "steps_per_print": 10**9,
    }
    return merge(ours, section.own_keys)


def adjust(engine: DeepSpeedEngine, settings: TrainerSettings) -> None:
    """Replaces parts of DeepSpeed's engine: clipping, the norm, the all-reduce on a single rank, and the content of a
    checkpoint, which leaves out a base in 4 bits.
    """
    clip_plainly(engine, settings.max_grad_norm)
    sum_squares_in_float64(engine)
    # Otherwise a single rank would copy all gradients back and forth to sum them. Under ZeRO, except for stage 1 in
    # bfloat16, the optimizer receives gradients only through the all-reduce.
    under_zero = hasattr(engine.optimizer, "reduce_gradients") or engine.zero_optimization_partition_gradients()
    engine.enable_backward_allreduce = ranks.current().world > 1 or bool(under_zero)
    engine.checkpoint_engine.makedirs = lambda *_, **__: None  # `trainer_state` writes files
    engine._copy_recovery_script = lambda *_: None
    engine.checkpoint_engine.load = load_values
    if not settings.weights_in_state:
        engine.module_state_dict = lambda *_, **__: {}
    elif settings.quantization is not None:
        engine.module_state_dict = lambda *_, **__: _trainable(engine.module)


def _trainable(module: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters, by name."""
    return {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}


def clip_plainly(engine: DeepSpeedEngine, max_grad_norm: float) -> None:
    """Replaces DeepSpeed's clipping of float32 gradients without ZeRO.

    The result is DeepSpeed's, the same on all ranks. Gradients below `max_grad_norm` are not touched, and the engine
    records the norm as it does under ZeRO.
    """
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    def clip() -> None:
        parameters = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        engine._global_grad_norm = float(norm)
        if max_grad_norm / (engine._global_grad_norm + 1e-6) < 1:
            clip_grads_with_norm_(parameters, max_grad_norm, norm)

    engine.clip_fp32_gradients = clip


def sum_squares_in_float64(engine: DeepSpeedEngine) -> None:
    """Replaces the gradient norm of ZeRO 1 and 2, so that it does not depend on the number of ranks.

    DeepSpeed rounds each rank's sum of squares to float32 before it adds them up; here the total is rounded.
    """
    from deepspeed import comm
    from deepspeed.runtime.utils import mask_nan_or_inf_with_val_inplace
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from torch import float64, stack, zeros
    from torch.linalg import vector_norm

    optimizer = engine.optimizer
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return

    def norm(gradients: list[Tensor], _: object) -> Tensor:
        none = zeros((), dtype=float64, device=optimizer.device)
        total = stack([none, *(vector_norm(gradient, dtype=float64) for gradient in gradients)]).square().sum()
        comm.all_reduce(total, group=optimizer.dp_process_group)
        result = total.float().sqrt()
        mask_nan_or_inf_with_val_inplace(result, device=result.device)
        return result

    optimizer.get_grad_norm_direct = norm


def can_lower_loss_scale(engine: DeepSpeedEngine) -> bool:
    """True if a skipped float16 step is worth repeating: the loss scale is above its minimum."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return bool(engine.fp16_enabled()) and scaler is not None and scaler.cur_scale > scaler.min_scale


class DigestedFile(io.RawIOBase):
    """A file opened for writing that computes the BLAKE3 digest of its content on the way."""

    def __init__(self, path: Path) -> None:
        import blake3

        super().__init__()
        self._file, self._hasher = path.open("wb"), blake3.blake3(max_threads=blake3.blake3.AUTO)

    def write(self, content: Any) -> int:
        """Writes a piece; other threads digest a large one at the same time."""
        digesting = Thread(target=self._hasher.update, args=(content,))
        digesting.start()
        self._file.write(content)
        digesting.join()
        return len(content)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        super().close()

    def digest(self) -> str:
        """Hex BLAKE3 of what was written."""
        return str(self._hasher.hexdigest())


def save_reproducibly(state_dict: object, path: Path) -> str:
    """Like torch.save, but the bytes depend on the values alone. Returns the digest of the file.

    A pickle records whether two equal strings or tuples are the same object, which differs between a trainer that kept
    running and one that was loaded; pickle's fast mode does not. The manifest has checksums, so the file needs none.
    Tensors are stored as if on the CPU, since a trainer's may be on any GPU or in host memory.
    """
    import torch

    class Pickler(pickle.Pickler):
        def __init_subclass__(cls) -> None:  # torch's pickler, which names the device of each storage
            id_of: Any = cls.persistent_id

            def persistent_id(self: Any, value: Any) -> Any:
                found = id_of(self, value)
                return found and (*found[:3], "cpu", *found[4:])

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.fast = True

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, Enum):
                # Python 3.11.2, Debian 12's, would write a call of getattr, which `load_values` refuses
                return type(value), (value.value,)
            return NotImplemented

    torch.serialization.set_crc32_options(False)
    pickle_module = SimpleNamespace(__name__="pickle", Pickler=Pickler)
    with DigestedFile(path) as file:
        try:
            torch.save(state_dict, cast("IO[bytes]", file), pickle_module=pickle_module)
        except RuntimeError as error:  # "unexpected pos 448 vs 352", after a write has failed
            raise error.__context__ or error from None
    return file.digest()


def load_values(path: str, map_location: Any = None) -> Any:
    """Like torch.load, but never runs code from the file, even if its manifest was forged.

    Raises:
        UserError: the file holds more than tensors, plain values and DeepSpeed's own classes, or is damaged.
    """
    import torch
    from deepspeed.runtime.fp16 import loss_scaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    classes = [loss_scaler.LossScaler, loss_scaler.DynamicLossScaler, ZeroStageEnum, fragment_address]
    try:
        with torch.serialization.safe_globals(classes):
            return torch.load(path, map_location=map_location, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(f"{path}: damaged, or not a DeepSpeed state; start a new run") from error


def disable_compiled_operations() -> None:
    """Keeps DeepSpeed from compiling its own operations.

    When ranks connect on a CPU, it would compile an all-reduce for inference, which training never calls: half a minute
    of compile time, and 69 MB of shared memory that is never freed.
    """
    from deepspeed import ops

    ops.__compatible_ops__ = {}


def obstacle(engine: DeepSpeedEngine) -> str | None:
    """The reason an engine cannot be moved, if any: ZeRO 3 and `deepspeed.offload` have buffers of their own."""
    if engine.zero_cpu_offload():
        return "an optimizer that is in host memory already"
    return "weights that ZeRO 3 has split" if engine.zero_optimization_stage() == 3 else None


def to_host(engine: DeepSpeedEngine, copies: HostCopies) -> None:
    """Moves weights and optimizer from the GPU to host memory between two steps, until `copies.restore`.

    A trained 16-bit weight takes 14 bytes of host memory (the weight, its float32 copy, two moments), a frozen one 2.
    Gradients take none, since they are 0 between two steps.

    Raises:
        IncompatibleEngine: there is an `obstacle`.
    """
    if reason := obstacle(engine):
        raise IncompatibleEngine(reason)
    frozen = (weights for weights in engine.module.parameters() if not weights.requires_grad)
    copies.take(_changing_tensors(engine), frozen, getattr(engine.optimizer, "fp32_groups_gradients_flat", ()))


def _changing_tensors(engine: DeepSpeedEngine) -> Iterator[Tensor]:
    """Trained weights, their float32 copies, and the optimizer's moments."""
    import torch

    optimizer = engine.basic_optimizer
    yield from (weights for weights in engine.module.parameters() if weights.requires_grad)
    yield from engine.module.buffers()
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if torch.is_tensor(value))
