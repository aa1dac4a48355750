"""CPU seconds of the process that samples, for a million tokens, without a model: `host.py FOLDER REPEATS` prints JSON.

`canned.py` stands in for the model, so what is measured is vLLM around it and the rollout stage's own code, from
prompts to the table on disk. The engine is in a process of its own, as on GPUs, or with `inside` in this one, as on
CPUs. `bare` does the same by `vllm.LLM.generate`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_pipeline.artifacts.policy import Policy

if TYPE_CHECKING:
    from rloo_pipeline.demo.character_model import ModelSize
    from rloo_pipeline.rollout.sampler import Sampler

ROOT = Path(__file__).parents[2]
PROMPTS, SAMPLES, TOKENS = 64, 8, 256
SIZE: ModelSize = {
    "hidden_size": 32,
    "layers": 1,
    "heads": 1,
    "key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 64,
}


def main() -> None:
    """Rounds of one kept process; the first is not counted."""
    from rloo_pipeline.runtime import environment

    folder, repeats, *options = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    environment.use_threads(1)
    from rloo_pipeline.demo.text_model import text_qwen3
    from rloo_pipeline.rollout import engine_process
    from rloo_pipeline.rollout.engine_arguments import EngineSettings
    from rloo_pipeline.rollout.sampler import Sampler

    class CannedSampler(Sampler):
        """A sampler whose engine has no model."""

        def _start_engine(self) -> Any:
            self.settings["distributed_executor_backend"] = "canned.CannedExecutor"
            return super()._start_engine()

    engine_process.SEPARATE_ON_CPUS = "inside" not in options
    corpus = folder / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps({"text": f"{n} times {n} makes {n * n}, naïvely."}) for n in range(2000)))
    if not (folder / "model").exists():
        text_qwen3(folder / "model", 0, corpus=str(corpus), columns=["text"], vocab_size=2000, context=1024, **SIZE)
    sampler = CannedSampler(Policy(folder / "model"), EngineSettings("float32", 0.5, 1, 1), 1024, 0)
    texts = [" ".join(f"{n} times {number} makes {n * number}." for n in range(12)) for number in range(PROMPTS)]
    bare, stage = sides(sampler, texts, TOKENS, folder)
    side, seconds = bare if "bare" in options else stage, list[float]()
    for _ in range(repeats + 1):
        began = time.process_time()
        millions = side() / 1e6
        seconds.append((time.process_time() - began) / millions)
    print(json.dumps(seconds[1:]))


def sides(
    sampler: Sampler, prompts: Sequence[str], tokens: int, folder: Path
) -> tuple[Callable[[], int], Callable[[], int]]:
    """Two functions that sample the same requests and return the number of tokens: by `LLM.generate` alone, and as the
    rollout stage does, from prompts to the table on disk.
    """
    from vllm import SamplingParams, TokensPrompt

    from rloo_pipeline.artifacts import tables
    from rloo_pipeline.config.loading import load
    from rloo_pipeline.rollout import groups
    from rloo_pipeline.rollout.requests import SamplingConfig
    from rloo_pipeline.seeds import derive

    config, tokenizer = load(ROOT / "config" / "config.yaml"), sampler.policy.tokenizer
    rows = [{"prompt_id": text, "prompt_ids": tokenizer(text)["input_ids"]} for text in prompts]
    decoding = SamplingConfig(1.0, 1.0, 0, None, tokens)

    def bare() -> int:
        seeds = [derive(0, "bench", row["prompt_id"], sample) for row in rows for sample in range(SAMPLES)]
        requests = [TokensPrompt(prompt_token_ids=row["prompt_ids"]) for row in rows for _ in range(SAMPLES)]
        params = [SamplingParams(max_tokens=tokens, logprobs=0, stop_token_ids=sampler.stop_ids, seed=s) for s in seeds]
        assert sampler.llm is not None
        return sum(len(o.outputs[0].token_ids) for o in sampler.llm.generate(requests, params, use_tqdm=False))

    def stage() -> int:
        derive.cache_clear()  # each round has seeds of its own
        wanted = groups.WholeGroups(rows, SAMPLES, decoding, config.seed, ("bench",))
        [completions] = groups.sample_groups(sampler, config, wanted)
        tables.write(folder / "table.parquet", completions, tables.ROLLOUTS, "rollouts", run="bench", round=1)
        return sum(map(len, completions["completion_ids"]))

    return bare, stage


if __name__ == "__main__":
    main()
