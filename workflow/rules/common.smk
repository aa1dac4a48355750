# What all phases share: the validated configuration, names of files, input functions.
import re
from pathlib import Path
from types import SimpleNamespace

from snakemake.exceptions import WorkflowError

from rloo_pipeline import snakemake_ext
from rloo_pipeline.config.loading import refuse_bad_files
from rloo_pipeline.config.provenance import source_digest
from rloo_pipeline.config.run_set import runs_of
from rloo_pipeline.errors import UserError
from rloo_pipeline.snakemake_ext import in_flight

try:
    CONFIGFILES = list(map(Path, workflow.overwrite_configfiles))
    refuse_bad_files(CONFIGFILES)
    RUNS, CONTROLLER = snakemake_ext.install(
        workflow,
        runs_of(
            config,
            CONFIGFILES[0] if CONFIGFILES else None,
            ", ".join(map(str, CONFIGFILES)) or "config/config.yaml",
        ),
    )
except UserError as error:
    raise WorkflowError(str(error)) from None

# What an experiment has in the end, besides its runs.
EXPERIMENT_FILES = ["experiment.html", "experiment.json", "experiment.csv", "runs.csv", "experiment.tex"]

# What all runs of an experiment have in common. The rest of a configuration goes through `by_run`.
CONFIG = RUNS.first
IMAGE = CONTROLLER.image

# The folder of a run, with a wildcard `run` in an experiment.
RUN = RUNS.pattern
by_run = RUNS.by_run
# An input, which may be shared by runs of an experiment.
file = RUNS.file


def decides(stage):
    """Of a stage: the part of the configuration that decides its result."""
    return by_run(lambda config: config.params(stage))


def source(stage):
    """Digest of a stage's code."""
    try:
        return by_run(lambda config: source_digest(stage, config))
    except UserError as error:
        raise WorkflowError(str(error)) from None


# Reward functions that need a GPU have jobs of their own. Their results depend neither on weights nor on other functions.
ALONE = by_run(lambda config: {reward.column: reward for reward in config.rewards if reward.gpus})


def alone(wildcards):
    """The reward functions of a job's run that have jobs of their own."""
    return ALONE(wildcards) if callable(ALONE) else ALONE


def decides_alone(wildcards):
    return {key: value for key, value in alone(wildcards)[wildcards.reward].decides().items() if key != "weight"}


def source_alone(wildcards):
    only = RUNS.of(wildcards).model_copy(update={"rewards": [alone(wildcards)[wildcards.reward]]})
    return source_digest("score", only)


# Whether any run has SFT before its first round.
TRAINS_FIRST = any(config.warmstart.sft for config in RUNS.configs.values())

# An update over several nodes runs srun outside of the image; srun starts the image once for each rank.
SPREAD = CONFIG.deepspeed.nodes > 1
SPREAD_IMAGE = None if SPREAD else IMAGE
SPREAD_RESOURCES = (
    dict(
        nodes=CONFIG.deepspeed.nodes,
        tasks=by_run(lambda config: config.deepspeed.processes),
        cpus_per_task=by_run(lambda config: config.deepspeed.threads),
        tasks_per_gpu=0,
        mpi="srun",
    )
    if SPREAD
    else {}
)

# Log-probs of a model that ZeRO 3 splits run on the processes of an update, over the same nodes.
SPLIT = {config.deepspeed.splits_weights for config in RUNS.configs.values()}
if SPREAD and len(SPLIT) > 1:
    raise WorkflowError("deepspeed.zero_stage: with several nodes either all runs have 3 or none; set it in each run")
PASS_IMAGE = SPREAD_IMAGE if SPLIT == {True} else IMAGE
PASS_RESOURCES = SPREAD_RESOURCES if SPLIT == {True} else {}


def pass_threads(config):
    return config.deepspeed.threads * (config.deepspeed.processes if config.deepspeed.splits_weights else 1)


def one_of(names):
    """A wildcard constraint: one of these names, or nothing at all."""
    return "|".join(names) or r"(?!)"


def names_of(config):
    """Names of all rounds of a run."""
    return [f"{number:05d}" for number in range(1, config.rounds + 1)]


def kept(config):
    """Rounds before the last one whose policy stays. A longer run samples its first rounds from the last policies of this
    one, as many as the lag.
    """
    first = config.rounds - config.rollout.lag
    return [name for name in names_of(config)[:-1] if int(name) % config.keep_every == 0 or int(name) >= first]


def transient(config):
    names = kept(config)
    return [name for name in names_of(config)[:-1] if name not in set(names)]


def last(config):
    return names_of(config)[-1:]


def rounds_like(names):
    """Wildcard constraints of a rule for some rounds, which `names` gives for a configuration. Runs of an experiment
    can differ in their rounds: there the constraint of `run` also looks at the round behind it in the path.
    """
    if not RUNS.experiment:
        return dict(round=one_of(names(CONFIG)))
    runs_by_names = {}
    for run, config in RUNS.configs.items():
        runs_by_names.setdefault(one_of(names(config)), []).append(re.escape(run))
    return dict(run=one_of(f"(?:{one_of(runs)})(?=/[a-z]+/(?:{rounds})\\b)" for rounds, runs in runs_by_names.items()))


def local_sources(config):
    """Local files that stage-assets reads: when one of them changes, everything made from it runs again."""
    sources = [*config.dataset.parts.values()]
    if config.warmstart.sft:
        sources.append(config.warmstart.sft.demonstrations)
    files = [Path(config.data_dir or ".") / source.path for source in sources if source.path]
    if config.model.name_or_path:
        files.append(Path(config.model.name_or_path) / "config.json")
    return [local(str(file)) for file in files if file.is_file()]  # where they lie, whatever a module's prefix is


def before(name):
    """The name of the round before, 00000 before the first."""
    return f"{int(name) - 1:05d}"


def policy_before(wildcards):
    return RUNS.path(wildcards, f"policies/{before(wildcards.round)}")


def image_prompts(wildcards):
    """The prompts, in a run with images, which the log-probs of completions depend on."""
    return RUNS.path(wildcards, "prompts") if RUNS.of(wildcards).dataset.image_column else []


def base_policy(wildcards):
    """Policy 0, where the policy of a round is an adapter on top of it."""
    lora = RUNS.of(wildcards).update.lora
    return RUNS.path(wildcards, "policies/00000") if lora and int(wildcards.round) > 1 else []


def sampling_policy(wildcards):
    """The policy that a round is sampled from: that of the round before, or an older one (rollout.lag)."""
    number = RUNS.of(wildcards).rollout.policy_of(int(wildcards.round))
    return RUNS.path(wildcards, f"policies/{number:05d}")


def diagnosis(wildcards, number):
    """The diagnosis of a round, if that is one. It is `ancient`: a new one is no reason to sample or train again."""
    return ancient(RUNS.path(wildcards, f"rounds/{number:05d}/diagnosis.json")) if number > 0 else []


def gate(wildcards):
    """The checks, which the first update waits for. They are `ancient`: new checks do not train round 1 again. Rollouts do
    not wait for them, so a changed reward function samples nothing again. With a lag, rollouts do not wait for the round
    before either, so that the update does.
    """
    if int(wildcards.round) == 1:
        return ancient(RUNS.path(wildcards, "warmstart/checks.json"))
    return diagnosis(wildcards, int(wildcards.round) - 1) if RUNS.of(wildcards).rollout.lag else []


def gate_of_policy(wildcards):
    """The diagnosis of the round that made the policy."""
    return diagnosis(wildcards, RUNS.of(wildcards).rollout.policy_of(int(wildcards.round)))


DECIDES_ROLLOUT = decides("rollout")


def decides_rollout(wildcards):
    """`rollout.lag` as it acts on a round, so that another lag does not sample round 1 again."""
    params = DECIDES_ROLLOUT(wildcards) if callable(DECIDES_ROLLOUT) else DECIDES_ROLLOUT
    lag = RUNS.of(wildcards).rollout.lag_of(int(wildcards.round))
    return params | {"rollout": params["rollout"] | {"lag": lag}}


def of_round_before(wildcards, pattern):
    """A file of the round before; none in the first round."""
    return RUNS.path(wildcards, pattern.format(before(wildcards.round))) if int(wildcards.round) > 1 else []


# By run: for which rounds held-out accuracy is measured, and after which a page is written.
HELD_OUT = {run: in_flight.held_out_rounds(config, CONTROLLER.run_folder(run)) for run, config in RUNS.configs.items()}
PAGES = {run: in_flight.page_rounds(config, CONTROLLER.run_folder(run)) for run, config in RUNS.configs.items()}


def update_before(wildcards):
    """Only to begin beside the next rollout, and not beside the scoring that the update waits for."""
    return ancient(RUNS.path(wildcards, f"rounds/{wildcards.round}/metrics.json"))


def held_out_of(wildcards):
    """Held-out accuracy of a round, where it is measured."""
    measured = int(wildcards.round) in HELD_OUT[RUNS.folder_of(wildcards)]
    return RUNS.path(wildcards, f"rounds/{wildcards.round}/held_out.json") if measured else []


def held_out_of_all(wildcards):
    rounds = HELD_OUT[RUNS.folder_of(wildcards)]
    return [RUNS.path(wildcards, f"rounds/{number:05d}/held_out.json") for number in rounds]


def tracked_before(wildcards):
    return of_round_before(wildcards, "tracking/{}.json")


def trainer_before(wildcards):
    return of_round_before(wildcards, "trainer/{}")


def shards_of(table):
    """An input function for all shards of one of a round's tables."""

    def shards(wildcards):
        count = RUNS.of(wildcards).rollout.shards
        return [RUNS.path(wildcards, f"rounds/{wildcards.round}/{table}/{shard:03d}.parquet") for shard in range(count)]

    return shards


def whole(table):
    """An input function for all of one of a round's tables: the shards, then what the refill made."""

    def files(wildcards):
        refill = RUNS.path(wildcards, f"rounds/{wildcards.round}/refill/{table}.parquet")
        return [*shards_of(table)(wildcards), *([refill] if RUNS.of(wildcards).rollout.refill else [])]

    return files


def whole_reference(wildcards):
    return whole("reference")(wildcards) if RUNS.of(wildcards).uses_reference else []


def difficulty_shards(wildcards):
    """Pass rates of policy 0, where dataset.select needs them."""
    config = RUNS.of(wildcards)
    shards = range(config.rollout.shards) if config.measures_difficulty else []
    return [RUNS.path(wildcards, f"warmstart/difficulty/{shard:03d}.parquet") for shard in shards]


def pass_rates_before(wildcards):
    """The pass rates before a round: those of policy 0, or as the round before left them."""
    return of_round_before(wildcards, "rounds/{}/pass_rates.parquet") or difficulty_shards(wildcards)


def pass_rates_of_policy(wildcards):
    """The pass rates from the rounds that made the policy that a round is sampled from; no later scores, whose arrival
    would decide which prompts the round has.
    """
    config = RUNS.of(wildcards)
    number = config.rollout.policy_of(int(wildcards.round))
    return (
        RUNS.path(wildcards, f"rounds/{number:05d}/pass_rates.parquet") if config.updates_pass_rates and number else []
    )


def scoring_threads(config):
    """Threads of the job that scores: one for each worker process, or as many as one function's process has."""
    return max(config.scoring.workers, *(reward.threads for reward in config.rewards if not reward.gpus), 1)


def sampling_threads(config):
    """Threads of a job that samples and scores."""
    return max(config.vllm.threads, config.scoring.workers)


def scored_alone(wildcards):
    """Tables of the reward functions that have jobs of their own."""
    folder = f"rounds/{wildcards.round}/scores/parts"
    return [RUNS.path(wildcards, f"{folder}/{name}/{wildcards.shard}.parquet") for name in alone(wildcards)]


def trial(name):
    """An input of the warm start from the trial of the untrained model, where there is one."""
    if not RUNS.experiment:
        return f"{RUN}/warmstart/trial/{name}" if CONFIG.tries_model else []
    return lambda wildcards: (RUNS.path(wildcards, f"warmstart/trial/{name}") if RUNS.of(wildcards).tries_model else [])


def evaluated_policy(wildcards):
    return RUNS.path(wildcards, f"policies/{RUNS.of(wildcards).evaluated[wildcards.name]:05d}")


def metrics_of_all(wildcards):
    return [RUNS.path(wildcards, f"rounds/{name}/metrics.json") for name in names_of(RUNS.of(wildcards))]


def evaluations(*files, after=0):
    """An input function for files of the evaluations of a run, from number `after` on."""
    return lambda wildcards: [
        RUNS.path(wildcards, f"evaluation/{name}/{one}")
        for name in list(RUNS.of(wildcards).evaluated)[after:]
        for one in files
    ]


def benchmarks(wildcards):
    return evaluations("harness.json")(wildcards) if RUNS.of(wildcards).evaluation.harness else []


def stopped(wildcards):
    """Written by the gate that ended the run early. The report waits for it when the run is finished at that round."""
    return RUNS.path(wildcards, "stopped.json") if RUNS.folder_of(wildcards) in CONTROLLER.stopped else []


def finished(run, config):
    """The files that a finished run has in the end."""
    tracked = [f"results/{run}/tracking/{last(config)[0]}.json"] if config.trackers else []
    pages = [f"results/{run}/pages/{number:05d}.json" for number in PAGES[run]]
    return [f"results/{run}/summary.json", f"results/{run}/report.html", *tracked, *pages]


def of_run(run, file):
    """Where a file of a run lies, for a job that reads several runs."""
    return RUNS.path(SimpleNamespace(run=run), file)


# With `select`: the evaluations on dataset.dev that are chosen from, and what the choice leads to.
SELECTED = bool(CONFIG.select)
SELECTION = f"results/{RUNS.name}/selection.json"
TEST = f"results/{RUNS.name}/test"
SEEDS = sorted({config.seed for config in RUNS.configs.values()})
CANDIDATES = [
    of_run(run, f"evaluation/{name}/summary.json") for run, config in RUNS.configs.items() for name in config.candidates
]
CHOICE = [SELECTION, *(f"{TEST}/{seed}/summary.json" for seed in SEEDS)] if SELECTED else []


def of_seed(wildcards):
    """The runs of a seed, by their folders below results/."""
    return {run: config for run, config in RUNS.configs.items() if config.seed == int(wildcards.seed)}


def policies_of_seed(wildcards):
    """Policies that may have been chosen, with policy 0, which adapters are on top of."""
    return [
        of_run(run, f"policies/{number:05d}")
        for run, config in of_seed(wildcards).items()
        for number in (0, *config.candidates.values())
    ]


def next_policy_first(stage):
    """A priority for the jobs of a stage between `stage` and `stage` + 1: the earlier round, which the next policy needs."""
    return lambda wildcards: stage + 1 - int(wildcards.round) / 100_000


def growing(amount):
    """Memory (MB) or time (minutes): `amount` for the first attempt, twice that for the second, and so on."""
    return lambda wildcards, attempt: amount * attempt


def scoring_memory(wildcards, attempt):
    return (3000 + 1000 * RUNS.of(wildcards).scoring.workers) * attempt


onstart:
    try:
        CONTROLLER.start()
    except UserError as error:
        raise WorkflowError(str(error)) from None


onerror:
    CONTROLLER.fail()


wildcard_constraints:
    run=one_of(map(re.escape, RUNS.by_folder)),
    round=r"\d{5}",
    shard=r"\d{3}",
    name=one_of(sorted({name for config in RUNS.configs.values() for name in config.evaluated})),
