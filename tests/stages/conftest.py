"""Fixtures for tests that create engines in the pytest process."""

import pytest


@pytest.fixture
def engines(monkeypatch) -> None:
    """Allows engines of any dtype on any processor, and undoes their changes to this process.

    DeepSpeed refuses a dtype that is slow on this processor. Here it is allowed: the results are the same, and they are
    what is tested.
    """
    import torch

    from rloo_pipeline.training import engine

    engine.import_libraries()
    from deepspeed.accelerator import get_accelerator

    for name in ("is_fp16_supported", "is_bf16_supported"):
        monkeypatch.setattr(get_accelerator(), name, lambda: True)
    # ZeRO 3 replaces this function for the whole process
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)
