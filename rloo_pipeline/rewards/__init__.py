"""Reward functions, one file per task: `f(prompts, completions, completion_ids, **columns) -> list[float | None]`.

They are sync or async and follow TRL's convention. `user_code/` calls them, just like users' own functions.
"""
