"""The section `reward_model`: a reward model that the run trains from preferences and then scores with."""

from collections.abc import Iterator

from pydantic import Field

from rloo_pipeline.config.data import ModelSource, Source
from rloo_pipeline.config.rewards import Reward
from rloo_pipeline.config.training import Deepspeed


class RewardModel(ModelSource):
    """Reward model (sequence classification, one output) that the run trains from preferences with the Bradley–Terry
    loss before its rounds. The reward `rloo_pipeline.rewards.model:reward_model` scores with it if its option `model`
    is not set. Without `name_or_path` and `build`, training starts from the model of the run.
    """

    train: Source
    """Preferences in TRL's format: columns `chosen` and `rejected`, with the prompt in both or in a column `prompt`, as
    text or messages; and optionally `margin`, by which the reward of `chosen` should be higher.
    """
    eval: Source | None = None
    """Held-out preferences for the checks. Default: those of a tenth of the prompts in `train`, drawn with the seed."""
    num_train_epochs: int = Field(1, ge=1)
    """Passes over the preferences."""
    batch_size: int = Field(32, ge=1)
    """Pairs per optimizer step."""
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate, which decays linearly to 0."""
    warmup_steps: int = Field(0, ge=0)
    """As `update.warmup_steps`. It must be less than the number of steps."""
    max_length: int = Field(1024, ge=1)
    """Maximum length of a conversation in tokens. Pairs with a longer one are dropped, as in TRL; the log says how
    many.
    """
    center_rewards_coefficient: float = Field(0.0, ge=0)
    """Weight of (r_chosen + r_rejected)² in the loss, which keeps rewards near 0 (arXiv 2312.09244)."""

    def _problems(self) -> Iterator[str]:
        if self.name_or_path is not None and self.build is not None:
            yield "give at most one of name_or_path and build"

    @property
    def own_source(self) -> bool:
        """True if training starts from a different model than the run's."""
        return self.name_or_path is not None or self.build is not None


def problems(section: RewardModel | None, rewards: list[Reward], deepspeed: Deepspeed) -> Iterator[str]:
    """A sentence for each key of other sections that conflicts with the section, or needs it."""
    users = [reward for reward in rewards if reward.uses_own_model]
    if section is None:
        if users:
            yield (
                f"rewards: {users[0].column} names no model; set its option model to a folder, or train one from "
                "preferences (reward_model)"
            )
        return
    if not users:
        yield (
            "reward_model: no reward uses it; add the reward rloo_pipeline.rewards.model:reward_model without the "
            "option model, or leave the section out"
        )
    for reward in users:
        for option in {"chat_template_kwargs", "output", "revision"} & reward.options.keys():
            yield f"rewards: {reward.column}: reward_model is trained without {option}; leave the option out"
    if deepspeed.sequence_parallel > 1:
        yield "reward_model cannot be trained with deepspeed.sequence_parallel yet; set it to 1"
