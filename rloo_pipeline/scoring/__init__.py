"""Calls reward functions in worker processes, and what several reward functions share: text, numbers, HTTP."""
