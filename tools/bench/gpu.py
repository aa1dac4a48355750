"""An optimizer step on a GPU: tokens/s, model FLOPs utilisation and peak memory of ours and of TRL's.

    gpu.py [--device cuda|cpu] [--size 1.5B] [--sides plain fast deepspeed trl] [--steps 3] --output FILE

Sides, each in a process of its own, on the same random weights, prompts and completions:

- `plain`: our packing, log-probs and loss through the vocabulary, with PyTorch's AdamW on the weights as they are. This
  is all of our step that is not DeepSpeed's, and needs torch and transformers only.
- `fast`: the same with `training/faster_kernels.py`, on GPUs only.
- `flash3`: `fast` with FlashAttention 3.
- `compiled`: `plain` with layers by torch.compile, on GPUs with the head of `fast`; `compiled-fast`: `fast` with them.
- `deepspeed`: our engine as a run has it (ZeRO 0), with float32 master weights where weights have 16 bits.
- `trl`: TRL's RLOOTrainer, given the completions in place of sampled ones; its AdamW too is on the weights as they are.

A side that lacks a library, or memory, is left out by name; the others are measured. Sampling has no part in it.

Utilisation is (PaLM, arXiv 2204.02311, appendix B) the FLOPs that the step needs, by its seconds and by what the device
could do: with N weights in the layers' matrices, V·H in the vocabulary projection, L layers of n heads of d,

    6·N·tokens + 6·V·H·(completion tokens) + 12·L·n·d·Σ over tokens of the tokens it sees, itself included

where a prompt that K completions share counts once, and nothing that is computed twice or for padding counts. The
device's FLOPs are its maker's for dense 16-bit matrices, or, where they are not known here, those of a product of
large matrices, measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import shapes

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run import peak_share

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_pipeline.config.section import Dtype

RATE = 1e-6


class Size(NamedTuple):
    """A Qwen2."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    tied: bool
    checkpointing: bool = False

    @property
    def layer_weights(self) -> int:
        """In the matrices of all layers."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.key_value_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)


SIZES = {
    "0.5B": Size(151_936, 896, 4864, 24, 14, 2, 64, True),
    "1.5B": Size(151_936, 1536, 8960, 28, 12, 2, 128, True),
    "7B": Size(152_064, 3584, 18944, 28, 28, 4, 128, False, checkpointing=True),
    "tiny": Size(512, 64, 128, 2, 4, 2, 16, True),
}


class Task(NamedTuple):
    """The measurements of one process."""

    size: str
    device: str
    dtype: Dtype
    prompts: int
    prompt_tokens: tuple[int, int]
    completion_tokens: tuple[int, int]
    micro: int
    """Sequences that go through the model at once."""
    steps: int

    def batch(self) -> tuple[list[list[int]], list[list[int]], list[float]]:
        """Prompts, completions and rewards."""
        vocabulary = SIZES[self.size].vocabulary
        shape = shapes.Shape(vocabulary, 0, 0, self.prompts, self.prompt_tokens, self.completion_tokens, 1)
        return shapes.batch(shape)

    def synchronize(self) -> float:
        """Waits until the device has no work left, and returns the time."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def flops(size: Size, prompts: Sequence[int], completions: Sequence[int]) -> int:
    """That a step needs, from the lengths of its prompts and of the completions, K neighbours a prompt."""
    of_each = [prompts[place // shapes.K] for place in range(len(completions))]
    attention, head = size.layers * size.heads * size.head_dim, size.vocabulary * size.hidden
    return 3 * peak_share.forward(size.layer_weights, attention, head, of_each, completions, shapes.K)


def model(size: Size, device: str, dtype: str, attention: str) -> Any:
    """Random weights, made on the device."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=size.tied,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model_object = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=getattr(torch, dtype)
        )
    if size.checkpointing:
        model_object.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model_object.train()


def _kernels(side: str, device: str) -> list[Callable[[Any], None]]:
    """The functions that replace parts of a model on a side; `plain` needs torch and transformers only."""
    if side == "plain":
        return []
    from rloo_pipeline.training import faster_kernels

    kernels = list(faster_kernels.KERNELS.values())
    if side == "compiled":
        kernels = [faster_kernels.one_pass] if device == "cuda" else []
    return [*kernels, faster_kernels.compile_layers] if side.startswith("compiled") else kernels


def plain(task: Task, side: str) -> list[float]:
    """Our step on PyTorch alone, with the kernels of a side: seconds of each."""
    import torch

    from rloo_pipeline.training.kernels import attention
    from rloo_pipeline.training.logprobs import TokenLogProbs

    if side == "flash3":
        _use_flash3(task.device)
    attention.register()
    loaded = model(SIZES[task.size], task.device, task.dtype, attention.NAME)
    for use in _kernels(side, task.device):
        use(loaded)
    module = TokenLogProbs(loaded, 1.0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=0.0, fused=task.device == "cuda")
    sequences, rows, most, loss_of = _ours(task)

    def step() -> None:
        for chosen in module.form.micro_batches(sequences, rows, most):
            pack = sequences.pick(chosen).to(torch.device(task.device))
            module(
                pack, lambda places, *columns, of=chosen: loss_of([of[place] for place in places], *columns)
            ).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return _timed(task, step)


def _use_flash3(device: str) -> None:
    from torch.nn.attention import current_flash_attention_impl

    from rloo_pipeline.training.kernels import flash_attention_3

    why = flash_attention_3.install(device)
    if current_flash_attention_impl() is None:
        raise SystemExit(f"FlashAttention 3 is off: {why or 'not installed, or not for this card'}")


def deepspeed(task: Task, folder: Path) -> list[float]:
    """Our step as a run makes it: seconds of each."""
    from rloo_pipeline.training.engine import Engine

    model(SIZES[task.size], task.device, task.dtype, "sdpa").save_pretrained(folder / "model")
    sequences, rows, most, loss_of = _ours(task)
    keys = {"gradient_checkpointing": SIZES[task.size].checkpointing, "max_tokens_per_micro_batch": most}
    engine = Engine(Policy(folder / "model"), shapes.settings(RATE, dtype=task.dtype, **keys), 0)
    seconds = _timed(task, lambda: engine.step(sequences, rows, loss_of))
    engine.close()
    return seconds


def trl(task: Task, folder: Path) -> list[float]:
    """TRL's step: seconds of each."""
    import step

    loaded = model(SIZES[task.size], task.device, task.dtype, "sdpa")
    place = step.Place(task.device, task.dtype, task.micro, 0.0, task.synchronize, SIZES[task.size].checkpointing)
    updates, _ = step.trl_steps(loaded, task.batch(), folder, task.steps, place)
    return updates


SIDES = ("plain", "fast", "flash3", "compiled", "compiled-fast", "deepspeed", "trl")


def _ours(task: Task) -> tuple[Any, list[int], int, Callable[..., Tensor]]:
    """The batch as our engine takes it: sequences, rows, tokens of a micro-batch, RLOO's loss."""
    import torch

    from rloo_pipeline.algorithm.loss import Bounds, Totals, aggregate, losses
    from rloo_pipeline.training.packing import Sequences

    prompts, completions, rewards = task.batch()
    groups = torch.tensor(rewards).view(-1, shapes.K)
    advantages = ((groups - groups.mean(-1, keepdim=True)) * shapes.K / (shapes.K - 1)).flatten()
    totals = Totals(len(completions), sum(map(len, completions)), task.completion_tokens[1])

    def loss_of(rows: Sequence[int], logps: Tensor, mask: Tensor, _: Tensor) -> Tensor:
        weights = advantages[list(rows)].to(logps.device)
        loss = losses(logps, logps.detach(), weights, mask, "sequence", "ppo", Bounds(0.2, 0.2))
        return aggregate(loss.loss, mask, "sequence", totals)

    sequences = Sequences([ids for ids in prompts for _ in range(shapes.K)], completions)
    most = task.micro * (task.prompt_tokens[1] + task.completion_tokens[1])
    return sequences, list(range(len(completions))), most, loss_of


def _timed(task: Task, step: Callable[[], object]) -> list[float]:
    """Seconds of each step; the first is not counted."""
    step()
    figures = []
    for _ in range(task.steps):
        began = task.synchronize()
        step()
        figures.append(task.synchronize() - began)
    return figures


def peak_flops(device: str, dtype: str) -> tuple[float, str]:
    """FLOPs a second of the device, and where that is from."""
    import torch

    name = torch.cuda.get_device_name(0) if device == "cuda" else "CPU"
    if dtype != "float32" and (peak := peak_share.peak(name)):
        return peak, f"data sheet of {name}"
    width = 8192 if device == "cuda" else 512
    left, right = (torch.randn(width, width, device=device, dtype=getattr(torch, dtype)) for _ in range(2))

    def once() -> float:
        began = time.perf_counter()
        (left @ right)[0, 0].item()
        return time.perf_counter() - began

    return 2 * width**3 / min(once() for _ in range(5)), f"a product of {width} x {width} matrices, measured"


def measured(task: Task, side: str) -> dict[str, Any]:
    """The figures of a side, measured in this process."""
    import torch

    with tempfile.TemporaryDirectory(prefix="rloo-bench-") as folder:
        other = {"deepspeed": deepspeed, "trl": trl}.get(side)
        seconds = other(task, Path(folder)) if other else plain(task, side)
    if task.device == "cuda":
        memory = torch.cuda.max_memory_allocated()
    else:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    compilation: dict[str, float] = {}
    if side.startswith("compiled"):
        from torch._dynamo.utils import calculate_time_spent, counters

        graphs = counters["stats"]["unique_graphs"]
        compilation = {"graphs": graphs, "compilation_s": calculate_time_spent()["total_wall_time"]}
    prompts, completions, _ = task.batch()
    of_prompts, of_completions = list(map(len, prompts)), list(map(len, completions))
    peak, source = peak_flops(task.device, task.dtype)
    needed = flops(SIZES[task.size], of_prompts, of_completions)
    rates = [(sum(of_prompts) * shapes.K + sum(of_completions)) / one for one in seconds]
    return {
        "tokens_per_s": {"value": statistics.median(rates), "min": min(rates), "max": max(rates)},
        "model_flops_utilisation": needed / statistics.median(seconds) / peak,
        "peak_memory_gb": memory / 1e9,
        "device_flops": source,
        "optimizer": "AdamW on float32 master weights" if side == "deepspeed" else f"AdamW on {task.dtype} weights",
        "repeats": len(seconds),
        **compilation,
    }


def main() -> None:
    """Measures each side and writes the figures, and why a side was left out."""
    arguments = _parse_arguments()
    tokens = ((8, 16), (4, 24)) if arguments.size == "tiny" else ((100, 200), (100, 500))
    of_task = arguments.device, arguments.dtype, arguments.prompts, *tokens, arguments.micro, arguments.steps
    task, figures = Task(arguments.size, *of_task), dict[str, Any]()
    if arguments.measure:
        print(json.dumps(measured(task, arguments.sides[0])), flush=True)
        return
    for side in arguments.sides:
        figures[side] = _row(side)
        print(f"{arguments.size} {side}: " + json.dumps(figures[side]), flush=True)
    arguments.output.write_text(json.dumps(figures, indent=2) + "\n")


def _row(side: str) -> dict[str, Any]:
    """A side's numbers, or why it is left out. It sees one GPU, since transformers' Trainer would take all."""
    command = [sys.executable, __file__, *sys.argv[1:], "--sides", side, "--measure"]
    one = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    outcome = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **one})
    if outcome.returncode == 0:
        figures: dict[str, Any] = json.loads(outcome.stdout.splitlines()[-1])
        return figures
    return {"left_out": cause(outcome.stderr, outcome.returncode)[:300]}


def cause(output: str, code: int) -> str:
    """The line of a failed side's output that names the error. NCCL may warn after it, and torch names the rank before
    it.
    """
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in output.strip().splitlines()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return [f"ended with {code}", *lines[-1:], *raised[-1:]][-1]


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--size", choices=list(SIZES), default="1.5B")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["plain", "deepspeed", "trl"])
    parser.add_argument("--prompts", type=int, default=8, help="of a step; each has 4 completions")
    parser.add_argument("--micro", type=int, default=4, help="sequences that go through the model at once")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
