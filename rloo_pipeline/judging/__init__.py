"""Judges policies and runs: checks of policy 0, symptoms of a run, and statistics.

A check is a small function from evidence to one number: `registry` defines it, `evidence` is its input, and `verdicts`
compares each number with its limits in the configuration. `symptoms` does the same for the metrics of a run.
"""
