"""Runs `rloo` commands as on a machine with one GPU, whose memory is host memory (`device.cpp`).

`python device.py LIBRARY` reads lines of JSON, each a list of commands, runs those of a line in a fork of this process
as a warm worker runs stages, and writes the fork's exit status. torch looks for CUDA when it is imported, so the
library is loaded first.
"""

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import traceback
import types
from pathlib import Path
from typing import Any

GPU = types.SimpleNamespace(name="simulated", total_memory=80 * 2**30, major=8, minor=0)
ANSWERS: dict[str, Any] = {
    **dict.fromkeys(["is_available", "is_initialized", "is_bf16_supported"], True),
    **dict.fromkeys(["_lazy_init", "set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all"]),
    **dict.fromkeys(["current_device", "memory_allocated", "max_memory_allocated", "memory_reserved"], 0),
    **dict.fromkeys(["reset_peak_memory_stats", "max_memory_reserved", "nvtx.range_push", "nvtx.range_pop"], 0),
    "device_count": 1,
    "get_device_name": GPU.name,
    "get_device_properties": GPU,
    "memory_stats": {},
    "get_device_capability": (GPU.major, GPU.minor),
    "mem_get_info": (GPU.total_memory, GPU.total_memory),
}
"""What functions of torch.cuda return."""


class Stream:
    """A stream or an event of the GPU. Each operation has ended when the next one starts, so it never waits."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, _: object) -> None: ...
    def wait_event(self, _: object) -> None: ...

    def query(self) -> bool:
        return True


def torch_folder() -> Path:
    """torch's folder, without importing it."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def build(folder: Path) -> Path:
    """Compiles the device. Returns the library."""
    torch, library = torch_folder(), folder / "device.so"
    paths = ["-isystem", torch / "include", "-L", torch / "lib", f"-Wl,-rpath,{torch / 'lib'}"]
    source = Path(__file__).with_name("device.cpp")
    options = ["-std=c++20", "-O1", "-shared", "-fPIC"]
    subprocess.run(["g++", *options, *paths, source, "-lc10", "-ltorch_cpu", "-o", library], check=True)
    return library


def load(library: Path) -> None:
    """Loads the device and then torch, and makes all replacements in torch."""
    device = ctypes.CDLL(str(library))
    import torch
    import torch.nn.attention.varlen
    from torch import distributed

    for name, answer in ANSWERS.items():
        module, _, function = name.rpartition(".")
        owner = getattr(torch.cuda, module) if module else torch.cuda
        setattr(owner, function, lambda *_, answer=answer, **__: answer)
    for name in ("Stream", "Event", "stream", "current_stream", "default_stream", "device"):
        setattr(torch.cuda, name, Stream)
    torch._C._cuda_getCurrentRawStream = lambda _: 0  # for bitsandbytes, which peft imports
    resize = torch.UntypedStorage.resize_

    def resize_storage(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size)
        device.resize_storage(ctypes.c_void_p(storage._cdata), ctypes.c_size_t(size))
        return storage

    torch.UntypedStorage.resize_ = resize_storage
    torch.cuda.cudart = lambda: types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: 0)
    torch.Tensor.record_stream = lambda *_: None
    torch.nn.attention.varlen.varlen_attn = attention
    distributed.init_process_group = one_rank


def one_rank(*_: object, **__: object) -> None:
    """Creates a group of one rank in place of NCCL's."""
    from torch.distributed.distributed_c10d import init_process_group
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", store=FakeStore(), rank=0, world_size=1)


def attention(
    query: Any, key: Any, value: Any, starts: Any, *_: Any, scale: float, window_size: tuple[int, int], enable_gqa: bool
) -> Any:
    """FlashAttention of packed sequences, by its formula."""
    import torch

    assert enable_gqa
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert starts.dtype == torch.int32
    outputs = []
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        q, k, v = (heads[begin:end].transpose(0, 1).float() for heads in (query, key, value))
        k, v = (heads.repeat_interleave(len(q) // len(k), 0) for heads in (k, v))
        places = torch.arange(end - begin, device=query.device)
        back, window = places[:, None] - places, window_size[0] if window_size[0] >= 0 else end
        scores = (q @ k.mT * scale).masked_fill((back < 0) | (back > window), -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1).to(query.dtype))
    return torch.cat(outputs)


def reads_of(library: Path) -> Path:
    """The file with the number of times that the last commands have read memory of the GPU."""
    return library.with_suffix(".reads")


def run(commands: list[list[str]]) -> int:
    """Runs commands in a fork of this process, which keeps their engines off the GPU in between. Returns its status."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 0
    try:
        os.dup2(2, 1)  # the parent's output is for statuses
        from rloo_pipeline.cli import main as cli
        from rloo_pipeline.workers import engine_cache, server

        if len(commands) > 1:
            engine_cache.enable()
        for command in commands:
            if code := server.status_of(cli.main, command):
                break
            if len(commands) > 1:
                assert engine_cache.leave_gpu()
                engine_cache.write_now()
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        library = Path(sys.argv[1])
        reads_of(library).write_text(str(ctypes.CDLL(str(library)).host_reads()))
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    load(Path(sys.argv[1]))
    from rloo_pipeline.runtime import devices
    from rloo_pipeline.training import engine

    assert devices.device_type() == "cuda"
    engine.import_libraries()
    for line in sys.stdin:
        print(run(json.loads(line)), flush=True)
