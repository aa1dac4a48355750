"""One side of the comparison of update steps, in a process of its own so that its peak memory is its own.

    step.py ours|trl SHAPE FOLDER STEPS   prints {"seconds": [a step, ...], "peak_mb": …}

A step is all that follows sampling: reference log-probs, old log-probs (the KL is in the reward), loss, gradient,
clipping, AdamW. The first step is not counted. Both sides have one thread and float32; seconds are
of the CPU, which other work on the machine changes little.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import shapes

BETA, RATE = 0.05, 1e-6


def ours(shape: shapes.Shape, folder: Path, steps: int) -> list[float]:
    """Our reference pass, engine and loss."""
    import torch

    from rloo_pipeline.config import Algorithm, Rollout
    from rloo_pipeline.training import policy
    from rloo_pipeline.training.batch import Carried, Completions, make_batch
    from rloo_pipeline.training.engine import Engine, Settings
    from rloo_pipeline.training.logprobs import TokenLogProbs
    from rloo_pipeline.training.objective import Record, StepLoss
    from rloo_pipeline.training.packing import Sequences
    from rloo_pipeline.training.schedule import Schedule

    torch.set_num_threads(1)
    prompts, completions, rewards = shapes.batch(shape)
    sequences = Sequences([ids for ids in prompts for _ in range(shapes.K)], completions)
    rows, longest, most = list(range(len(completions))), max(map(len, completions)), 16384
    algorithm = Algorithm(beta=BETA)
    rollout = Rollout(
        num_generations=shapes.K, generation_batch_size=len(rows), max_completion_length=shape.completion_tokens[1]
    )
    reference = TokenLogProbs(policy.load(folder, "float32", False), 1.0).eval()
    settings = Settings(
        "float32", False, 1.0, Schedule(RATE, "constant", 0, 0, 0.0), (0.9, 0.999), 1e-8, 0.0, 1.0, 0, False, None
    )
    engine = Engine(folder, settings, 0)
    mask = torch.arange(longest) < torch.tensor([len(ids) for ids in completions]).unsqueeze(-1)
    seconds = []
    for _ in range(steps + 1):
        began = time.process_time()
        found = torch.zeros(mask.shape)
        with torch.inference_mode():
            for some in sequences.micro_batches(rows, most):
                pack = sequences.pick(some)
                values, _ = pack.unpack(reference(pack))
                found[some, : values.shape[1]] = values
        old = engine.logps(sequences, most, lambda _: None)
        truncated = torch.zeros(len(rows), dtype=torch.bool)
        scores = torch.tensor(rewards, dtype=torch.float64)
        batch, _ = make_batch(
            algorithm, rollout, Completions(scores, mask, truncated, old, found.clone(), None), Carried()
        )
        loss_of = StepLoss(algorithm, batch, rows, shape.completion_tokens[1], Record.empty(len(rows)))
        engine.step(sequences, rows, most, loss_of, lambda _: None)
        seconds.append(time.process_time() - began)
    engine.close()
    return seconds[1:]


def trl(shape: shapes.Shape, folder: Path, steps: int) -> list[float]:
    """TRL's RLOOTrainer as it is, given the completions in place of sampled ones."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import RLOOConfig, RLOOTrainer

    from rloo_pipeline.demo.model import character_tokenizer

    torch.set_num_threads(1)
    prompts, completions, rewards = shapes.batch(shape)
    tokenizer: PreTrainedTokenizerFast = character_tokenizer()
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.process_time() - self.began)

    class Given(RLOOTrainer):
        def _tokenize_prompts(self, given: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
            self.places = [int(text) * shapes.K + place % shapes.K for place, text in enumerate(given)]
            return [prompts[int(text)] for text in given], None, {}

        def _generate_single_turn(self, *_: object) -> list[list[int]]:
            return [completions[place] for place in self.places]

    def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
        known = {tuple(ids): value for ids, value in zip(completions, rewards, strict=True)}
        return [known[tuple(ids)] for ids in completion_ids]

    arguments = RLOOConfig(
        output_dir=str(folder.parent / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=RATE,
        beta=BETA,
        max_steps=steps + 1,
        per_device_train_batch_size=len(completions),
        steps_per_generation=1,
        num_generations=shapes.K,
        max_completion_length=shape.completion_tokens[1],
        temperature=1.0,
    )
    trainer = Given(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
        args=arguments,
        reward_funcs=[reward],
        train_dataset=Dataset.from_dict({"prompt": [str(place) for place in range(len(prompts))]}),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    return seconds[1:]


def main() -> None:
    """Writes JSON to standard output, as its last line."""
    side, name, folder, steps = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    seconds = {"ours": ours, "trl": trl}[side](shapes.SHAPES[name], folder, steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "peak_mb": peak}), flush=True)


if __name__ == "__main__":
    main()
