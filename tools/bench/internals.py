"""Measures the gain of each deviation from a library's own behaviour (docs/internals.md).

    internals.py start RUN STAGE REPEATS   CPU seconds of a stage, without one deviation at a time over with all
    internals.py step SHAPE REPEATS        the same of an optimizer step, one thread, float32

RUN is a finished run of .test/config/config.yaml (`results/mini`), STAGE is update, rollout or score. Sides take turns;
the result is the median of the ratios, with the least and the most.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import shapes

from rloo_pipeline.artifacts.policy import Policy


def _without(deviation: str) -> None:
    """Turns a deviation off in this process, before the stage imports anything."""
    from rloo_pipeline.rollout import vllm_internals
    from rloo_pipeline.runtime import import_shims
    from rloo_pipeline.training.deepspeed_internals import deepspeed_config
    from rloo_pipeline.transformers_internals import optional_parts

    if deviation == "mlflow":
        deepspeed_config.import_deepspeed = lambda: import_module("deepspeed")
    elif deviation == "sklearn, scipy":
        optional_parts.hidden_packages = lambda *_: nullcontext()  # type: ignore[assignment, attr-defined]
    elif deviation == "distributions":
        optional_parts.replaced = lambda *_: nullcontext()  # type: ignore[assignment, attr-defined]
    elif deviation == "unused parts of vllm":
        vllm_internals.UNUSED = ()  # type: ignore[assignment]
    elif deviation == "pandas":
        import_shims.prepare_arrow = lambda: None
    elif deviation == "ranks":
        vllm_internals.replace_ranks = lambda: None
    elif deviation == "compiled operations":
        deepspeed_config.disable_compiled_operations = lambda: None
    elif deviation == "text once":
        sampler: Any = import_module("rloo_pipeline.rollout.sampler")
        plain = sampler.params_of

        def with_text(*arguments: Any) -> Any:
            params = plain(*arguments)
            params.detokenize = True
            return params

        sampler.params_of = with_text
        sampler._text = lambda _, __, ___, sampled: sampled.text


DEVIATIONS = {
    "update": ("mlflow", "sklearn, scipy", "distributions", "pandas", "compiled operations"),
    "rollout": ("ranks", "sklearn, scipy", "distributions", "unused parts of vllm", "pandas", "text once"),
    "score": ("sklearn, scipy", "pandas"),
}


def _stage(run: Path, stage: str, target: Path) -> list[str]:
    """Arguments of `rloo` for a stage of round 2, with its outputs in `target`."""
    second, first = run / "rounds" / "00002", run / "policies" / "00001"
    tables = {kind: [str(second / kind / f"{shard:03}.parquet") for shard in (0, 1)] for kind in ("rollouts", "scores")}
    references = [str(second / "reference" / f"{shard:03}.parquet") for shard in (0, 1)]
    common = [stage, "--configfile", str(run / "config.yaml"), "--output", str(target / "output")]
    if stage == "rollout":
        return [*common, "--prompts", str(run / "prompts"), "--policy", str(first), "--round", "2", "--shard", "0"]
    if stage == "score":
        rollouts = tables["rollouts"][:1]
        return [*common, "--prompts", str(run / "prompts"), "--policy", str(first), "--rollouts", *rollouts, "--parts"]
    shutil.copytree(run / "trainer", target / "trainer")  # an update removes the state that it has begun from
    inputs = ["--policy", str(first), "--trainer", str(target / "trainer")]
    inputs += ["--rollouts", *tables["rollouts"], "--scores", *tables["scores"], "--reference", *references]
    outputs = {"metrics": "m.json", "events": "e.tfevents", "table": "t.parquet"}
    return [*common, "--round", "2", *inputs, *(w for k, v in outputs.items() for w in (f"--{k}", str(target / v)))]


def start(run: Path, stage: str, repeats: int) -> None:
    """CPU seconds of whole processes."""

    def measure(name: str) -> float:
        with tempfile.TemporaryDirectory() as target:
            # DeepSpeed keeps what it compiles; on a new machine nothing is there
            environment = {**os.environ, "TORCH_EXTENSIONS_DIR": target} if "compiled" in name else None
            command = [sys.executable, __file__, "side", name, *_stage(run, stage, Path(target))]
            child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            assert child.stderr is not None
            log = child.stderr.read().decode()
            _, status, usage = os.wait4(child.pid, 0)
        if status:
            raise SystemExit(f"{' '.join(command)}: {log[-2000:]}")
        return usage.ru_utime + usage.ru_stime

    _compare(stage, ("", *DEVIATIONS[stage]), repeats, measure)


def step(shape: shapes.Shape, repeats: int) -> None:
    """CPU seconds of an optimizer step."""
    import torch

    from rloo_pipeline.training.engine import Engine
    from rloo_pipeline.training.kernels import attention
    from rloo_pipeline.training.packing import Sequences

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        shapes.model(shape, Path(folder) / "model")
        engine = Engine(Policy(Path(folder) / "model"), shapes.settings(1e-6), 0)
    prompts, completions, _ = shapes.batch(shape)
    sequences = Sequences([ids for ids in prompts for _ in range(shapes.K)], completions)
    rows, wrapped, deepspeed = list(range(len(completions))), engine.engine.module, engine.engine
    form, clip = wrapped.head_form, vars(deepspeed).get("clip_fp32_gradients")

    def own_clip() -> None:
        vars(deepspeed).pop("clip_fp32_gradients", None)

    without: dict[str, Callable[[], Any]] = {
        "": lambda: None,
        "short attention": lambda: setattr(attention, "SHORT", 0),
        "lm_head": lambda: setattr(wrapped, "head_form", None),
        "clip": own_clip,
        "no all-reduce": lambda: setattr(deepspeed, "enable_backward_allreduce", True),
    }

    def measure(name: str) -> float:
        attention.SHORT, wrapped.head_form, deepspeed.enable_backward_allreduce = short, form, False
        if clip is not None:
            deepspeed.clip_fp32_gradients = clip
        without[name]()
        began = time.process_time()
        for _ in range(shape.steps):
            engine.step(sequences, rows, lambda _, logps, mask, __: -(logps * mask).sum() * 1e-4)
        return time.process_time() - began

    short = attention.SHORT
    _compare("step", tuple(without), repeats, measure)


def _compare(measurement: str, names: Sequence[str], repeats: int, measure: Callable[[str], float]) -> None:
    """Measures with all deviations, named "", and without each, in turns, and prints the ratios."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(repeats + 1):
        for name in names if number % 2 else names[::-1]:
            spent = measure(name)
            if number:  # the first of each fills caches
                seconds[name].append(spent)
    base = seconds.pop("")
    print(f"{measurement}: {statistics.median(base):.3g} s of CPU with all deviations")
    for name, values in seconds.items():
        ratios = sorted(value / own for value, own in zip(values, base, strict=True))
        middle = statistics.median(ratios)
        print(f"{measurement} without {name}: {middle:.3g} ({ratios[0]:.3g} to {ratios[-1]:.3g}, {len(ratios)}) times")


def main() -> None:
    """Reads the arguments above; `side DEVIATION ARGV…` is a stage without a deviation."""
    kind, *rest = sys.argv[1:]
    if kind == "start":
        start(Path(rest[0]).absolute(), rest[1], int(rest[2]))
    elif kind == "step":
        step(shapes.SHAPES[rest[0]], int(rest[1]))
    else:
        _without(rest[0])
        sys.argv[:] = ["rloo", *rest[1:]]
        import_module("rloo_pipeline.__main__").main()


if __name__ == "__main__":
    main()
