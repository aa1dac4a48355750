"""Stages with GPUs that run at once on this machine have no more GPUs together than it has.

`gpu_stages` is the resource of Snakemake that limits them. Where the user gives none, it counts GPUs: a stage takes as
many as its engine needs (`runtime/gpu_claims.py` says which). A number that the user gives counts stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rloo_pipeline.config import Config
from rloo_pipeline.runtime import devices
from rloo_pipeline.workers import gpu_shares

RESOURCE = "gpu_stages"


def limit(rules: Iterable[Any], limits: Any, configs: Iterable[Config]) -> None:
    """Limits the stages to the GPUs that this process may use; does nothing without GPUs, or where a limit is given.

    Args:
        rules: Snakemake's rules.
        limits: what all jobs that run at once may use.
        configs: of the runs.
    """
    gpus = len(devices.visible_gpus()) if devices.has_gpu() else 0
    if not gpus or RESOURCE in limits:
        return
    limits[RESOURCE] = gpus
    configs = list(configs)
    for rule in rules:
        words = str(rule.shellcmd).split()[:2]
        if words[0] == "rloo" and RESOURCE in rule.resources and rule.resources[RESOURCE] != 0:
            rule.resources[RESOURCE] = min(gpus, gpu_shares.of_stage(words[1], configs))
