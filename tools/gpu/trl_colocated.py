"""TRL's RLOOTrainer with vLLM in its process, through the rounds of a run of ours.

    trl_colocated.py RUN OUTPUT MICRO [--arguments]

A micro-batch has MICRO completions. The last line printed is {"steps": seconds of each, "tokens", "peak_gb"}.
--arguments only makes TRL's configuration, which checks the names of its options, and loads the rewards, whose files
the working folder must have; it runs nothing.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import trl_run

from rloo_pipeline.config import Config
from rloo_pipeline.config.loading import load


def arguments(config: Config, output: Path, micro: int, on_gpu: bool) -> Any:
    """The configuration as TRL's options, with its vLLM in sleep mode."""
    from trl.trainer.rloo_config import RLOOConfig

    own = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.35,
        "vllm_enable_sleep_mode": True,
    }
    batch = {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": config.rollout.generation_batch_size // micro,
    }
    device = {"use_cpu": not on_gpu, "bf16": on_gpu, "logging_steps": 1}
    return RLOOConfig(**{**trl_run.options(config, output, vocabulary=1), **own, **batch, **device})


def main() -> None:
    """Trains."""
    run, output, micro = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    config = load(run / "config.yaml")
    if "--arguments" in sys.argv:
        print(arguments(config, output, micro, on_gpu=False).vllm_mode, *map(trl_run.reward, config.rewards))
        return
    import torch
    from transformers import TrainerCallback

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.monotonic())

    trainer, counted = trl_run.trainer(run, config, arguments(config, output, micro, on_gpu=True), [Clock()])
    began = time.monotonic()
    trainer.train()
    steps = [b - a for a, b in zip([began, *ends], ends, strict=False)]
    peak = torch.cuda.max_memory_allocated() / 1e9
    print(json.dumps({"steps": steps, "tokens": counted.tokens, "peak_gb": peak}), flush=True)


if __name__ == "__main__":
    main()
