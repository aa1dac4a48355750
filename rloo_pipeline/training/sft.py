"""Supervised fine-tuning on demonstrations, a part of the stage `warmstart`.

Loss: mean negative log-prob over the completion tokens of an optimizer step, the end token included.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from rloo_pipeline.artifacts import assets as asset_files
from rloo_pipeline.artifacts import lineage
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Config, Sft
from rloo_pipeline.runtime.progress import counting, say
from rloo_pipeline.seeds import derive, permutation
from rloo_pipeline.training.demonstrations import demonstrations
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.packing import Sequences
from rloo_pipeline.training.settings import TrainerSettings


def sft(config: Config, section: Sft, start: Policy, assets: Path, prompts: Path, output: Path) -> None:
    """Trains the staged model on the demonstrations and writes the policy.

    Args:
        config: configuration of the run.
        section: the section `warmstart.sft`.
        start: the staged model.
        assets: folder with assets.json, which names the demonstrations.
        prompts: folder of the prompt sets; evaluation prompts are not trained on.
        output: folder of the policy.

    Raises:
        UserError: no demonstration is left to train on, or a column is missing.
    """
    path = asset_files.read(assets, "demonstrations")["demonstrations"]["path"]
    sequences = demonstrations(config, section, path, start, prompts).trained
    # all weights, also in runs whose updates train a LoRA adapter
    settings = TrainerSettings.of_section(config, section, section.steps)
    engine = Engine(start, settings, derive(config.seed, "sft"))
    order = derive(config.seed, "sft", "order")
    numbers = (len(sequences.prompts), section.batch_size, section.steps)
    losses = take_steps("SFT steps", *numbers, order, lambda rows: _step(engine, sequences, rows))
    engine.save_policy(output, seed=config.seed, assets=lineage.assets_digest(assets))
    if engine.rank.first:
        say(
            f"SFT: {section.steps} steps on {len(sequences.prompts)} demonstrations, loss per token from "
            f"{losses[0]:.3f} to {last_loss(losses):.3f}"
        )
    engine.close()


def _step(engine: Engine, sequences: Sequences, rows: Sequence[int]) -> float:
    """Takes one optimizer step; returns its mean loss per token."""
    tokens = sum(len(sequences.completions[row]) for row in rows)

    def loss_of(_: Sequence[int], logps: Tensor, mask: Tensor, __: Tensor) -> Tensor:
        return -(logps * mask).sum() / tokens

    return engine.step(sequences, rows, loss_of)


def take_steps(
    label: str, count: int, size: int, steps: int, seed: int, step: Callable[[list[int]], float]
) -> list[float]:
    """Takes optimizer steps, whose rows come from one seeded permutation per epoch, end to end; returns their losses.

    Args:
        label: label of the progress line.
        count: number of rows.
        size: rows per step.
        steps: number of steps.
        seed: decides the permutations.
        step: takes a step with some rows, and returns its loss.
    """
    losses = list[float]()
    with counting(label, steps) as counter:
        for first in range(0, steps * size, size):
            epochs = (divmod(draw, count) for draw in range(first, first + size))
            losses.append(step([_order(count, derive(seed, epoch))[place] for epoch, place in epochs]))
            counter.advance()
    return losses


def last_loss(losses: Sequence[float]) -> float:
    """Mean loss of the last tenth of the steps."""
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)


@lru_cache(2)  # takes over half a second for a million rows, and each step needs it
def _order(count: int, seed: int) -> list[int]:
    return permutation(count, seed)
