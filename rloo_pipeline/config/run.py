"""The configuration of a whole run.

A stage gets only its own sections (`Config.only`), and Snakemake reruns it when one that decides its result changes
(`Config.params`). Both come from `STAGES`, so a stage cannot read a key without being rerun for it.
"""

import os
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, Self

from rloo_pipeline.config import cross_checks
from rloo_pipeline.config.data import ModelSource, Source, braces
from rloo_pipeline.config.rewards import Reward
from rloo_pipeline.config.run_keys import TENSORBOARD, RunKeys
from rloo_pipeline.config.sampling import FP8
from rloo_pipeline.config.section import JSON, Unused
from rloo_pipeline.stages.table import CALL_THE_DECIDING_REWARD, STAGES

TABLE_COLUMNS = (
    *("prompt_id", "prompt", "prompt_ids", "sample", "completion", "completion_ids", "prompts", "completions"),
    *("sampling_logps", "finish_reason", "seed", "reward", "seconds", "error"),
    *("environment_reward", "environment_state", "environment_observation", "environments"),
    *("image_ids", "placeholder_ids", "other_completions"),
)
"""Names that dataset columns may not have, because reward functions get arguments or tables get columns of these
names.
"""

ADDED_KEYS: Mapping[str, object] = {"dataset.shuffle_dataset": True}
"""Paths of keys that were added since the last release, and their defaults."""


class Config(RunKeys):
    """Configuration of one run."""

    def _problems(self) -> Iterator[str]:
        yield from (f"data_dir: {problem}" for problem in braces(self.data_dir))
        if self.evaluation.each_round and self.deciding_reward.gpus:
            yield Unused(
                f"evaluation.each_round has no effect, since the reward {self.deciding_reward.column}, which decides, "
                "needs GPUs (rewards.gpus); name another in correct.reward, or leave each_round out"
            )
        if self.warmstart.sft is None:
            unused = self.checks.unused(("demonstrations",), "without warmstart.sft; set that")
            yield from (Unused(f"checks: {problem}") for problem in unused)
        yield from cross_checks.problems(self)

    @property
    def trackers(self) -> list[str]:
        """Trackers in `report_to` other than TensorBoard, without duplicates."""
        return [name for name in dict.fromkeys(self.report_to) if name != TENSORBOARD]

    @property
    def sampler_format(self) -> str:
        """Number format of the engine that samples rollouts. How far its log-probs may be from the trainer's depends on
        it.
        """
        return self.model.dtype if self.rollout.quantization is None else FP8

    @property
    def evaluated(self) -> dict[str, int]:
        """The evaluations in order: name → the round whose policy is evaluated."""
        every = self.evaluation.every
        between = [] if every is None else range(every, self.rounds, every)
        return {"warmstart": 0, **{f"{number:05d}": number for number in between}, "final": self.rounds}

    @property
    def deciding_reward(self) -> Reward:
        """The reward function that decides what is right."""
        return next((reward for reward in self.rewards if reward.column == self.correct.reward), self.rewards[0])

    @property
    def deciding(self) -> JSON:
        """The parts of the deciding reward that affect its scores: function and options, but not the weight."""
        return {key: value for key, value in self.deciding_reward.decides().items() if key != "weight"}

    def rewards_of(self, stage: str) -> list[Reward]:
        """The reward functions that decide the result of `stage`. One alone decides with any weight."""
        if stage not in CALL_THE_DECIDING_REWARD:
            return self.rewards
        return [self.deciding_reward.model_copy(update={"weight": 1.0})]

    @property
    def candidates(self) -> dict[str, int]:
        """The evaluations that `select` chooses from: name → round."""
        return {name: round_ for name, round_ in self.evaluated.items() if round_ > 0}

    @property
    def held_out_each_round(self) -> int:
        """Number of held-out prompts that the sampler of each round also answers."""
        settings, completions = self.evaluation, self.rollout.sampled_prompts * self.rollout.num_generations
        count = min(completions // 20, 200) if settings.each_round is None else settings.each_round
        return 0 if self.deciding_reward.gpus else min(count, settings.num_prompts or count)

    @property
    def longest_evaluated(self) -> int:
        """Maximum length of a completion in evaluations, in tokens."""
        return self.evaluation.max_completion_length or self.rollout.max_completion_length

    @property
    def longest_sequence(self) -> int:
        """Maximum number of tokens in a prompt with its completion."""
        return self.dataset.max_prompt_length + self.rollout.max_completion_length

    @property
    def sampler_gpus(self) -> int:
        """Number of GPUs of a sampling job: for its engines and its environments."""
        return self.vllm.gpus + self.rollout.environment_gpus

    @property
    def node_folder(self) -> Path | None:
        """Folder on each node for the weights of policies that are not kept; None if those are in the run's folder."""
        if self.exchange == "shared":
            return None
        return Path("/dev/shm" if self.exchange == "node" else os.path.expandvars(self.exchange))

    def keeps(self, round_: int) -> bool:
        """True if the policy of a round is kept. With a lag, the last ones are kept too: if the run is extended, its
        next rounds sample from them.
        """
        return round_ % self.keep_every == 0 or round_ >= self.rounds - self.rollout.lag

    def page_is_due(self, round_: int) -> bool:
        """True if the page is written after this round; never after the last one."""
        every = -(-self.rounds // 20) if self.report.every is None else self.report.every
        return every > 0 and (round_ == 1 or round_ % every == 0)

    @property
    def measures_difficulty(self) -> bool:
        """True if policy 0 samples all training prompts, for their pass rates."""
        select = self.dataset.select
        return select is not None and (select.pass_rate is not None or select.weights == "static")

    @property
    def updates_pass_rates(self) -> bool:
        """True if the scores of a round change how the prompts of later rounds are drawn."""
        return self.dataset.select is not None and self.dataset.select.weights == "online"

    @property
    def uses_reference(self) -> bool:
        """True if updates need log-probs of the reference policy."""
        return self.algorithm.beta != 0

    @property
    def teachers(self) -> dict[str, Self]:
        """For each teacher, by name, the configuration of a run with it as the model. A single teacher has an empty
        name.
        """
        return {
            name: self.model_copy(update={"model": source.in_place_of(self.model)})
            for name, source in self.algorithm.teacher_sources.items()
        }

    @property
    def row_sources(self) -> dict[str, Source]:
        """The datasets of a run, by configuration key: prompts, demonstrations, preferences."""
        sources = {f"dataset.{name}": source for name, source in self.dataset.parts.items()}
        if self.warmstart.sft is not None:
            sources["warmstart.sft.demonstrations"] = self.warmstart.sft.demonstrations
        if self.reward_model is not None:
            sources["reward_model.train"] = self.reward_model.train
            if self.reward_model.eval is not None:
                sources["reward_model.eval"] = self.reward_model.eval
        return sources

    @property
    def model_sources(self) -> list[ModelSource]:
        """The model, the teachers, and the model that a reward model starts from."""
        reward_models = [] if self.reward_model is None else [self.reward_model]
        return [self.model, *self.algorithm.teacher_sources.values(), *reward_models]

    @property
    def reward_models_on_gpus(self) -> int:
        """Number of reward functions that score with a reward model on a GPU."""
        return sum(reward.is_model and reward.gpus > 0 for reward in self.rewards)

    @property
    def of_reward_model(self) -> Self:
        """The configuration of a run with a reward model, with the model that it starts from as `model`."""
        assert self.reward_model
        source = self.reward_model if self.reward_model.own_source else self.model
        return self.model_copy(update={"model": source.in_place_of(self.model)})

    def with_reward_model(self, folder: str) -> Self:
        """The configuration with the folder of the run's own reward model filled into the options of the rewards that
        use it.
        """
        rewards = [
            reward.model_copy(update={"options": reward.options | {"model": folder}})
            if reward.uses_own_model
            else reward
            for reward in self.rewards
        ]
        return self.model_copy(update={"rewards": rewards})

    @property
    def arm_json(self) -> str:
        """The configuration that all runs of an experiment's arm share, as JSON: everything but name and seed."""
        return self.model_copy(update={"run": "", "seed": 0}).model_dump_json()

    def override(self, changes: Mapping[str, Any]) -> Self:
        """A copy with some keys changed, each written as `key` or `section.key`."""
        config = self
        for path, value in changes.items():
            section, _, key = path.partition(".")
            owner = getattr(config, section) if key else config
            if (key or section) not in type(owner).model_fields:
                raise AttributeError(path)  # model_copy would add it
            changed = owner.model_copy(update={key: value}) if key else value
            config = config.model_copy(update={section: changed})
        return config

    def only(self, stage: str) -> Self:
        """A copy with the sections that `stage` may read; access to any other section raises AttributeError."""
        copy = self.model_copy()
        for section in type(self).model_fields.keys() - {*STAGES[stage].decides, *STAGES[stage].reads}:
            del copy.__dict__[section]
        return copy

    def params(self, stage: str) -> JSON:
        """Everything that decides the result of `stage`, as plain JSON. Snakemake reruns the stage when it changes."""
        decides, but, _ = STAGES[stage]
        params: JSON = self.model_dump(mode="json", include=dict(decides), exclude=dict(but))
        if "rewards" in params:
            params["rewards"] = [reward.decides() for reward in self.rewards_of(stage)]
        if params.get("judge") and self.judge:
            params["judge"] = self.judge.decides()
        # a run from before a key existed keeps its params
        for path, default in ADDED_KEYS.items():
            *sections, key = path.split(".")
            holder = reduce(lambda outer, section: outer.get(section) or {}, sections, params)
            if key in holder and holder[key] == default:
                del holder[key]
        if stage == "warmstart" and self.warmstart.sft is None:  # then deepspeed has no effect
            del params["deepspeed"]
        return params
