"""What tests that make engines in their own process need."""

import pytest


@pytest.fixture
def engines(monkeypatch) -> None:
    """Engines of any kind on any processor, which leave nothing behind in this process.

    DeepSpeed asks the processor whether it is quick in a number format, and does not begin where it is not. Here it
    begins: the same operations are slower there, and their results are what is tested.
    """
    import torch

    from rloo_pipeline.training import engine

    engine.libraries()
    from deepspeed.accelerator import get_accelerator

    for name in ("is_fp16_supported", "is_bf16_supported"):
        monkeypatch.setattr(get_accelerator(), name, lambda: True)
    # ZeRO 3 puts a function of its own in its place, for all of the process
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)
