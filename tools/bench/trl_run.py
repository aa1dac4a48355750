"""TRL's RLOOTrainer through the rounds of one of our runs, as its user would write it: `trl_run.py RUN OUTPUT`.

RUN is the folder of a run of ours, for its resolved configuration, its prompts, and policy 0 to start from. Batch, K,
learning rate, rewards and steps are that configuration's, and OMP_NUM_THREADS says how many threads torch has; whatever
else RLOOTrainer has is as it comes, so transformers samples. The last policy is saved to OUTPUT. The last line printed
is {"completions", "tokens"}: how many were sampled, and their tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rloo_pipeline import import_string
from rloo_pipeline.config import Config, Reward
from rloo_pipeline.config.loading import load

LOGITS = 2**30
"""Bytes of logits that a micro-batch may have; a training step holds several times as much."""


def main() -> None:
    """Trains."""
    run, output = Path(sys.argv[1]), Path(sys.argv[2])
    config = load(run / "config.yaml")
    from trl.trainer.rloo_config import RLOOConfig

    one, counted = trainer(run, config, RLOOConfig(**options(config, output, vocabulary(run))))
    one.train()
    one.save_model()
    print(json.dumps({"completions": counted.completions, "tokens": counted.tokens}), flush=True)


def trainer(run: Path, config: Config, arguments: Any, callbacks: Sequence[Any] = ()) -> tuple[Any, Counted]:
    """TRL's trainer with a run's policy 0, prompts and rewards, and counts of the samples that it takes."""
    from datasets import load_from_disk
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.rloo_trainer import RLOOTrainer

    counted = Counted()
    made = RLOOTrainer(
        model=AutoModelForCausalLM.from_pretrained(run / "policies" / "00000", dtype=config.model.dtype),
        processing_class=AutoTokenizer.from_pretrained(run / "policies" / "00000"),
        args=arguments,
        reward_funcs=[counted, *map(reward, config.rewards)],
        callbacks=list(callbacks),
        train_dataset=load_from_disk(str(run / "prompts" / "train")).remove_columns(["prompt_id", "prompt_ids"]),
    )
    return made, counted


def options(config: Config, output: Path, vocabulary: int) -> dict[str, Any]:
    """The configuration as options of TRL's RLOOConfig."""
    rollout, algorithm, section = config.rollout, config.algorithm, config.update
    step = rollout.generation_batch_size // algorithm.steps_per_generation
    room = max(1, LOGITS // (4 * vocabulary * rollout.max_completion_length))
    micro = next(size for size in range(min(room, step), 0, -1) if step % size == 0)
    return {
        "output_dir": str(output),
        "use_cpu": True,
        "bf16": config.model.dtype == "bfloat16",
        "gradient_checkpointing": config.deepspeed.gradient_checkpointing is True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": config.seed,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": step // micro,
        "generation_batch_size": rollout.generation_batch_size,
        "max_steps": config.rounds * algorithm.num_iterations * algorithm.steps_per_generation,
        "num_iterations": algorithm.num_iterations,
        "num_generations": rollout.num_generations,
        "max_completion_length": rollout.max_completion_length,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "beta": algorithm.beta,
        "epsilon": algorithm.epsilon,
        "reward_weights": [0.0, *(reward.weight for reward in config.rewards)],
        "learning_rate": section.learning_rate,
        "lr_scheduler_type": section.lr_scheduler_type,
        "warmup_steps": section.warmup_steps,
        "adam_beta1": section.adam_betas[0],
        "adam_beta2": section.adam_betas[1],
        "adam_epsilon": section.adam_epsilon,
        "weight_decay": section.weight_decay,
        "max_grad_norm": section.max_grad_norm,
    }


def vocabulary(run: Path) -> int:
    """Of policy 0."""
    vocabulary: int = json.loads((run / "policies" / "00000" / "config.json").read_text())["vocab_size"]
    return vocabulary


def reward(section: Reward) -> Callable[..., Any]:
    """A reward function, which is in TRL's convention; it gets the arguments that it names."""
    from rloo_pipeline.user_code.reward_call import signature_of

    function = import_string.load(section.function)
    signature = signature_of(function)

    def scored(**arguments: Any) -> Any:
        return function(**{name: arguments[name] for name in signature.takes(arguments)}, **section.options)

    scored.__name__ = section.column
    return scored


class Counted:
    """Looks like a reward function, and counts."""

    __name__ = "counted"

    def __init__(self) -> None:
        self.completions = self.tokens = 0

    def __call__(self, completion_ids: list[list[int]], **_: object) -> list[float | None]:
        """0 for all."""
        self.completions += len(completion_ids)
        self.tokens += sum(map(len, completion_ids))
        return [0.0] * len(completion_ids)


if __name__ == "__main__":
    main()
