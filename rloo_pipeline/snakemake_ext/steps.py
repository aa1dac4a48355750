"""Places stages that run in Snakemake's SLURM job or machine: on the nodes of the job, or on the machine's GPUs.

With `rloo submit --nodes N`, each stage runs on a node of the job that has room.

Snakemake starts all stages on the job's first node. Its resource `shell_exec` names the shell that runs a rule's
command, outside the image; here it is a script that passes the command to the host of a node
(`cluster/step_client.py`) or, without hosts, to srun. SLURM then gives each stage as many CPUs as it has threads. A
stage that uses GPUs (`gpu_stages` in the profile) gets all GPUs of a node, or as many as `gres` says in the profile;
the others get none.

On one machine, Snakemake's resource `gpu_stages` limits concurrent stages. By default it counts GPUs: a stage takes as
many as its engine needs (`runtime/gpu_claims.py` chooses them). If the user sets a number, it counts stages.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rloo_pipeline.cluster import containers, slurm, step_client
from rloo_pipeline.config import Config
from rloo_pipeline.runtime import devices, ranks
from rloo_pipeline.snakemake_ext.failures import stage_of
from rloo_pipeline.workers import client, gpu_shares

FOLDER = Path(".snakemake/rloo-steps")
RESOURCE = "gpu_stages"
SHELL = """#!/bin/sh
# Written by rloo. Snakemake uses this as its shell; it runs the command on a node of this job that has room.
unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE
export {step}=1
cpus=${{OMP_NUM_THREADS:-1}} most=${{SLURM_CPUS_PER_TASK:-1}}
[ "$cpus" -le "$most" ] || cpus=$most
exec {client} srun --quiet --exact --nodes=1 --ntasks=1 --cpus-per-task="$cpus" --mem=0 --input=none {options} \\
    sh -c 'mkdir -p {folders} || exit
        [ -z "${workers}" ] || {workers}="${{{workers}%@*}}@$SLURMD_NODENAME"
        exec bash "$@"' sh "$@"
"""
SHORT = """#!/bin/sh
# Written by rloo. Snakemake uses this as its shell; it runs the command on this node, by its host if there is one.
exec {client} bash "$@"
"""


def nodes() -> int:
    """Number of nodes of the SLURM job whose batch script started this process; 1 outside a job, and in a step."""
    inside = slurm.own_job() is not None and "SLURM_STEP_ID" not in os.environ
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) if inside else 1


def spread(rules: Iterable[Any], limits: Any, anywhere: bool = False) -> None:
    """Makes Snakemake run the jobs of these rules on any node, except rules that call srun themselves (`mpi`). Short
    jobs, which request no time (`runtime`), stay on this node.

    Args:
        rules: Snakemake's rules; their resource `shell_exec` is set.
        limits: resources that all concurrent jobs may use together; `gpu_stages` is meant per node, and 1 by default.
        anywhere: True if updates run on any node, not only on the first, where a worker keeps the trainer.
    """
    limits[RESOURCE] = (limits[RESOURCE].value if RESOURCE in limits else 1) * nodes()
    for rule in rules:
        if "mpi" in rule.resources:
            continue
        options = [_gres(rule.resources), *([] if anywhere else _place(rule))]
        path = _shell([*filter(None, options)]) if "runtime" in rule.resources else _script("short", SHORT)
        rule.resources["shell_exec"] = str(path.absolute())


def limit(rules: Iterable[Any], limits: Any, configs: Iterable[Config]) -> None:
    """Limits stages to the GPUs that this process may use; does nothing without GPUs, or if a limit is set.

    Args:
        rules: Snakemake's rules.
        limits: total resources of all concurrent jobs.
        configs: configurations of the runs.
    """
    gpus = len(devices.visible_gpus()) if devices.has_gpu() else 0
    if not gpus or RESOURCE in limits:
        return
    limits[RESOURCE] = gpus
    configs = list(configs)
    for rule in rules:
        if (stage := stage_of(rule)) and RESOURCE in rule.resources and rule.resources[RESOURCE] != 0:
            rule.resources[RESOURCE] = min(gpus, gpu_shares.of_stage(stage, configs))


def have_whole_nodes(rules: Iterable[Any], limits: Any) -> bool:
    """True if a stage has all GPUs of its node, so that a worker there may take any of them for it."""
    chosen = any("gres" in rule.resources and isinstance(rule.resources["gres"].raw, str) for rule in rules)
    return not devices.has_gpu() or (limits[RESOURCE].value == nodes() and not chosen)


def _place(rule: Any) -> list[str]:
    """The option of srun for an update's node: the one with the trainer that made the policy (node_workers.py)."""
    return [f"--nodelist={os.environ['SLURMD_NODENAME']}"] if stage_of(rule) == "update" else []


def _gres(resources: Any) -> str:
    """The option of srun for the GPUs that a rule uses on its node."""
    if RESOURCE not in resources:
        return "--gres=none"
    gres = resources["gres"].raw if "gres" in resources else None
    return f"--gres={gres}" if isinstance(gres, str) else ""  # all GPUs that the job has on the node


def _shell(options: list[str]) -> Path:
    """Writes the script for some options of srun."""
    # This process made them on the first node, perhaps on its own disk; the other nodes need them too.
    folders = [shlex.quote(os.environ[name]) for name in containers.CACHES if name in os.environ]
    inner = " ".join(['"${TMPDIR:-/tmp}"', *folders]).replace("'", "'\\''")
    name = re.sub(r"\W+", "-", " ".join(options)).strip("-") or "all"
    names = {"step": ranks.STEP, "workers": client.FOLDER}
    return _script(name, SHELL, **names, options=shlex.join(options), folders=inner)


def _script(name: str, template: str, **values: str) -> Path:
    """Writes a shell script. Snakemake knows the kind of shell by the file name."""
    path = FOLDER / name / "bash"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    program = shlex.join([sys.executable, "-IS", str(Path(step_client.__file__).absolute())])
    temporary.write_text(template.format(**values, client=program))
    temporary.chmod(0o755)
    temporary.replace(path)
    return path
