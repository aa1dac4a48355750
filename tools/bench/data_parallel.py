"""Two engines of one job against one, on a core each, and how long the first that is done waits for the other.

A prompt's completions have about the length that they had in the round before, within a factor of 1.5; lengths are
lognormal. With them as expected lengths, both engines should end together.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import whole
from task import words_qwen3

PROMPTS, SAMPLES, LONGEST = 24, 4, 384
MODEL: dict[str, Any] = {
    "vocabulary": 4096, "hidden_size": 256, "layers": 4, "heads": 4, "key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 1024, "initializer_range": 0.02,
}  # fmt: skip


def data_parallel(repeats: int, folder: Path, _: argparse.Namespace) -> dict[str, list[float]]:
    """Sampling by two engines of a job against one, a core each, dealt by expected lengths and in turns."""
    words_qwen3(folder / "model", 0, context=512, **MODEL)
    figures: dict[str, list[float]] = whole.last_line(whole.script("data_parallel.py", folder / "model", repeats))
    return figures


def measure(model: Path, repeats: int) -> dict[str, list[float]]:
    """Figures of several rounds of other lengths."""
    from rloo_pipeline.artifacts.policy import Policy
    from rloo_pipeline.rollout.engine_arguments import EngineSettings
    from rloo_pipeline.rollout.parallel_sampler import ParallelSampler

    settings = (Policy(model), EngineSettings("float32", 0.9, 1, 1), 512, 0)
    one, two = (ParallelSampler(*settings, count) for count in (1, 2))
    _pin()
    figures = defaultdict[str, list[float]](list)
    for number in range(repeats):
        known, unknown = (list(_requests(number, with_expected)) for with_expected in (True, False))
        one.sample(known, "completions")
        for requests, name in ((known, ""), (unknown, "_in_turns")):
            two.sample(requests, "completions")
            figures[f"data_parallel_idle_share{name}"].append(1 - min(two.engine_seconds) / two.seconds)
            if requests is known:
                figures["data_parallel_time_vs_one"].append(one.seconds / two.seconds)
    return figures


def _requests(number: int, with_expected: bool) -> Iterator[Request]:
    """The requests of a round."""
    draw = random.Random(number)
    for _ in range(PROMPTS):
        prompt = [draw.randrange(3, MODEL["vocabulary"]) for _ in range(32)]
        usual = min(draw.lognormvariate(4.2, 0.8), LONGEST / 1.5)
        for sample in range(SAMPLES):
            length = max(4, round(usual * draw.uniform(1 / 1.5, 1.5)))
            sampling = SamplingConfig(1.0, 1.0, 0, None, length, {"min_tokens": length})
            yield Request(prompt, 7 * sample + number, sampling, expected=usual if with_expected else None)


def _pin() -> None:
    """Gives each engine a core, in the order in which they started; that of the first sampler shares one."""
    engines = [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]
    for number, engine in enumerate(engines):
        engine.cpu_affinity([number % 2])


if __name__ == "__main__":
    from rloo_pipeline.rollout.requests import Request, SamplingConfig
    from rloo_pipeline.runtime import environment

    environment.use_threads(1)
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]))), flush=True)
