"""Sampling completions: vLLM behind one small interface."""
