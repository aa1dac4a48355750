"""CPU seconds of the process that samples, for a million tokens, without a model: `host.py FOLDER REPEATS` prints JSON.

`canned.py` stands in for the model, so what is measured is vLLM around it and the rollout stage's own code, from
prompts to the table on disk. The engine is in a process of its own, as on GPUs, or with `inside` in this one, as on
CPUs. `bare` does the same by `vllm.LLM.generate`. With `profile`, prints where the time of a round goes.
"""

from __future__ import annotations

import cProfile
import gc
import json
import pstats
import sys
import time
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts.policy import Policy

ROOT = Path(__file__).parents[2]
PROMPTS, SAMPLES, TOKENS = 64, 8, 256


def main() -> None:
    """Rounds of one kept process; the first of each is not counted."""
    from rloo_pipeline.runtime import environment

    folder, repeats, *options = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    environment.use_threads(1)
    from vllm import SamplingParams, TokensPrompt

    from rloo_pipeline.artifacts import tables
    from rloo_pipeline.config.loading import load
    from rloo_pipeline.demo.text_model import text_qwen3
    from rloo_pipeline.rollout import engine_process, groups
    from rloo_pipeline.rollout.engine_arguments import EngineSettings
    from rloo_pipeline.rollout.requests import SamplingConfig
    from rloo_pipeline.rollout.sampler import Sampler
    from rloo_pipeline.seeds import derive

    class CannedSampler(Sampler):
        """A sampler whose engine has no model."""

        def _start_engine(self) -> Any:
            self.settings["distributed_executor_backend"] = "canned.CannedExecutor"
            return super()._start_engine()

    engine_process.SEPARATE_ON_CPUS = "inside" not in options
    corpus = folder / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps({"text": f"{n} times {n} makes {n * n}, naïvely."}) for n in range(2000)))
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "layers": 1,
        "heads": 1,
        "key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 64,
    }
    if not (folder / "model").exists():
        text_qwen3(folder / "model", 0, corpus=str(corpus), columns=["text"], vocab_size=2000, context=1024, **sizes)
    config = load(ROOT / "config" / "config.yaml")
    sampler = CannedSampler(Policy(folder / "model"), EngineSettings("float32", 0.5, 1, 1), 1024, 0)
    decoding = SamplingConfig(1.0, 1.0, 0, None, TOKENS)
    tokenizer = Policy(folder / "model").tokenizer
    texts = [" ".join(f"{n} times {number} makes {n * number}." for n in range(12)) for number in range(PROMPTS)]
    rows = [{"prompt_id": text, "prompt_ids": tokenizer(text)["input_ids"]} for text in texts]
    collected = [0.0, 0.0]

    def watch(phase: str, _: Any) -> None:
        now = time.process_time()
        if phase == "start":
            collected[1] = now
        else:
            collected[0] += now - collected[1]

    gc.callbacks.append(watch)

    def stage() -> int:
        derive.cache_clear()  # each round has seeds of its own
        completions = groups.sample_groups(
            sampler, config.dataset, config.rollout, groups.Draw(rows, SAMPLES, decoding, config.seed, ("bench",))
        )[0]
        tables.write(folder / "table.parquet", completions, tables.ROLLOUTS, "rollouts", run="bench", round=1)
        return sum(map(len, completions["completion_ids"]))

    def bare() -> int:
        seeds = [derive(0, "bench", row["prompt_id"], sample) for row in rows for sample in range(SAMPLES)]
        prompts = [TokensPrompt(prompt_token_ids=row["prompt_ids"]) for row in rows for _ in range(SAMPLES)]
        params = [SamplingParams(max_tokens=TOKENS, logprobs=0, stop_token_ids=sampler.stop_ids, seed=s) for s in seeds]
        assert sampler.llm is not None
        return sum(len(o.outputs[0].token_ids) for o in sampler.llm.generate(prompts, params, use_tqdm=False))

    side = bare if "bare" in options else stage
    figures: dict[str, list[float]] = {"cpu": [], "collector": [], "wall": []}
    profile = cProfile.Profile()
    for number in range(repeats + 1):
        collected[0], began, wall = 0.0, time.process_time(), time.monotonic()
        if "profile" in options and number:
            profile.enable()
        millions = side() / 1e6
        profile.disable()
        if number:
            figures["cpu"].append((time.process_time() - began) / millions)
            figures["wall"].append((time.monotonic() - wall) / millions)
            figures["collector"].append(collected[0] / millions)
    if "profile" in options:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(28)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
