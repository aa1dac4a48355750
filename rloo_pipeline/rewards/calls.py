"""Import path of `unscored` for the reward functions of users."""

from rloo_pipeline.scoring.reward_call import unscored

__all__ = ["unscored"]
