"""The branch of attention for GPUs, traced without one: which kernel gets tensors of which shape, on which device."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rloo_pipeline.training.kernels import attention
from rloo_pipeline.training.kernels.short_attention import Local
from rloo_pipeline.training.layout import Gather, HeadIndex, Layout, Scatter, lay_out

ON_CPU = lay_out(*(torch.tensor(values) for values in ([0, 0, 30], [4, 4, 2], [4, 16, 32], [12, 14, 7])))
TOKENS, LAID_OUT, HEADS, HEAD_DIM = 39, len(ON_CPU.sources), (4, 2, 2), 64
FLASH = "torch_attn._varlen_attn.default"


class Calls(TorchDispatchMode):
    """The operations that run, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: dict[str, tuple] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.arguments[str(function)] = args
        return function(*args, **(kwargs or {}))


def on_gpu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda") for tensor in tensors]


@pytest.fixture
def layout(monkeypatch):
    """The layout on a GPU of which there is nothing but the shapes."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    # without autograd, which needs a stream of the device
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        tensors = (ON_CPU.sources, ON_CPU.real, ON_CPU.first_copy, ON_CPU.starts, ON_CPU.begins, ON_CPU.lengths)
        yield Layout(*on_gpu(*tensors), HeadIndex(*on_gpu(*ON_CPU.tokens)), ON_CPU.blocks, ON_CPU.even)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("window", [None, 7])
def test_half_precision_takes_flash_attention_and_float32_does_not(layout, dtype, window) -> None:
    heads = [torch.empty(1, count, TOKENS, HEAD_DIM, dtype=dtype, device="cuda") for count in HEADS]
    mask = None
    if window is not None:
        mask = torch.tensor(window)
        setattr(mask, attention.DESCRIPTION, Local(window, chunked=False))
    with Calls() as calls:
        out, _ = attention.packed_attention(torch.nn.Identity(), *heads, mask, layout=layout)
    assert (out.shape, out.dtype, out.device.type) == ((1, TOKENS, HEADS[0], HEAD_DIM), dtype, "cuda")
    assert (FLASH in calls.arguments) is (dtype != torch.float32)
    if dtype == torch.float32:
        return
    query, key, value, starts, _, longest, *_ = calls.arguments[FLASH]
    assert [len(tensor) for tensor in (query, key, value)] == [LAID_OUT] * 3
    assert [tensor.shape[1] for tensor in (query, key, value)] == list(HEADS), "key-value heads are not repeated"
    assert (starts.dtype, starts.device.type, longest) == (torch.int32, "cuda", ON_CPU.blocks[0].tokens)


def test_gradients_are_moved_between_row_and_layout_on_the_gpu(layout) -> None:
    index, width = layout.head_index(1), HEADS[0] * HEAD_DIM
    of_layout = torch.empty(LAID_OUT, width, dtype=torch.bfloat16, device="cuda")
    of_row = torch.empty(TOKENS, width, dtype=torch.bfloat16, device="cuda")
    to_row, _ = Gather.backward(SimpleNamespace(index=index), of_layout)
    to_layout, _ = Scatter.backward(SimpleNamespace(index=index), of_row)
    assert (to_row.shape, to_row.dtype, to_row.device) == (of_row.shape, of_row.dtype, of_row.device)
    assert (to_layout.shape, to_layout.dtype, to_layout.device) == (of_layout.shape, of_layout.dtype, of_layout.device)
