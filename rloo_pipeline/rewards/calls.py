"""Import path of `unscored` for the reward functions of users."""

from rloo_pipeline.user_code.reward_call import unscored

__all__ = ["unscored"]
