"""sft: demonstrations → a policy trained to imitate them (packed, DeepSpeed). A part of the stage `warmstart`.

Loss: mean negative log-prob of the completion tokens of an optimizer step, the end token included.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.config import Config, Sft
from rloo_pipeline.runtime.progress import counting, say
from rloo_pipeline.seeds import derive, permutation
from rloo_pipeline.training.demonstrations import demonstrations
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.packing import Sequences
from rloo_pipeline.training.schedule import Schedule
from rloo_pipeline.training.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor


def sft(config: Config, section: Sft, assets: Path, prompts: Path, output: Path) -> None:
    """Trains the staged model on the demonstrations and writes the policy.

    Raises:
        UserError: no demonstrations are left, or a column is missing.
    """
    import torch

    torch.set_num_threads(config.deepspeed.threads)
    places = read_json(assets / "assets.json")
    start = Path(places["model"]["path"])
    sequences = demonstrations(config, section, places["demonstrations"]["path"], start, prompts).trained
    engine = Engine(start, _settings(config, section), derive(config.seed, "sft"))
    losses: list[float] = []
    with counting("SFT steps", section.steps) as counter:
        for step in range(section.steps):
            rows = _rows_of_step(len(sequences.prompts), section.batch_size, step, derive(config.seed, "sft", "order"))
            losses.append(_step(engine, sequences, rows, config.deepspeed.max_tokens_per_micro_batch))
            counter.advance()
    engine.save_policy(output)
    if engine.rank.first:
        tail = losses[-max(1, len(losses) // 10) :]
        say(
            f"SFT: {section.steps} steps on {len(sequences.prompts)} demonstrations, loss "
            f"{losses[0]:.3f} to {sum(tail) / len(tail):.3f} a token"
        )
    engine.close()


def _step(engine: Engine, sequences: Sequences, rows: Sequence[int], max_tokens: int) -> float:
    """One optimizer step; returns its loss a token."""
    tokens = sum(len(sequences.completions[row]) for row in rows)

    def loss_of(_: Sequence[int], logps: Tensor, mask: Tensor, __: Tensor) -> Tensor:
        return -(logps * mask).sum() / tokens

    return engine.step(sequences, rows, max_tokens, loss_of, lambda _: None)


def _rows_of_step(count: int, size: int, step: int, seed: int) -> list[int]:
    """The demonstrations of an optimizer step: epochs of seeded permutations, laid end to end."""
    places = range(step * size, (step + 1) * size)
    epochs = range(places[0] // count, places[-1] // count + 1)
    orders = {epoch: permutation(count, derive(seed, epoch)) for epoch in epochs}
    return [orders[place // count][place % count] for place in places]


def _settings(config: Config, section: Sft) -> Settings:
    """All weights are trained, also where RLOO trains an adapter."""
    return Settings(
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
        temperature=1.0,
        schedule=Schedule(
            section.learning_rate, section.lr_scheduler_type, section.warmup_steps, section.steps, section.min_lr_ratio
        ),
        adam_betas=section.adam_betas,
        adam_epsilon=1e-8,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        zero_stage=config.deepspeed.zero_stage,
        gradient_checkpointing=config.deepspeed.gradient_checkpointing,
        lora=None,
        communication_data_type=config.deepspeed.communication_data_type,
        disable_dropout=section.disable_dropout,
    )
