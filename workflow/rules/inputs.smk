# Input functions: which files a job waits for. `before` and `of_round_before` look one round back.
from types import SimpleNamespace

from rloo_pipeline.snakemake_ext import run_folders, run_sources


def local_sources(config):
    """Local files that stage-assets reads, where they lie, whatever a module's prefix is."""
    return [local(str(file)) for file in run_sources.local_files(config)]


# Whether what stages make may come from the cache of other runs, whose key is the configuration.
PINNED = all(map(run_sources.are_pinned, RUNS.configs.values()))


def before(name):
    """The name of the round before, 00000 before the first."""
    return f"{int(name) - 1:05d}"


def policy_before(wildcards):
    return RUNS.path(wildcards, f"policies/{before(wildcards.round)}")


def image_prompts(wildcards):
    """The prompts, in a run with images, which the log-probs of completions depend on."""
    return RUNS.path(wildcards, "prompts") if RUNS.of(wildcards).dataset.image_column else []


def teachers_prompts(wildcards):
    """The prompts, in a run with several teachers, which they name."""
    teacher = RUNS.of(wildcards).algorithm.teacher
    return RUNS.path(wildcards, "prompts") if teacher and teacher.models else []


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


def reward_model(wildcards):
    """Digest and checks of the reward model that the run trains, if it does: stages that score wait for it, and run again
    for another digest.
    """
    return RUNS.path(wildcards, "reward_model/checks.json") if RUNS.of(wildcards).reward_model else []


def checks_of(wildcards):
    """The checks: the first update waits for them, and uses them to prove which policy sampled. They are `ancient`, so
    new checks do not train a round again. Rollouts do not wait for them, so a changed reward function does not sample
    again.
    """
    return ancient(RUNS.path(wildcards, "warmstart/checks.json"))


def gate(wildcards):
    """With a lag, rollouts do not wait for the previous round, so the update does."""
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
HELD_OUT = {
    run: run_folders.held_out_rounds(config, CONTROLLER.run_folder(run), in_job=not workflow.is_main_process)
    for run, config in RUNS.configs.items()
}
PAGES = {run: run_folders.page_rounds(config, CONTROLLER.run_folder(run)) for run, config in RUNS.configs.items()}


def update_before(wildcards):
    """Only to begin beside the next rollout, and not beside the scoring that the update waits for."""
    return ancient(RUNS.path(wildcards, f"rounds/{wildcards.round}/metrics.json"))


def metrics_of_policy(wildcards):
    """metrics.json of the round that made the policy that a round is sampled from, for its optimizer steps. It is
    `ancient`: another policy is sampled again anyway.
    """
    number = RUNS.of(wildcards).rollout.policy_of(int(wildcards.round))
    return ancient(RUNS.path(wildcards, f"rounds/{number:05d}/metrics.json")) if number > 0 else []


def held_out_of(wildcards):
    """Held-out accuracy of a round, where it is measured."""
    measured = int(wildcards.round) in HELD_OUT[RUNS.folder_of(wildcards)]
    return RUNS.path(wildcards, f"rounds/{wildcards.round}/held_out.json") if measured else []


def held_out_of_all(wildcards):
    rounds = HELD_OUT[RUNS.folder_of(wildcards)]
    return [RUNS.path(wildcards, f"rounds/{number:05d}/held_out.json") for number in rounds]


def tracked_before(wildcards):
    return of_round_before(wildcards, "tracking/{}.json")


def shards_of(table):
    """An input function for all shards of one of a round's tables."""

    def shards(wildcards):
        count = RUNS.of(wildcards).rollout.shards
        return [RUNS.path(wildcards, f"rounds/{wildcards.round}/{table}/{shard:03d}.parquet") for shard in range(count)]

    return shards


def carried_over(wildcards):
    """The rollouts of the round before, which has groups to go on with (rollout.token_budget)."""
    settings = RUNS.of(wildcards).rollout
    shards = range(settings.shards if settings.token_budget and int(wildcards.round) > 1 else 0)
    return [of_round_before(wildcards, f"rounds/{{}}/rollouts/{shard:03d}.parquet") for shard in shards]


def whole(table):
    """An input function for all of one of a round's tables: the shards, then what the refill made."""

    def files(wildcards):
        refill = RUNS.path(wildcards, f"rounds/{wildcards.round}/refill/{table}.parquet")
        return [*shards_of(table)(wildcards), *([refill] if RUNS.of(wildcards).rollout.refill else [])]

    return files


def whole_reference(wildcards):
    return whole("reference")(wildcards) if RUNS.of(wildcards).uses_reference else []


def whole_teacher(wildcards):
    return shards_of("teacher")(wildcards) if RUNS.of(wildcards).algorithm.teacher else []


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


def scored_alone(wildcards):
    """Tables of the reward functions that have jobs of their own."""
    folder = f"rounds/{wildcards.round}/scores/parts"
    return [RUNS.path(wildcards, f"{folder}/{name}/{wildcards.shard}.parquet") for name in alone(wildcards)]


def trial(name):
    """An input function for a file of the warm start from the trial of the untrained model, where there is one."""
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


def judgements(wildcards):
    return RUNS.path(wildcards, "judgements.parquet") if RUNS.of(wildcards).judge else []


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
CHOICE = (
    [SELECTION, *(f"{TEST}/{seed}/{name}.json" for seed in SEEDS for name in ("summary", "proof"))] if SELECTED else []
)


def of_seed(wildcards):
    """The runs of a seed, by their folders below results/."""
    return {run: config for run, config in RUNS.configs.items() if config.seed == int(wildcards.seed)}


def checks_of_seed(wildcards):
    """As `checks_of`, of the runs of a seed."""
    return [ancient(of_run(run, "warmstart/checks.json")) for run in of_seed(wildcards)]


def reward_models_of_seed(wildcards):
    """Those that the runs of a seed train."""
    return [
        of_run(run, "reward_model/checks.json") for run, config in of_seed(wildcards).items() if config.reward_model
    ]


def policies_of_seed(wildcards):
    """Policies that may have been chosen, with policy 0, which adapters are on top of."""
    return [
        of_run(run, f"policies/{number:05d}")
        for run, config in of_seed(wildcards).items()
        for number in (0, *config.candidates.values())
    ]
