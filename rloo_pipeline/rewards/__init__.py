"""Reward functions, one a file, and the loader that finds them and anyone's own.

A reward is `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, sync or async: TRL's convention.
"""
