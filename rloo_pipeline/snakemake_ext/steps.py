"""Stages of one SLURM job of several nodes as steps of it, each on a node that has room: `rloo submit --nodes N`.

Snakemake starts the stages of a job on its first node. Its resource `shell_exec` names the shell that gets a rule's
command, outside of the image; here that is a script which hands the command to srun. SLURM then gives each stage the
CPUs that it has as threads. One that takes GPUs (`gpu_stages` in the profile) has all of a node's, or as many as `gres`
says in the profile; the others have none.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rloo_pipeline.cluster import containers, slurm
from rloo_pipeline.runtime import ranks

FOLDER = Path(".snakemake/rloo-steps")
SHELL = """#!/bin/sh
# Written by rloo: what Snakemake takes for a shell puts the command on a node of this job that has room.
unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE
export {step}=1
cpus=${{OMP_NUM_THREADS:-1}} most=${{SLURM_CPUS_PER_TASK:-1}}
[ "$cpus" -le "$most" ] || cpus=$most
exec srun --quiet --exact --nodes=1 --ntasks=1 --cpus-per-task="$cpus" --mem=0 --input=none {gres} \\
    sh -c 'mkdir -p {folders} && exec bash "$@"' sh "$@"
"""


def nodes() -> int:
    """Nodes of the SLURM job whose script this process is part of; 1 where it is in none, or in a step."""
    inside = slurm.own_job() is not None and "SLURM_STEP_ID" not in os.environ
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) if inside else 1


def spread(rules: Iterable[Any], limits: Any) -> None:
    """Makes steps of all jobs of these rules but of those that call srun by themselves, or are done in a moment and ask
    for no time.

    Args:
        rules: rules of Snakemake.
        limits: what all jobs that run at once may use; `gpu_stages` is meant for one node.
    """
    if "gpu_stages" in limits:
        limits["gpu_stages"] = limits["gpu_stages"].value * nodes()
    for rule in rules:
        if "runtime" in rule.resources and "mpi" not in rule.resources:
            rule.resources["shell_exec"] = str(_shell(_gres(rule.resources)).absolute())


def _gres(resources: Any) -> str:
    """The option of srun for what a rule takes of a node's GPUs."""
    if "gpu_stages" not in resources:
        return "--gres=none"
    asked = resources["gres"].raw if "gres" in resources else None
    return f"--gres={asked}" if isinstance(asked, str) else ""  # all GPUs that the job has on the node


def _shell(gres: str) -> Path:
    """The script for one way of taking GPUs. Its name says to Snakemake which shell it stands for."""
    path = FOLDER / (re.sub(r"\W+", "-", gres).strip("-") or "all") / "bash"
    # as on the first node: what this process has made there may lie on the node's own disk
    folders = [shlex.quote(os.environ[name]) for name in containers.CACHES if name in os.environ]
    inner = " ".join(['"${TMPDIR:-/tmp}"', *folders]).replace("'", "'\\''")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(SHELL.format(step=ranks.STEP, gres=shlex.quote(gres) if gres else "", folders=inner))
    beside.chmod(0o755)
    beside.replace(path)
    return path
