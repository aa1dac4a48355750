"""One side of the comparison of update steps, in a process of its own so that its peak memory is its own.

    step.py ours|trl SHAPE FOLDER STEPS   prints {"update": [seconds, ...], "passes": [seconds, ...], "peak_mb": …}

`update` is an optimizer step: loss, gradient, clipping, AdamW. `passes` are the log-probs that come before it, of the
reference and of the policy that sampled, since the KL is in the reward. The first of each is not counted. Both sides
have one thread and float32; seconds are of the CPU.

Before each step and its passes a side says TURN and waits for a line, so that the sides can take turns: what else the
machine does changes even a CPU's seconds, and comes and goes.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import shapes

from rloo_pipeline.artifacts.policy import Policy

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_pipeline.training.engine import Engine
    from rloo_pipeline.training.logprobs import TokenLogProbs

BETA, RATE = 0.05, 1e-6
TURN = "turn"


Seconds = tuple[list[float], list[float]]
"""Of the updates, and of the passes before them."""
Batch = tuple[list[list[int]], list[list[int]], list[float]]
"""Prompts, completions (K a prompt, neighbours), rewards."""


class Place(NamedTuple):
    """Settings of TRL's trainer."""

    device: str = "cpu"
    dtype: str = "float32"
    micro: int | None = None
    """Completions in a micro-batch; all where not given."""
    beta: float = BETA
    clock: Callable[[], float] = time.process_time
    checkpointing: bool = False
    wait: Callable[[], object] = lambda: None
    """Before each step."""


def wait() -> None:
    """Waits for this side's turn; ends the process if standard input is closed."""
    print(TURN, flush=True)
    if not sys.stdin.readline():
        raise SystemExit("step.py: standard input is closed before the last step")


class OurSide:
    """Our reference pass, engine and loss on the batch of a shape."""

    MOST = 16384
    """Tokens of a micro-batch."""

    def __init__(self, shape: shapes.Shape, folder: Path) -> None:
        """Args: the shape, and the folder of its model."""
        import torch

        from rloo_pipeline.config import Algorithm, Rollout
        from rloo_pipeline.training.packing import Sequences

        torch.set_num_threads(1)
        prompts, completions, rewards = shapes.batch(shape)
        self.shape, self.folder = shape, folder
        self.sequences = Sequences([ids for ids in prompts for _ in range(shapes.K)], completions)
        self.rows = list(range(len(completions)))
        self.mask = torch.arange(max(map(len, completions))) < torch.tensor(list(map(len, completions))).unsqueeze(-1)
        self.scores = torch.tensor(rewards, dtype=torch.float64)
        self.algorithm = Algorithm(beta=BETA)
        self.rollout = Rollout(
            num_generations=shapes.K,
            generation_batch_size=len(completions),
            max_completion_length=shape.completion_tokens[1],
        )

    def start(self) -> Engine:
        """The engine, which starts."""
        from rloo_pipeline.training.engine import Engine

        return Engine(Policy(self.folder), shapes.settings(RATE, max_tokens_per_micro_batch=self.MOST), 0)

    def reference_logps(self, reference: TokenLogProbs) -> Tensor:
        """The reference's log-probs, (completions, tokens)."""
        import torch

        logps = torch.zeros(self.mask.shape)
        with torch.inference_mode():
            for some in reference.form.micro_batches(self.sequences, self.rows, self.MOST):
                pack = self.sequences.pick(some)
                values, _ = pack.unpack(reference(pack).logps)
                logps[some, : values.shape[1]] = values
        return logps

    def batch(self, engine: Engine, reference_logps: Tensor) -> Any:
        """The batch of an update: the sampling policy's log-probs and the advantages."""
        import torch

        from rloo_pipeline.training.batch import AlgorithmState, RoundTensors, make_batch

        old = engine.logps(self.sequences)
        truncated = torch.zeros(len(self.rows), dtype=torch.bool)
        completions = RoundTensors(self.scores, self.mask, truncated, old, reference_logps, None)
        return make_batch(self.algorithm, self.rollout, completions, AlgorithmState())[0]

    def update(self, engine: Engine, batch: Any) -> None:
        """An optimizer step."""
        from rloo_pipeline.training.objective import Record, StepLoss

        record = Record.empty(len(self.rows))
        loss_of = StepLoss(self.algorithm, batch, self.rows, self.shape.completion_tokens[1], record)
        engine.step(self.sequences, self.rows, loss_of)


def ours(shape: shapes.Shape, folder: Path, steps: int) -> Seconds:
    """Our reference pass, engine and loss."""
    from rloo_pipeline.training import policy_model
    from rloo_pipeline.training.logprobs import TokenLogProbs

    side = OurSide(shape, folder)
    referenced, passes, updates = [], [], []
    reference = TokenLogProbs(policy_model.load(Policy(folder), "float32"), 1.0).eval()
    for _ in range(steps + 1):
        began = time.process_time()
        reference_logps = side.reference_logps(reference)
        referenced.append(time.process_time() - began)
    del reference  # a stage of its own, in a process of its own
    engine = side.start()
    for before in referenced:
        wait()
        began = time.process_time()
        batch = side.batch(engine, reference_logps.clone())
        passes.append(before + time.process_time() - began)
        began = time.process_time()
        side.update(engine, batch)
        updates.append(time.process_time() - began)
    engine.close()
    return updates[1:], passes[1:]


def trl(shape: shapes.Shape, folder: Path, steps: int) -> Seconds:
    """TRL's side, with one thread."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    return trl_steps(model, shapes.batch(shape), folder.parent / "trl", steps, Place(wait=wait))


def trl_steps(model: Any, batch: Batch, output: Path, steps: int, place: Place) -> Seconds:
    """TRL's RLOOTrainer as it is, given the completions in place of sampled ones."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl.trainer.rloo_config import RLOOConfig
    from trl.trainer.rloo_trainer import RLOOTrainer

    from rloo_pipeline.demo.character_model import character_tokenizer

    prompts, completions, rewards = batch
    micro = place.micro or len(completions)
    tokenizer: PreTrainedTokenizerFast = character_tokenizer()
    updates, passes = [], []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            updates.append(place.clock() - trainer.scored)

    class Given(RLOOTrainer):
        def _tokenize_prompts(self, texts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
            self.places = [int(text) * shapes.K + place % shapes.K for place, text in enumerate(texts)]
            return [prompts[int(text)] for text in texts], None, {}

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            place.wait()
            began = place.clock()
            batch = super()._generate_and_score_completions(inputs)
            self.scored = place.clock()
            passes.append(self.scored - began)
            return batch

        def _generate_single_turn(self, *_: object) -> list[list[int]]:
            return [completions[place] for place in self.places]

    def reward(completion_ids: list[list[int]], **_: object) -> list[float | None]:
        reward_of = {tuple(ids): value for ids, value in zip(completions, rewards, strict=True)}
        return [reward_of[tuple(ids)] for ids in completion_ids]

    arguments = RLOOConfig(
        output_dir=str(output),
        use_cpu=place.device == "cpu",
        bf16=place.dtype == "bfloat16",
        gradient_checkpointing=place.checkpointing,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=RATE,
        beta=place.beta,
        max_steps=steps + 1,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=len(completions) // micro,
        num_generations=shapes.K,
        max_completion_length=max(map(len, completions)),
        temperature=1.0,
    )
    trainer = Given(
        model=model,
        args=arguments,
        reward_funcs=[reward],
        train_dataset=Dataset.from_dict({"prompt": [str(place) for place in range(len(prompts))]}),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    return updates[1:], passes[1:]


def main() -> None:
    """Writes JSON to standard output, as its last line."""
    side, name, folder, steps = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    updates, passes = {"ours": ours, "trl": trl}[side](shapes.SHAPES[name], folder, steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"update": updates, "passes": passes, "peak_mb": peak}), flush=True)


if __name__ == "__main__":
    main()
