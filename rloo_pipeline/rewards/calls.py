"""Where reward functions of users import `unscored` from; it is `rloo_pipeline.scoring.calls.unscored`."""

from rloo_pipeline.scoring.calls import unscored

__all__ = ["unscored"]
