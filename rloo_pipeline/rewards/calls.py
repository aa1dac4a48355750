"""Import path of `unscored` for users' reward functions."""

from rloo_pipeline.user_code.reward_call import unscored

__all__ = ["unscored"]
