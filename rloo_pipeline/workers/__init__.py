"""Warm workers: engines that stay alive between the rounds of a run on one machine. They change no result."""
