# What all phases share: the validated configuration, names of files, input functions.
import re
from pathlib import Path

from snakemake.exceptions import WorkflowError

from rloo_pipeline import snakemake_ext
from rloo_pipeline.config import STAGES
from rloo_pipeline.config.loading import refuse_bad_files, validate
from rloo_pipeline.config.provenance import source_digest
from rloo_pipeline.errors import UserError

try:
    refuse_bad_files(workflow.overwrite_configfiles)
    CONFIG = validate(config, ", ".join(map(str, workflow.overwrite_configfiles)) or "config/config.yaml")
    DECIDES = {stage: CONFIG.params(stage) for stage in STAGES}
    SOURCE = {stage: source_digest(stage, CONFIG) for stage in STAGES}
    CONTROLLER = snakemake_ext.install(workflow, CONFIG)
except UserError as error:
    raise WorkflowError(str(error)) from None

IMAGE = CONTROLLER.image

# Reward functions that need a GPU have jobs of their own. Their results depend neither on weights nor on other functions.
ALONE = {reward.column: reward for reward in CONFIG.rewards if reward.gpus}
DECIDES_ALONE = {
    name: {key: value for key, value in reward.decides().items() if key != "weight"} for name, reward in ALONE.items()
}
SOURCE_ALONE = {
    name: source_digest("score", CONFIG.model_copy(update={"rewards": [reward]})) for name, reward in ALONE.items()
}

RUN = f"results/{CONFIG.run}"
ROUNDS = [f"{number:05d}" for number in range(1, CONFIG.rounds + 1)]
LAST = ROUNDS[-1]
SHARDS = [f"{number:03d}" for number in range(CONFIG.rollout.shards)]
KEPT = [name for name in ROUNDS[:-1] if int(name) % CONFIG.keep_every == 0]
TRANSIENT = [name for name in ROUNDS[:-1] if int(name) % CONFIG.keep_every != 0]


# An update over several nodes runs srun outside of the image; srun starts the image once for each rank.
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


# W&B and MLflow get the metrics round by round; the last round's file stands for all.
TRACKED = [f"{RUN}/tracking/{LAST}.json"] if CONFIG.trackers else []

# Written by the gate that ended the run early. The report waits for it when the run is finished at that round.
STOPPED = [f"{RUN}/stopped.json"] if CONTROLLER.stopped else []


def one_of(names):
    """A wildcard constraint: one of these names, or nothing at all."""
    return "|".join(names) or r"(?!)"


def local_sources():
    """Local files that stage-assets reads: when one of them changes, everything made from it runs again."""
    sources = [CONFIG.dataset.train, CONFIG.dataset.eval]
    if CONFIG.warmstart.sft:
        sources.append(CONFIG.warmstart.sft.demonstrations)
    files = [Path(CONFIG.data_dir or ".") / source.path for source in sources if source.path]
    if CONFIG.model.name_or_path:
        files.append(Path(CONFIG.model.name_or_path) / "config.json")
    return [local(str(file)) for file in files if file.is_file()]  # where they lie, whatever a module's prefix is


def before(name):
    """The name of the round before, 00000 before the first."""
    return f"{int(name) - 1:05d}"


def policy_before(wildcards):
    return f"{RUN}/policies/{before(wildcards.round)}"


def base_policy(wildcards):
    """Policy 0, where the policy of a round is an adapter on top of it."""
    return f"{RUN}/policies/00000" if CONFIG.update.lora and int(wildcards.round) > 1 else []


def gate(wildcards):
    """The checks, which the first update waits for. They are `ancient`: new checks do not train round 1 again. Rollouts do
    not wait for them, so a changed reward function samples nothing again.
    """
    return ancient(f"{RUN}/warmstart/checks.json") if int(wildcards.round) == 1 else []


def gate_before(wildcards):
    """The diagnosis of the round before. It is `ancient`: a new diagnosis is no reason to sample again."""
    return ancient(f"{RUN}/rounds/{before(wildcards.round)}/diagnosis.json") if int(wildcards.round) > 1 else []


def tracked_before(wildcards):
    return f"{RUN}/tracking/{before(wildcards.round)}.json" if int(wildcards.round) > 1 else []


def trainer_before(wildcards):
    return f"{RUN}/trainer/{before(wildcards.round)}" if int(wildcards.round) > 1 else []


def shards_of(table):
    """An input function for all shards of one of a round's tables."""
    return lambda wildcards: [f"{RUN}/rounds/{wildcards.round}/{table}/{shard}.parquet" for shard in SHARDS]


def scoring_threads():
    """Threads of the job that scores: one for each worker process, or as many as one function's process has."""
    return max(CONFIG.scoring.workers, *(reward.threads for reward in CONFIG.rewards if not reward.gpus), 1)


def scored_alone(wildcards):
    """Tables of the reward functions that have jobs of their own."""
    folder = f"{RUN}/rounds/{wildcards.round}/scores/parts"
    return [f"{folder}/{name}/{wildcards.shard}.parquet" for name in ALONE]


def reference_shards(wildcards):
    return shards_of("reference")(wildcards) if CONFIG.uses_reference else []


def evaluated_policy(wildcards):
    return f"{RUN}/policies/{CONFIG.evaluated[wildcards.name]:05d}"


def growing(amount):
    """Memory (MB) or time (minutes): `amount` for the first attempt, twice that for the second, and so on."""
    return lambda wildcards, attempt: amount * attempt


onstart:
    try:
        CONTROLLER.start()
    except UserError as error:
        raise WorkflowError(str(error)) from None


onerror:
    CONTROLLER.fail()


wildcard_constraints:
    round=r"\d{5}",
    shard=r"\d{3}",
    name=one_of(CONFIG.evaluated),
