"""Warm workers: processes that keep engines alive between the rounds of a run on one machine. They change no result."""
