"""Checks of policy 0 before any round: small functions from evidence to one number each.

`registry` defines a check and `evidence` its input. `tokens`, `engines`, `probe_samples` and `group_stats` hold the
checks, `mixing` the mathematics of mixed groups, and `verdicts` compares each number with its limits in the
configuration. Nothing here reads a file or loads a model, except `token_facts`; stages/checks.py gathers the evidence.
"""
