"""Limits concurrent GPU stages on this machine to the GPUs that it has.

The limit is Snakemake's resource `gpu_stages`. By default it counts GPUs: a stage takes as many as its engine needs
(`runtime/gpu_claims.py` chooses them). If the user sets a number, it counts stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rloo_pipeline.config import Config
from rloo_pipeline.runtime import devices
from rloo_pipeline.workers import gpu_shares

RESOURCE = "gpu_stages"


def limit(rules: Iterable[Any], limits: Any, configs: Iterable[Config]) -> None:
    """Limits the stages to the GPUs that this process may use; does nothing without GPUs, or if a limit is set.

    Args:
        rules: Snakemake's rules.
        limits: resources that all concurrent jobs may use together.
        configs: configurations of the runs.
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
