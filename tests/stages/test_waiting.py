"""DeepSpeed asks the device for no value, and does not wait for it, until all micro-batches of a step are through."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from test_experts import SEQUENCES, loss_of
from torch.overrides import TorchFunctionMode
from trainers import trainer_settings

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.training.engine import Engine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engines")]

ASKS = {"item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "equal"}
ASKS |= {"__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__"}


class Asked(TorchFunctionMode):
    """Notes in `events` each call by which DeepSpeed's code, or ours about it, gets a value of a tensor."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        code = sys._getframe(1).f_code
        if function.__name__ in ASKS and "deepspeed" in code.co_filename:
            self.events.append(f"{function.__name__} in {code.co_filename}, {code.co_name}")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("zero_stage", "dtype"), [(0, "float32"), (1, "bfloat16"), (2, "bfloat16"), (3, "bfloat16")])
def test_a_step_asks_for_values_only_after_its_last_micro_batch(tiny_model, monkeypatch, zero_stage, dtype) -> None:
    from deepspeed.accelerator import get_accelerator

    events = list[str]()
    engine = Engine(
        Policy(tiny_model), trainer_settings(zero_stage=zero_stage, dtype=dtype, max_tokens_per_micro_batch=1), 0
    )
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda *_: events.append("synchronize"))
    if zero_stage < 3:  # as on a GPU; the streams of ZeRO 3 are None on a CPU
        monkeypatch.setattr(get_accelerator(), "resolves_data_dependency", lambda: False)
    engine.step(SEQUENCES, range(2), loss_of)  # in which ZeRO 3 compares the modules of its ranks
    events.clear()
    with Asked(events):
        engine.step(SEQUENCES, range(2), loss_of, lambda rows: events.append(f"micro-batch of {rows}"))
    assert events[:2] == ["micro-batch of 1"] * 2
    assert events[2:], "the norm of the gradient, at least"
