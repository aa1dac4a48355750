# What all phases share: the validated configuration, names of files, input functions.
import os
import re
import subprocess
import sys
from pathlib import Path

import yaml
from snakemake.exceptions import WorkflowError
from snakemake.logging import logger
from snakemake.settings.types import DeploymentMethod

from rloo_pipeline.cluster import containers, nodes
from rloo_pipeline.config import STAGES
from rloo_pipeline.config.loading import look_at, validate
from rloo_pipeline.errors import UserError
from rloo_pipeline.report import origin
from rloo_pipeline.preflight import inputs
from rloo_pipeline.config.provenance import source_digest
from rloo_pipeline.runtime.environment import prepare_jobs
from rloo_pipeline.snakemake_ext import (
    ancient_inputs,
    arrays,
    cancelled,
    early_stop,
    locks,
    polling,
    steps,
    worker_jobs,
)
from rloo_pipeline.trackers import trackers
from rloo_pipeline.workers import manager

# A job's input function names the round before: Snakemake resolves that recursively, a few frames a round.
sys.setrecursionlimit(1_000_000)
ancient_inputs.see_behind()
prepare_jobs()
origin.note_commit()

try:
    look_at(workflow.overwrite_configfiles)
    CONFIG = validate(config, ", ".join(map(str, workflow.overwrite_configfiles)) or "config/config.yaml")
    DECIDES = {stage: CONFIG.params(stage) for stage in STAGES}
    SOURCE = {stage: source_digest(stage, CONFIG) for stage in STAGES}
    # of a run that begins it is asked below; --unlock, --report and the like do without
    for note in inputs.refuse(CONFIG) if workflow.output_settings.dryrun else ():
        logger.warning(note)
    IMAGE = containers.image(CONFIG, Path(str(workflow.current_basedir)).parents[1])
    IN_PLACE = DeploymentMethod.APPTAINER not in workflow.deployment_settings.deployment_method
    if IN_PLACE:
        trackers.require(CONFIG.trackers)
    else:
        containers.require(IMAGE)
        containers.prepare(CONFIG, IMAGE)
        os.environ[nodes.IMAGE] = IMAGE
except UserError as error:
    raise WorkflowError(str(error)) from None

# Reward functions that have jobs of their own, and what decides their results: neither weights nor other functions.
ALONE = {reward.column: reward for reward in CONFIG.rewards if reward.gpus}
DECIDES_ALONE = {
    name: {key: value for key, value in reward.decides().items() if key != "weight"} for name, reward in ALONE.items()
}
SOURCE_ALONE = {
    name: source_digest("score", CONFIG.model_copy(update={"rewards": [reward]})) for name, reward in ALONE.items()
}

RUN = f"results/{CONFIG.run}"
CONFIG_FILE = f"{RUN}/config.yaml"
ROUNDS = [f"{number:05d}" for number in range(1, CONFIG.rounds + 1)]
LAST = ROUNDS[-1]
SHARDS = [f"{number:03d}" for number in range(CONFIG.rollout.shards)]
KEPT = [name for name in ROUNDS[:-1] if int(name) % CONFIG.keep_every == 0]
PASSING = [name for name in ROUNDS[:-1] if int(name) % CONFIG.keep_every != 0]


# An update over several nodes: srun, which is outside of the image, starts the image once a rank.
SPREAD = CONFIG.deepspeed.nodes > 1
SPREAD_IMAGE = None if SPREAD else IMAGE
SPREAD_RESOURCES = (
    dict(
        nodes=CONFIG.deepspeed.nodes,
        tasks=CONFIG.deepspeed.processes,
        cpus_per_task=CONFIG.deepspeed.threads,
        tasks_per_gpu=0,
        mpi="srun",
    )
    if SPREAD
    else {}
)


# of the last round, where W&B or MLflow are to have them
TRACKED = [f"{RUN}/tracking/{LAST}.json"] if CONFIG.trackers else []

# Stages of one SLURM job of several nodes go to where there is room.
SEVERAL_NODES = workflow.is_main_process and workflow.local_exec and not workflow.dryrun and steps.nodes() > 1

# of a run that a gate ended, and that is finished as the run of so many rounds that it is
STOPPED = [f"{RUN}/{early_stop.STOPPED}"] if early_stop.stopped_after(Path(RUN)) == CONFIG.rounds else []


def write_config(**changes):
    """The configuration as the stages read it, with every default filled in; touched only when it changes."""
    made = CONFIG.model_dump(mode="json") | changes
    path, text = Path(CONFIG_FILE), yaml.safe_dump(made, sort_keys=False)
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(text)
        beside.replace(path)


def one_of(names):
    """A wildcard constraint: one of these names, or nothing at all."""
    return "|".join(names) or r"(?!)"


def local_sources():
    """Files on this machine that stage-assets starts from: when one of them changes, so does what is made of it."""
    sources = [CONFIG.dataset.train, CONFIG.dataset.eval]
    if CONFIG.warmstart.sft:
        sources.append(CONFIG.warmstart.sft.demonstrations)
    files = [Path(CONFIG.data_dir or ".") / source.path for source in sources if source.path]
    if CONFIG.model.name_or_path:
        files.append(Path(CONFIG.model.name_or_path) / "config.json")
    return [str(file) for file in files if file.is_file()]


def before(name):
    """The name of the round before, 00000 before the first."""
    return f"{int(name) - 1:05d}"


def policy_before(wildcards):
    return f"{RUN}/policies/{before(wildcards.round)}"


def base_policy(wildcards):
    """Policy 0, where the policy of a round is an adapter on it."""
    return f"{RUN}/policies/00000" if CONFIG.update.lora and int(wildcards.round) > 1 else []


def gate(wildcards):
    """The first update waits for the checks, and is not made again after others that pass. Rollouts do not wait, so that
    another reward does not sample again.
    """
    return ancient(f"{RUN}/warmstart/checks.json") if int(wildcards.round) == 1 else []


def gate_before(wildcards):
    """What the round before showed, where there is one; judged again, it is no reason to sample again."""
    return ancient(f"{RUN}/rounds/{before(wildcards.round)}/diagnosis.json") if int(wildcards.round) > 1 else []


def tracked_before(wildcards):
    return f"{RUN}/tracking/{before(wildcards.round)}.json" if int(wildcards.round) > 1 else []


def trainer_before(wildcards):
    return f"{RUN}/trainer/{before(wildcards.round)}" if int(wildcards.round) > 1 else []


def shards_of(table):
    """An input function for all shards of one of a round's tables."""
    return lambda wildcards: [f"{RUN}/rounds/{wildcards.round}/{table}/{shard}.parquet" for shard in SHARDS]


def scoring_threads():
    """Of the job that scores what has no job of its own: one a worker, or as many as one function's process has."""
    return max(CONFIG.scoring.workers, *(reward.threads for reward in CONFIG.rewards if not reward.gpus), 1)


def scored_alone(wildcards):
    """Tables of the functions that have jobs of their own."""
    folder = f"{RUN}/rounds/{wildcards.round}/scores/parts"
    return [f"{folder}/{name}/{wildcards.shard}.parquet" for name in ALONE]


def reference_shards(wildcards):
    return shards_of("reference")(wildcards) if CONFIG.uses_reference else []


def evaluated_policy(wildcards):
    return f"{RUN}/policies/{CONFIG.evaluated[wildcards.name]:05d}"


def growing(amount):
    """Memory (MB) or time (minutes) for a first attempt, and as much again for each further one."""
    return lambda wildcards, attempt: amount * attempt


# Before Snakemake looks at its own lock; a dry run takes none.
held = locks.Hold(False)
if workflow.is_main_process and not workflow.output_settings.dryrun:
    cancelled.ends_the_run(logger.error)
    arrays.submit_whole_commands()
    polling.in_measure(logger.info)
    held = locks.hold(Path.cwd(), CONFIG.run)
    if held.message:
        logger.info(held.message)


# The jobs of a run read its configuration while it lasts: only the process that holds the run writes it, before the
# first job. Where nothing runs (a dry run, a picture of the DAG, a run that is finished), nothing is written.
onstart:
    if workflow.is_main_process:
        try:
            for note in inputs.refuse(CONFIG):
                logger.warning(note)
        except UserError as error:
            raise WorkflowError(str(error)) from None
    if held.alone:
        write_config()
        early_stop.forget(Path(RUN), CONFIG.rounds)
    if workflow.is_main_process and workflow.local_exec and IN_PLACE and not SEVERAL_NODES:
        rules = {job.rule for job in workflow.dag.needrun_jobs()}
        stages = {rule.shellcmd.split()[1] for rule in rules if rule.shellcmd}
        if manager.start(CONFIG, workflow.resource_settings.cores, Path(RUN) / "logs" / "workers", stages):
            worker_jobs.hand_over()


# diagnosis/diagnosis.py says why a stopped run is finished by a second call. This process holds the run meanwhile.
onerror:
    stopped = early_stop.stopped_after(Path(RUN))
    again = early_stop.command(stopped, workflow.config_settings.config_args or []) if stopped else None
    if held.alone and stopped and stopped < CONFIG.rounds and again and not workflow.dag_settings.targets:
        logger.info(f"A gate ended the run after round {stopped}: now its evaluation and report.")
        write_config(rounds=stopped)
        if not subprocess.run(again, check=False).returncode:
            logger.info(
                f"{RUN} ended after round {stopped} of {CONFIG.rounds}; {RUN}/{early_stop.STOPPED} says why."
            )
            raise SystemExit(0)


wildcard_constraints:
    round=r"\d{5}",
    shard=r"\d{3}",
    name=one_of(CONFIG.evaluated),
