"""TRL's own trainers on a given round: sampling is replaced, everything else is theirs.

`train()` runs as it is, at a learning rate of 0: dataset, sampler, prompts, rewards, old and reference log-probs,
advantages, loss and backward pass are the trainer's. After each optimizer step's gradient the weights are moved by
`shift`, so that the next step sees ratios other than 1.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.rounds import LONGEST, Round, Step, shift
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer


class Observed:
    """Mixed into a trainer: gives it the round's completions and keeps the rows, loss and gradient of each step."""

    def give(self, round_: Round, sampling_logps: list[list[float]] | None) -> None:
        """The completions in place of sampled ones; with the sampler's log-probs they count as vLLM's."""
        self.round, self.sampling_logps = round_, sampling_logps
        self.rows_of_step: list[int] = []
        self.loss = 0.0
        self.steps: list[Step] = []
        if sampling_logps is not None:
            self.use_vllm = True

    def rows_of(self, prompt_ids: list[list[int]]) -> list[int]:
        """The completions of these prompts, which must come in whole groups of the round."""
        first = {tuple(ids): row for row, ids in reversed(list(enumerate(self.round.prompt_ids)))}
        rows = [first[tuple(ids)] + place % self.round.samples for place, ids in enumerate(prompt_ids)]
        assert sorted(rows) == self.round.rows
        return rows

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        pad, width = self._tokenizer.pad_token_id, inputs["completion_ids"].shape[1]
        rows = {tuple(ids + [pad] * (width - len(ids))): row for row, ids in enumerate(self.round.completion_ids)}
        self.rows_of_step += [rows[tuple(ids)] for ids in inputs["completion_ids"].tolist()]
        return super()._compute_loss(model, inputs)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.loss += float(loss)
        if self.accelerator.sync_gradients:
            gradient = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
            metrics = {name: values[-1] for name, values in self._metrics["train"].items()}
            self.steps.append(Step(self.rows_of_step, self.loss, gradient, metrics))
            self.rows_of_step, self.loss = [], 0.0
            shift(model, len(self.steps))
        return loss


class Rloo(Observed, RLOOTrainer):
    """RLOOTrainer on a given round."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: object) -> list[list[int]]:
        return [self.round.completion_ids[row] for row in self.rows_of(prompt_ids)]


class Grpo(Observed, GRPOTrainer):
    """GRPOTrainer on a given round."""

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *_: object
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        rows = self.rows_of(prompt_ids)
        logps = None if self.sampling_logps is None else [self.sampling_logps[row] for row in rows]
        return [self.round.completion_ids[row] for row in rows], logps


def steps(
    trainer: type[Rloo | Grpo],
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    round_: Round,
    output: Path,
    sampling_logps: list[list[float]] | None = None,
    **options: Any,
) -> list[Step]:
    """What `trainer` makes of a round in two optimizer steps, with the model in `folder` as the reference.

    Args:
        options: of RLOOConfig or GRPOConfig. Without steps_per_generation both steps are on the whole round, with
            gradient_accumulation_steps each in so many micro-batches.
    """
    steps_a_round = options.get("steps_per_generation", 1)
    micro_batches = steps_a_round * options.get("gradient_accumulation_steps", 1)
    arguments = (RLOOConfig if trainer is Rloo else GRPOConfig)(
        output_dir=str(output),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        learning_rate=0.0,
        max_grad_norm=0.0,
        max_steps=2,
        num_iterations=2 // steps_a_round,
        per_device_train_batch_size=len(round_.prompts) // micro_batches,
        num_generations=round_.samples,
        max_completion_length=LONGEST,
        shuffle_dataset=False,
        **options,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    shift(model, 0)
    trainer_object = trainer(
        model=model,
        args=arguments,
        reward_funcs=[_reward(round_, number) for number in range(len(round_.scores))],
        train_dataset=Dataset.from_dict({"prompt": list(dict.fromkeys(round_.prompts))}),
        processing_class=tokenizer,
    )
    trainer_object.give(round_, sampling_logps)
    trainer_object.train()
    assert len(trainer_object.steps) == 2
    return trainer_object.steps


def _reward(round_: Round, number: int) -> Callable[..., list[float | None]]:
    """The round's reward function with this number."""
    scores = {tuple(ids): score for ids, score in zip(round_.completion_ids, round_.scores[number], strict=True)}

    def reward(completion_ids: list[list[int]], **_: object) -> list[float | None]:
        return [scores[tuple(ids)] for ids in completion_ids]

    reward.__name__ = f"reward_{number}"
    return reward
