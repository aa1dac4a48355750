"""reward_model: preferences → a reward model (Bradley–Terry, on the engine of updates) and its checks.

Training starts from the run's model or a different one, and changes all weights. The stage `checks` judges what is
measured here on held-out preferences, so changing a limit does not repeat the training.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rloo_pipeline.algorithm.preference_loss import bradley_terry
from rloo_pipeline.artifacts import assets as asset_files
from rloo_pipeline.artifacts import lineage
from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import PromptSet, held_out_part
from rloo_pipeline.before_run import checkpointing
from rloo_pipeline.checks import pair_checks
from rloo_pipeline.config import Config, RewardModel, Source, Update
from rloo_pipeline.data.preferences import Preference, preferences, question
from rloo_pipeline.data.rows import read_rows
from rloo_pipeline.errors import UserError, counted
from rloo_pipeline.runtime.progress import counting, say
from rloo_pipeline.seeds import derive
from rloo_pipeline.training.preference_pairs import Pairs, split_held_out, tokenized
from rloo_pipeline.training.reward_engine import RewardEngine
from rloo_pipeline.training.settings import TrainerSettings
from rloo_pipeline.training.sft import last_loss, take_steps


def reward_model(config: Config, assets: Path, prompts: Path, model: Path, output: Path) -> None:
    """Trains the reward model and measures it on held-out preferences; every rank calls this.

    Args:
        config: the stage's configuration.
        assets: folder that `stage-assets` wrote.
        prompts: folder that `prompts` wrote; pairs of its evaluation prompts are left out.
        model: folder of the reward model to write.
        output: checks.json.

    Raises:
        UserError: a row is not a preference, too few are left, or the model cannot be trained.
    """
    section = config.reward_model
    if section is None:
        raise UserError("reward_model: not set, so there is no reward model to train; set it")
    folder = asset_files.model_of(assets, "reward_model" if section.own_source else "model")
    start = Policy(folder, config.model.trust_remote_code)
    trained, held_out = _pairs(config, section, assets, prompts, start)
    config = checkpointing.resolve(config.of_reward_model, start.dimensions, "adamw")
    steps = max(1, len(trained.margins) * section.num_train_epochs // section.batch_size)
    if section.warmup_steps >= steps:
        raise UserError(
            f"reward_model.warmup_steps ({section.warmup_steps}) leaves none of the {steps} optimizer steps of "
            f"{len(trained.margins)} pairs after it; set fewer"
        )
    schedule = Update(
        learning_rate=section.learning_rate,
        lr_scheduler_type="linear",
        lr_horizon_rounds=steps,
        warmup_steps=section.warmup_steps,
    )
    settings = TrainerSettings.of_section(config, schedule, steps)
    engine = RewardEngine(start, settings, derive(config.seed, "reward model"))
    losses = train(engine, section, trained, steps, config.seed)
    with counting("held-out conversations", len(held_out.lengths)) as counter:
        rewards = engine.logps(held_out.sequences, counter.advance)[:, 0].double().numpy()
    digest = engine.save_policy(model, seed=config.seed, assets=lineage.assets_digest(assets))
    if engine.rank.first:
        measured = pair_checks.measures(
            rewards[::2],
            rewards[1::2],
            held_out.keys,
            np.array(held_out.lengths).reshape(-1, 2),
            derive(config.seed, "reward model", "bootstrap"),
        )
        last = last_loss(losses)
        about = {"policy": digest, "trained_pairs": len(trained.margins), "steps": steps, "loss": last}
        write_json(output, {**about, **measured})
        say(
            f"reward model: {steps} steps on {len(trained.margins)} pairs, loss from {losses[0]:.3f} to {last:.3f}; "
            f"it prefers the chosen one in {measured['accuracy']['value']:.1%} of the held-out pairs of a prompt, on "
            f"average over {counted(measured['prompts'], 'prompt')}"
        )
    engine.close()


def train(engine: RewardEngine, section: RewardModel, pairs: Pairs, steps: int, seed: int) -> list[float]:
    """Takes the optimizer steps; returns the mean loss of each."""
    margins = torch.tensor(pairs.margins, dtype=torch.float32)

    def loss_of(rows: Sequence[int], rewards: Tensor, *_: Tensor) -> Tensor:
        values = rewards[:, 0]
        of_pairs = margins[[row // 2 for row in rows[::2]]].to(values.device)
        loss = bradley_terry(values[::2], values[1::2], of_pairs, section.center_rewards_coefficient)
        return loss.sum() / section.batch_size

    def step(chosen: Sequence[int]) -> float:
        rows = [row for pair in chosen for row in (2 * pair, 2 * pair + 1)]
        return engine.step(pairs.sequences, rows, loss_of)

    order = derive(seed, "reward model", "order")
    return take_steps("reward model steps", len(margins), section.batch_size, steps, order, step)


def _pairs(config: Config, section: RewardModel, assets: Path, prompts: Path, model: Policy) -> tuple[Pairs, Pairs]:
    """The pairs to train on and the held-out ones, none with an evaluation prompt."""

    def read(name: str, source: Source) -> tuple[list[Preference], str]:
        path = asset_files.read(assets, name)[name]["path"]
        return list(preferences(read_rows(source, path), path, config.dataset.system_prompt)), path

    train, path = read("reward_model.train", section.train)
    train = _without_evaluation_prompts(train, prompts, path)
    held_out = None if section.eval is None else read("reward_model.eval", section.eval)[0]
    kept, held_out = split_held_out(train, held_out, config.seed, path)
    say(f"preferences: {len(kept)} of {len(train)} to train on, {len(held_out)} with other prompts held out")
    return (
        tokenized(kept, model, section.max_length, f"{path} (reward_model.train)"),
        tokenized(held_out, model, section.max_length, "held-out preferences"),
    )


def _without_evaluation_prompts(pairs: list[Preference], prompts: Path, path: str) -> list[Preference]:
    """The pairs whose prompts are not evaluation prompts; otherwise a gain could be the reward model's memory.

    Raises:
        UserError: no pair is left.
    """
    parts = {prompts / "eval", held_out_part(prompts)}
    evaluated = [prompt for part in parts for prompt in PromptSet(part).table["prompt"].to_pylist()]
    questions, texts = set(map(question, evaluated)), tuple(one for one in evaluated if isinstance(one, str))

    def is_evaluated(pair: Preference) -> bool:
        if isinstance(pair.chosen, str) and not pair.prompt:  # nothing says where its answer begins
            return pair.chosen.startswith(texts)
        return pair.key in questions

    kept = [pair for pair in pairs if not is_evaluated(pair)]
    if len(kept) < len(pairs):
        say(f"preferences: {len(pairs) - len(kept)} of {len(pairs)} left out, since their prompts are evaluated")
    if not kept:
        raise UserError(f"{path}: all pairs have prompts of dataset.eval, so none is left to train on; add others")
    return kept
