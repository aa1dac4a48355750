"""`python -m rloo_pipeline.before_run.gpu_kernels NAME`: runs one small kernel on the GPU, as stages do.

It is a separate process because it may crash and because the caller must not hold the GPU. It prints what worked and
exits with 0, or fails with a traceback.
"""

import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

tl: Any = None
"""triton.language, which kernels look up in the namespace of their module."""


def flash_attention(device: str = "cuda") -> str:
    """Runs attention forward and backward over two packed sequences, as in `training/kernels/attention.py`."""
    import torch
    from torch.nn.attention import varlen

    query, key = (torch.randn(48, heads, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2))
    value = torch.ones_like(key).requires_grad_()
    starts = torch.tensor([0, 16, 48], dtype=torch.int32, device=device)
    out: Any = varlen.varlen_attn(
        query, key, value, starts, starts, 32, 32, scale=0.125, window_size=(-1, 0), enable_gqa=True
    )
    out.float().sum().backward()
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=0.02)
    return "forward and backward"


def triton(device: str = "cuda") -> str:
    """Runs a Triton kernel that doubles numbers."""
    global tl
    import torch

    compiler, tl = import_module("triton"), import_module("triton.language")

    @compiler.jit
    def double(numbers):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202 - Triton would look annotations up
        places = numbers + tl.arange(0, 16)
        tl.store(places, 2 * tl.load(places))

    numbers = torch.arange(16.0, device=device)
    double[(1,)](numbers)
    torch.testing.assert_close(numbers.cpu(), 2 * torch.arange(16.0))
    return f"{compiler.__version__} compiles and runs a kernel"


def nvcc() -> str:
    """Compiles and runs a CUDA program that doubles numbers, with the compiler that DeepSpeed and FlashInfer use."""
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None:
        raise FileNotFoundError("no CUDA_HOME; run `make setup ACCELERATOR=cuda`, or load the CUDA 13 module")
    program = Path(CUDA_HOME) / "bin" / "nvcc"
    with tempfile.TemporaryDirectory() as folder:
        twice = Path(folder) / "twice"
        compiled: list[str | Path] = [program, "-arch=native", "-o", twice, Path(__file__).with_name("twice.cu")]
        stubs = f"-L{CUDA_HOME}/lib64/stubs"  # where FlashInfer looks for libcuda.so, too
        linked = subprocess.run([*compiled, stubs, "-lcuda"], stderr=subprocess.PIPE, text=True, check=False)
        if "find -lcuda" in linked.stderr:
            raise FileNotFoundError(
                "no libcuda.so to link FlashInfer's kernels with; in a folder of yours, run `ln -s PATH/libcuda.so.1 "
                "libcuda.so` with the path that `ldconfig -p` shows, and export LIBRARY_PATH=FOLDER"
            )
        print(linked.stderr, end="", file=sys.stderr)
        linked.check_returncode()
        subprocess.run([twice], check=True)
    return f"{program} compiles and runs a kernel"


KERNELS = {"FlashAttention": flash_attention, "Triton": triton, "nvcc": nvcc}

if __name__ == "__main__":
    print(KERNELS[sys.argv[1]]())
