"""Places stages on the nodes of Snakemake's SLURM job, or on the GPUs of its machine.

With `rloo submit --nodes N`, each stage runs on a node of the job with free resources.

Snakemake starts all stages on the job's first node. Its resource `shell_exec` names the shell that runs a rule's
command, outside the image. Here that is a script that passes the command to the host of a node
(`cluster/step_client.py`) or, without hosts, to srun. SLURM then gives each stage as many CPUs as it has threads. A
stage that uses GPUs (`gpu_stages` in the profile) gets all GPUs of a node, or as many as `gres` in the profile says;
other stages get none.

On one machine, if stages run in an image, a host in the image runs them. Snakemake's resource `gpu_stages` limits
concurrent stages. By default it counts GPUs: a stage takes as many as its engine needs (`runtime/gpu_claims.py` chooses
them). If the user sets a number, it counts stages.
"""

import os
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rloo_pipeline.before_run import warm_engines
from rloo_pipeline.cluster import containers, node_workers, nodes, slurm, step_client
from rloo_pipeline.config import Config
from rloo_pipeline.runtime import controller_watch, devices, ranks, scratch
from rloo_pipeline.snakemake_ext import node_exchange
from rloo_pipeline.snakemake_ext.failures import stage_of
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall
from rloo_pipeline.workers import client, gpu_shares, manager

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


def place(call: SnakemakeCall) -> None:
    """Limits stages to this machine's GPUs, or makes them steps of a multi-node SLURM job."""
    rules, limits = call.workflow.rules, call.workflow.global_resources
    if call.several_nodes:
        spread(rules, limits, anywhere=call.overlaps)
    if call.on_this_machine:
        limit(rules, limits, call.runs.configs.values())
        if call.in_image and not call.dry_run:
            by_host(rules)


def use_this_machine(call: SnakemakeCall) -> None:
    """Sets folders for temporary files and starts workers, unless jobs run on other machines."""
    if not call.workflow.local_exec:
        return
    if not call.several_nodes:
        scratch.use(call.workflow.snakemake_tmp_dir)
        os.environ[controller_watch.VARIABLE] = controller_watch.name()
    node_exchange.prepare(call, program(call))
    if "://" not in call.image or not call.in_image:  # a URI, which Apptainer would fetch again for each worker
        start_workers(call)


def start_workers(call: SnakemakeCall) -> None:
    """Starts workers for the stages that will run, on this machine or on the nodes of this job."""
    rules, limits = call.workflow.rules, call.workflow.global_resources
    stages = {stage_of(job.rule) for job in call.workflow.dag.needrun_jobs()} - {""}
    cores, logs = call.workflow.resource_settings.cores, call.folder / "logs" / "workers"
    first, runs = call.runs.first, len(call.runs.configs)
    on_one = cores // slurm.job_nodes() if call.several_nodes else cores
    without = warm_engines.left_out(first, manager.worker_counts(first, on_one, stages, runs))
    if not call.several_nodes:
        manager.start(first, cores, logs, stages, runs, without, program(call))
        if call.in_image and first.workers != "never":
            node_workers.start_here(logs, program(call))
    elif first.workers != "never" and have_whole_nodes(rules, limits):
        config = call.run_folder(next(iter(call.runs.configs))) / "config.yaml"
        without |= {"trainer"} if call.overlaps else set()
        per_node = limits[RESOURCE].value // slurm.job_nodes()
        node_workers.start(config, logs, stages, runs, without, program(call), per_node)


def program(call: SnakemakeCall) -> list[str]:
    """The command that runs `rloo`, in the image if stages run in one."""
    return nodes.program(shlex.split(call.workflow.deployment_settings.apptainer_args))


def spread(rules: Iterable[Any], limits: Any, anywhere: bool = False) -> None:
    """Makes Snakemake run the jobs of these rules on any node, except rules that call srun themselves (`mpi`). Short
    jobs, which do not request time (`runtime`), stay on this node.

    Args:
        rules: Snakemake's rules; their resource `shell_exec` is set.
        limits: resources that all concurrent jobs may use together. `gpu_stages` is per node, and 1 by default.
        anywhere: True if updates run on any node, not only on the first, where a worker keeps the trainer.
    """
    limits[RESOURCE] = (limits[RESOURCE].value if RESOURCE in limits else 1) * slurm.job_nodes()
    for rule in rules:
        if "mpi" in rule.resources:
            continue
        options = _gres(rule.resources)
        if stage_of(rule) == "update" and not anywhere:  # the node with the trainer that made its policy
            options.append(f"--nodelist={os.environ['SLURMD_NODENAME']}")
        path = _shell(options) if "runtime" in rule.resources else _script("short", SHORT)
        rule.resources["shell_exec"] = str(path.absolute())


def by_host(rules: Iterable[Any]) -> None:
    """Makes this machine's host, if there is one, run the stages among these rules. A user's own rules may have shadow
    folders and scripts, which the host does not support.
    """
    for rule in filter(stage_of, rules):
        rule.resources["shell_exec"] = str(_script("short", SHORT).absolute())


def limit(rules: Iterable[Any], limits: Any, configs: Iterable[Config]) -> None:
    """Limits stages to the GPUs that this process may use. Does nothing without GPUs, or if a limit is already set.

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
    """True if a stage has all GPUs of its node, so that a worker there may use any of them."""
    chosen = any("gres" in rule.resources and isinstance(rule.resources["gres"].raw, str) for rule in rules)
    return not devices.has_gpu() or (limits[RESOURCE].value == slurm.job_nodes() and not chosen)


def _gres(resources: Any) -> list[str]:
    """The srun option for the GPUs that a rule uses on its node; none for all that the job has there."""
    if RESOURCE not in resources:
        return ["--gres=none"]
    gres = resources["gres"].raw if "gres" in resources else None
    return [f"--gres={gres}"] if isinstance(gres, str) else []


def _shell(options: list[str]) -> Path:
    """Writes the shell script for these srun options."""
    # this process created them on the first node, perhaps on its own disk, but other nodes need them too
    folders = [shlex.quote(os.environ[name]) for name in containers.CACHES if name in os.environ]
    inner = " ".join(['"${TMPDIR:-/tmp}"', *folders]).replace("'", "'\\''")
    name = re.sub(r"\W+", "-", " ".join(options)).strip("-") or "all"
    names = {"step": ranks.STEP, "workers": client.FOLDER}
    return _script(name, SHELL, **names, options=shlex.join(options), folders=inner)


def _script(name: str, template: str, **values: str) -> Path:
    """Writes a shell script. Snakemake recognizes the kind of shell by the file name."""
    path = FOLDER / name / "bash"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    program = shlex.join([sys.executable, "-IS", str(Path(step_client.__file__).absolute())])
    temporary.write_text(template.format(**values, client=program))
    temporary.chmod(0o755)
    temporary.replace(path)
    return path
