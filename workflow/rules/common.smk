# Shared by the files of all rules: the validated configuration, names of rounds, resources.
import re
from pathlib import Path

from snakemake.exceptions import WorkflowError

from rloo_pipeline.config.loading import refuse_bad_files
from rloo_pipeline.config.provenance import source_digest
from rloo_pipeline.config.run_set import runs_of
from rloo_pipeline.errors import UserError
from rloo_pipeline.snakemake_ext import configfiles, controller

try:
    CONFIGFILES = list(map(Path, workflow.overwrite_configfiles))
    refuse_bad_files(map(Path, workflow.configfiles))  # including those that a Snakefile names
    configfiles.restore_values(config, workflow.config_settings.config, workflow.config_settings.config_args or ())
    RUNS, CONTROLLER = controller.install(
        workflow,
        runs_of(
            config,
            CONFIGFILES[0] if CONFIGFILES else None,
            ", ".join(map(str, CONFIGFILES)) or "config/config.yaml",
        ),
    )
except UserError as error:
    raise WorkflowError(str(error)) from None

# Files of a finished experiment, in addition to those of its runs.
EXPERIMENT_FILES = ["experiment.html", "experiment.json", "experiment.csv", "runs.csv", "experiment.tex"]

# For keys that are equal in all runs of an experiment. Other keys go through `by_run`.
CONFIG = RUNS.first
IMAGE = CONTROLLER.image

# The folder of a run; in an experiment it has a wildcard `run`.
RUN = RUNS.pattern
by_run = RUNS.by_run
# An input file, which runs of an experiment may share.
file = RUNS.file


def decides(stage):
    """The part of the configuration that decides the result of a stage."""
    return by_run(lambda config: config.params(stage))


def source(stage):
    """Digest of a stage's code."""
    try:
        return by_run(lambda config: source_digest(stage, config))
    except UserError as error:
        raise WorkflowError(str(error)) from None


def made_by(stage):
    """The params of a stage's rule. Snakemake reruns a job when one of them changes."""
    return dict(decides=decides(stage), source=source(stage))


def alone(wildcards):
    """The reward functions that need a GPU and therefore have their own jobs. Their scores depend neither on weights nor
    on other functions.
    """
    return {reward.column: reward for reward in RUNS.of(wildcards).rewards if reward.gpus}


def decides_alone(wildcards):
    return {key: value for key, value in alone(wildcards)[wildcards.reward].decides().items() if key != "weight"}


def source_alone(wildcards):
    only = RUNS.of(wildcards).model_copy(update={"rewards": [alone(wildcards)[wildcards.reward]]})
    return source_digest("score", only)


# True if any run does SFT before its first round.
TRAINS_FIRST = any(config.warmstart.sft for config in RUNS.configs.values())


def tasks_per_node(config):
    return config.deepspeed.processes // config.deepspeed.nodes


# A multi-node update runs srun outside the image, and srun starts the image once per rank.
SPREAD = CONFIG.deepspeed.nodes > 1
SPREAD_IMAGE = None if SPREAD else IMAGE


def spread(of):
    """Resources of ranks on several nodes; `of` is by_run, or takes a value from one configuration."""
    return dict(
        nodes=CONFIG.deepspeed.nodes,
        # Given only the total, SLURM may put all tasks but one on the first node. The plugin refuses one task per node.
        tasks_per_node=of(lambda config: tasks_per_node(config) if tasks_per_node(config) > 1 else 0),
        tasks=of(lambda config: config.deepspeed.nodes if tasks_per_node(config) == 1 else 0),
        cpus_per_task=of(lambda config: config.deepspeed.threads),
        tasks_per_gpu=0,
        mpi="srun",
    )


SPREAD_RESOURCES = spread(by_run) if SPREAD else {}

# If the model or sequences are split, log-probs run on as many processes and nodes as an update.
SPLIT = {config.deepspeed.splits_passes for config in RUNS.configs.values()}
if SPREAD and len(SPLIT) > 1:
    raise WorkflowError(
        "deepspeed: with several nodes, zero_stage: 3 or sequence_parallel must be set in all runs or in none"
    )
PASS_IMAGE = SPREAD_IMAGE if SPLIT == {True} else IMAGE
PASS_RESOURCES = SPREAD_RESOURCES if SPLIT == {True} else {}


def pass_threads(config):
    return config.deepspeed.threads * config.deepspeed.forward_processes


def largest(value):
    """The value of the run with the most threads, for jobs that serve any run of an experiment."""
    return value(max(RUNS.configs.values(), key=pass_threads))


def one_of(names):
    """A wildcard constraint that matches any of these names; without names, it matches nothing."""
    return "|".join(names) or r"(?!)"


def names_of(config):
    """Names of all rounds of a run."""
    return [f"{number:05d}" for number in range(1, config.rounds + 1)]


def kept(config):
    """Rounds before the last one whose policy is kept."""
    return [name for name in names_of(config)[:-1] if config.keeps(int(name))]


def transient(config):
    return [name for name in names_of(config)[:-1] if not config.keeps(int(name))]


def last(config):
    return names_of(config)[-1:]


def rounds_like(names):
    """Wildcard constraints of a rule for certain rounds; `names` returns these for a configuration. Runs of an
    experiment can differ in their rounds, so there the constraint on `run` also looks ahead to the round in the path.
    """
    if not RUNS.experiment:
        return dict(round=one_of(names(CONFIG)))
    runs_by_names = {}
    for run, config in RUNS.configs.items():
        runs_by_names.setdefault(one_of(names(config)), []).append(re.escape(run))
    return dict(run=one_of(f"(?:{one_of(runs)})(?=/[a-z]+/(?:{rounds})\\b)" for rounds, runs in runs_by_names.items()))


def scoring_threads(config):
    """Threads of a scoring job: one per worker process, or as many as a single function's process needs."""
    return max(config.scoring.workers, *(reward.threads for reward in config.rewards if not reward.gpus), 1)


def sampling_threads(config):
    """Threads of a job that samples and scores."""
    return max(config.vllm.job_threads, config.scoring.workers)


def next_policy_first(stage):
    """Job priorities from `stage` to `stage` + 1, highest for the earliest round, which the next policy needs first."""
    return lambda wildcards: stage + 1 - int(wildcards.round) / 100_000


def growing(amount):
    """Memory (MB) or time (minutes): `amount` on the first attempt, twice that on the second, and so on."""
    return lambda wildcards, attempt: amount * attempt


def scoring_memory(wildcards, attempt):
    return RUNS.of(wildcards).scoring.memory_mb * attempt


# `resources: {runtime: 10}` in a profile is then the most for each job rather than for all together, as with mem_mb.
resource_scopes:
    runtime="local",


wildcard_constraints:
    run=one_of(map(re.escape, RUNS.by_folder)),
    round=r"\d{5}",
    shard=r"\d{3}",
    name=one_of(sorted({name for config in RUNS.configs.values() for name in config.evaluated})),
