"""FlashAttention 3 is used where it is as close to float32 as torch's kernels; here formulas stand in for both."""

import sys

import pytest
import torch

from rloo_pipeline.training.kernels import attention, flash_attention_3


@pytest.fixture
def active(monkeypatch) -> list[str]:
    """The implementations that torch was told to use, on a CPU that passes for a Hopper."""
    active = list[str]()
    monkeypatch.setattr(flash_attention_3, "is_for", lambda _: True)
    monkeypatch.setattr(flash_attention_3, "_seen", set())
    monkeypatch.setattr(flash_attention_3, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(flash_attention_3, "restore_flash_attention_impl", lambda **_: active.clear())
    return active


def right(heads: list[torch.Tensor], window: int) -> torch.Tensor:
    return flash_attention_3._exact([tensor.float() for tensor in heads], window).to(torch.bfloat16)


def test_it_is_used_where_it_is_as_close_as_torchs_kernels(active, monkeypatch) -> None:
    monkeypatch.setattr(flash_attention_3, "by_torch", right)
    assert flash_attention_3.install("cpu") == ""
    assert active == ["FA3"]
    assert flash_attention_3.install("cpu") == ""
    assert active == ["FA3"], "tried once"


def test_it_is_off_where_it_has_no_windows_or_fails(active, monkeypatch) -> None:
    def without_windows(heads: list[torch.Tensor], window: int) -> torch.Tensor:
        return right(heads, 0 if active else window)

    monkeypatch.setattr(flash_attention_3, "by_torch", without_windows)
    assert "differ from float32" in flash_attention_3.install("cpu")
    assert not active

    def broken(heads: list[torch.Tensor], window: int) -> torch.Tensor:
        if active:
            raise RuntimeError("no kernel image is available")
        return right(heads, window)

    monkeypatch.setattr(flash_attention_3, "by_torch", broken)
    assert "no kernel image" in flash_attention_3.install("cpu:0")
    assert not active


def test_without_the_package_torchs_kernels_stay_without_a_word(monkeypatch) -> None:
    assert flash_attention_3.PACKAGE not in sys.modules
    assert flash_attention_3.install("cuda") == ""


def test_scores_are_dropped_by_a_kernel_that_can_do_so(monkeypatch) -> None:
    masks, heads = list[torch.Tensor | None](), torch.zeros(1, 2, 5, 8)

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *_, **__
    ) -> torch.Tensor:
        masks.append(mask)
        return query

    monkeypatch.setattr(attention, "scaled_dot_product_attention", attend)
    for active, dropout in ((None, 0.1), ("FA3", 0.0), ("FA3", 0.1)):
        monkeypatch.setattr(attention, "current_flash_attention_impl", lambda active=active: active)
        attention._of_equal_lengths(heads, heads, heads, attention.Scores(1.0, dropout))
    assert masks[:2] == [None, None]
    assert masks[2] is not None
    assert torch.equal(masks[2], torch.ones(5, 5).tril().bool())
