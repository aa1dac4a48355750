"""The rollout stage's own work around vLLM: `sampling.py FOLDER REPEATS` prints the ratios stage / bare, as JSON.

Both take the same requests to the same warm engine in turn: `LLM.generate` alone, and the stage's prompts → requests →
completions → table on disk. Seconds are of the CPU.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import host

from rloo_pipeline.artifacts.policy import Policy

PROMPTS, TOKENS = 96, 40


def main() -> None:
    """One thread; the first of each is not counted."""
    from rloo_pipeline.runtime import environment

    environment.use_threads(1)
    from rloo_pipeline.demo.arithmetic import problems
    from rloo_pipeline.demo.character_model import tiny_qwen3
    from rloo_pipeline.rollout.engine_arguments import EngineSettings
    from rloo_pipeline.rollout.sampler import Sampler

    folder, repeats = Path(sys.argv[1]), int(sys.argv[2])
    tiny_qwen3(folder / "model", 0)
    sampler = Sampler(Policy(folder / "model"), EngineSettings("float32", 0.5, 1, 1), 128, 0)
    prompts = [str(row["prompt"]) for row in problems(split="train", size=PROMPTS)]
    bare, stage = host.sides(sampler, prompts, TOKENS, folder)
    bare(), stage()
    print(json.dumps([seconds(bare) / seconds(stage) for _ in range(repeats)]))


def seconds(side: Callable[[], int]) -> float:
    """CPU seconds of a side."""
    began = time.process_time()
    side()
    return time.process_time() - began


if __name__ == "__main__":
    main()
