"""Judges policies and runs: checks of policy 0, symptoms of a run, and statistics.

`verdicts` and `diagnosis` apply the functions of rloo_pipeline/checks/ with the limits of the configuration.
"""
