"""The rollout stage's own work around vLLM: `sampling.py FOLDER REPEATS` prints the ratios stage / bare, as JSON.

Both take the same requests to the same warm engine in turn: `LLM.generate` alone, and the stage's prompts → requests →
completions → table on disk. Seconds are of the CPU.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from rloo_pipeline.artifacts.policy import Policy

ROOT = Path(__file__).parents[2]


def main() -> None:
    """One thread; the first of each is not counted."""
    from rloo_pipeline.runtime import environment

    environment.use_threads(1)
    from vllm import SamplingParams, TokensPrompt

    from rloo_pipeline.artifacts import tables
    from rloo_pipeline.config.loading import load
    from rloo_pipeline.demo.arithmetic import problems
    from rloo_pipeline.demo.character_model import tiny_qwen3
    from rloo_pipeline.rollout import groups
    from rloo_pipeline.rollout.engine_arguments import EngineSettings
    from rloo_pipeline.rollout.requests import SamplingConfig
    from rloo_pipeline.rollout.sampler import Sampler
    from rloo_pipeline.seeds import derive

    folder, repeats = Path(sys.argv[1]), int(sys.argv[2])
    tiny_qwen3(folder / "model", 0)
    tokenizer = Policy(folder / "model").tokenizer
    config = load(ROOT / "config" / "config.yaml")
    sampler = Sampler(Policy(folder / "model"), EngineSettings("float32", 0.5, 1, 1), 128, 0)
    decoding, samples = SamplingConfig(1.0, 1.0, 0, None, 40), 8
    rows = [
        {"prompt_id": str(number), "prompt_ids": tokenizer(f"{row['prompt']}")["input_ids"]}
        for number, row in enumerate(problems(split="train", size=96))
    ]

    def bare() -> float:
        seeds = [derive(0, "bench", row["prompt_id"], sample) for row in rows for sample in range(samples)]
        prompts = [TokensPrompt(prompt_token_ids=row["prompt_ids"]) for row in rows for _ in range(samples)]
        stop = [*sampler.stop_ids]
        params = [
            SamplingParams(temperature=1.0, max_tokens=40, logprobs=0, stop_token_ids=stop, seed=s) for s in seeds
        ]
        assert sampler.llm is not None
        began = time.process_time()
        sampler.llm.generate(prompts, params, use_tqdm=False)
        return time.process_time() - began

    def stage() -> float:
        derive.cache_clear()  # each round has seeds of its own
        began = time.process_time()
        completions = groups.sample_groups(
            sampler, config.dataset, config.rollout, groups.Draw(rows, samples, decoding, config.seed, ("bench",))
        )[0]
        tables.write(folder / "table.parquet", completions, tables.ROLLOUTS, "rollouts", run="bench", round=1)
        return time.process_time() - began

    bare(), stage()
    print(json.dumps([bare() / stage() for _ in range(repeats)]))


if __name__ == "__main__":
    main()
