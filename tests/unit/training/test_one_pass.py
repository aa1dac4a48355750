"""The head's loss in one pass over the logits is that of the other path; Triton's interpreter runs it without a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import gradient, qwen3

from rloo_pipeline.training import packing
from rloo_pipeline.training.kernels import lm_head
from rloo_pipeline.training.logprobs import TokenLogProbs

INSTALLED = Path(__file__).parents[3] / "build" / "triton"
"""Triton apart from the environment, whose vLLM would use it."""
LENGTHS = [4, 1, 7, 3]
CASES = [
    {"tokens": 10**6, "temperature": 0.7, "never": (), "top": 0},
    {"tokens": 5, "temperature": 1.0, "never": (3, 96), "top": 0},  # the third sequence is longer
    {"tokens": 2, "temperature": 1.3, "never": (), "top": 0},
    {"tokens": 5, "temperature": 0.7, "never": (), "top": 5},
    {"tokens": 10**6, "temperature": 1.0, "never": (), "top": 97},
]
DTYPES = {torch.float32: CASES, torch.bfloat16: [CASES[1], CASES[4]]}


def lines_of(function: str, **variables: str) -> list:
    """The lines that a function of this file prints in a process with Triton."""
    if not (INSTALLED / "triton").exists() and importlib.util.find_spec("triton") is None:
        assert "RLOO_REQUIRE_TRITON" not in os.environ
        pytest.skip("requirements/cpu.txt has no Triton")
    path = os.pathsep.join([*sys.path, str(INSTALLED)])
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, **variables}
    command = [sys.executable, __file__, function]
    outcome = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return [json.loads(line) for line in outcome.stdout.splitlines()]


def test_the_kernels_compile_for_each_generation_of_gpus(tmp_path) -> None:
    assert lines_of("compiled", TRITON_CACHE_DIR=str(tmp_path)) == [75, 80, 90, 100, 120]


def test_loss_gradient_and_entropies_are_those_of_the_other_path() -> None:
    errors = lines_of("distances", TRITON_INTERPRET="1")
    assert len(errors) == sum(map(len, DTYPES.values()))
    for error in errors:
        top, dtype = error.pop("top"), error.pop("dtype")
        # where gradients of candidates cancel, either path is off by 1e-6; bfloat16 rounds a gradient of the logits
        bound = 1e-2 if dtype == "bfloat16" else 1e-5 if top else 1e-6
        assert all(value <= bound for value in error.values()), error


def test_rows_of_any_width_have_the_values_of_float64_and_leave_their_neighbours_alone() -> None:
    cases = lines_of("odd_rows", TRITON_INTERPRET="1")
    assert len(cases) == 4
    for case in cases:
        # the gradient has the format of the logits, and the interpreter cuts the last bits off
        bound = 2**-8 if case.pop("dtype") == "bfloat16" else 1e-5
        assert case.pop("alone"), case
        assert case.pop("gradient") < bound, case
        assert case["log-probs"] < 1e-5, case
        assert case["entropies"] < 1e-5, case


def run(model: torch.nn.Module, temperature: float, never: tuple[int, ...], top: int) -> dict[str, torch.Tensor]:
    """Loss, log-probs, entropies and gradient; with `top` also of the likeliest tokens of another model."""
    torch.manual_seed(1)
    prompts = [torch.randint(5, 90, (3 + i,)).tolist() for i in range(len(LENGTHS))]
    pack = packing.pack(prompts, [torch.randint(5, 90, (length,)).tolist() for length in LENGTHS])
    module, seen = TokenLogProbs(model, temperature), list[torch.Tensor]()
    module.never = never

    if top:  # the target is one of them in every second place
        others = torch.stack([torch.randperm(97)[:top] for _ in range(sum(LENGTHS))])
        even, targets = others[::2], pack.targets[::2]
        even[:] = even.where(even != targets.unsqueeze(-1), even[:, 1:2])
        even[:, 1] = targets
        lacking = torch.zeros(len(others), 2, dtype=torch.int64)  # beside token 0 itself
        pack = pack._replace(candidates=torch.cat([others, lacking], -1))

    def loss_of(rows, logps, mask, entropy, *others):
        seen.extend((logps[mask].detach(), entropy[mask]))
        weights = torch.tensor([1.0, -2.0, 0.5, -0.3])[list(rows)].unsqueeze(-1)
        of_others = 0.0
        for each in others:
            known = each[..., :-2] * mask.unsqueeze(-1)
            # where they are all tokens, their probability is 1 together, so the gradients of the second sum cancel
            of_others = (known.exp() * known).sum() + (known.logsumexp(-1) * mask).sum()
        return (logps.exp() * weights * mask).sum() + of_others

    loss = module(pack, loss_of)
    model.zero_grad()
    (3.0 * loss).backward()
    with torch.no_grad():
        logps, entropies = module(pack, entropies=True)[:2]
        likeliest = module(pack, top_k=top)[2:] if top else ()
    columns = {"log-probs with a loss": torch.cat(seen[::2]), "entropies with a loss": torch.cat(seen[1::2])}
    columns |= {"log-probs": logps, "entropies": entropies}
    columns |= {f"likeliest {number}": values.double() for number, values in enumerate(likeliest)}
    return {"loss": loss.detach(), "gradient": gradient(model), **columns}


def compiled() -> None:
    """Compiles the kernels for bfloat16, down to machine code; prints each compute capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rloo_pipeline.training import one_pass

    types = {"logits": "*bf16", "targets": "*i64", "rows": "i32", "vocabulary": "i32", "divisor": "fp32"}
    for capability in (75, 80, 90, 100, 120):
        for kernel in (one_pass._summarize, one_pass._differentiate):
            signature = {name: types.get(name, "*fp32") for name in kernel.arg_names} | {"block": "constexpr"}
            source = ASTSource(kernel, signature, {"block": one_pass.BLOCK})
            assert triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": 8}).asm["cubin"]
        print(capability)


def distances() -> None:
    """Prints the largest relative distance of each value, case by case."""
    from rloo_pipeline.training import one_pass

    one_pass.BLOCK = 32  # several blocks, the last one not full
    for dtype, cases in DTYPES.items():
        for case in cases:
            options = case["temperature"], case["never"], case["top"]
            lm_head.ELEMENTS = one_pass.ELEMENTS = {"cpu": 97 * case["tokens"], "cuda": 97 * case["tokens"] // 2}
            usual, fast = (qwen3(tied=True).to(dtype) for _ in range(2))
            one_pass.use(fast)
            expected = run(usual, *options)
            actual = run(fast, *options)
            errors = {name: float((actual[name] - value).norm() / value.norm()) for name, value in expected.items()}
            print(json.dumps({"dtype": str(dtype).removeprefix("torch."), "top": case["top"], **errors}))


def odd_rows() -> None:
    """Prints the largest errors of both kernels for rows between others, with blocks that are not full."""
    from rloo_pipeline.training import one_pass

    shapes = (1, 150_001, "bfloat16"), (3, 151_936, "float32"), (2, 4097, "bfloat16"), (1, 1, "float32")
    for rows, width, dtype in shapes:
        torch.manual_seed(0)
        buffer = (8 * torch.randn(rows + 2, width)).to(getattr(torch, dtype))
        before, logits, targets = buffer.clone(), buffer[1:-1], torch.full((rows,), width - 1)
        summary, (of_target, scales) = torch.empty(4, rows), torch.randn(2, rows)
        one_pass._summarize[(rows,)](logits, targets, summary, rows, width, 0.7, one_pass.BLOCK)
        columns = targets, summary[2], summary[3], of_target, scales
        grid = rows, -(-width // one_pass.BLOCK)
        one_pass._differentiate[grid](logits, *columns, width, 0.7, one_pass.BLOCK)
        logps = (before[1:-1].double() / 0.7).log_softmax(-1)
        gradient = -scales.unsqueeze(-1) * logps.exp()
        gradient[:, -1] += of_target
        errors = {
            "log-probs": summary[0] - logps[:, -1],
            "entropies": summary[1] + (logps.exp() * logps).sum(-1),
            "gradient": (logits - gradient) / gradient.abs().max().clamp(min=1e-9),
        }
        alone = bool((buffer[[0, -1]] == before[[0, -1]]).all())
        print(json.dumps({"dtype": dtype, "alone": alone} | {key: float(e.abs().max()) for key, e in errors.items()}))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
