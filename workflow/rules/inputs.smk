# Input functions: the files that a job waits for. `before` and `of_round_before` refer to the previous round.
from types import SimpleNamespace

from rloo_pipeline.snakemake_ext import run_folders, run_sources


def local_sources(wildcards):
    """Local files that stage-assets reads. A module's prefix does not apply to them. A file that is newer but has the
    content that the run began with is `ancient`, so that it reruns nothing.
    """
    assets = CONTROLLER.run_folder(RUNS.folder_of(wildcards)) / "assets"
    same = run_sources.unchanged(assets) if workflow.is_main_process else ()
    files = run_sources.local_files(RUNS.of(wildcards))
    return [ancient(local(str(file))) if file in same else local(str(file)) for file in files]


# True if results may come from Snakemake's cache, whose key is the configuration.
PINNED = all(map(run_sources.are_pinned, RUNS.configs.values()))


def before(wildcards):
    """The name of the previous round; 00000 before the first."""
    return f"{int(wildcards.round) - 1:05d}"


def several(paths):
    """An input function for files of the job's run; `paths` returns them for its configuration and wildcards."""
    return lambda wildcards: [RUNS.path(wildcards, path) for path in paths(RUNS.of(wildcards), wildcards)]


def needed(path, asked):
    """An input function for a file of the job's run, if the configuration needs it (`asked`)."""
    return lambda wildcards: RUNS.path(wildcards, path) if asked(RUNS.of(wildcards)) else []


def of_round_before(path, asked=lambda config: True):
    """Like `needed`, for a file of the previous round; none in the first round."""
    return several(lambda config, w: [path.format(before(w))] if int(w.round) > 1 and asked(config) else [])


def of_policy(path, asked=lambda config: True):
    """Like `needed`, for a file of the round that made the sampling policy; none for policy 0."""
    return several(
        lambda config, w: [path.format(f"{made:05d}")] if (made := sampled_by(config, w)) and asked(config) else []
    )


def without_rerun(function):
    """Makes the files of an input function `ancient`, so that a newer file does not rerun the job."""
    return lambda wildcards: list(map(ancient, function(wildcards)))


def sampled_by(config, wildcards):
    """Number of the policy that a round samples from: the previous round's, or an older one (rollout.lag)."""
    return config.rollout.policy_of(int(wildcards.round))


def policy_before(wildcards):
    return RUNS.path(wildcards, f"policies/{before(wildcards)}")


def sampling_policy(wildcards):
    return RUNS.path(wildcards, f"policies/{sampled_by(RUNS.of(wildcards), wildcards):05d}")


def evaluated_policy(wildcards):
    return RUNS.path(wildcards, f"policies/{RUNS.of(wildcards).evaluated[wildcards.name]:05d}")


# Policy 0, if a round's policy is an adapter on top of it.
base_policy = several(lambda config, w: ["policies/00000"] if config.update.lora and int(w.round) > 1 else [])
# The prompts, in a run with images, on which log-probs depend.
image_prompts = needed("prompts", lambda config: config.dataset.image_column)
# The prompts, in a run with several teachers, since each prompt names its teacher.
teachers_prompts = needed("prompts", lambda config: config.algorithm.teacher and config.algorithm.teacher.models)
# Digest and checks of the reward model that the run trains, if any. Stages that score wait for it, and rerun if the
# digest changes.
reward_model = needed("reward_model/checks.json", lambda config: config.reward_model)
deciding_model = needed("reward_model/checks.json", lambda config: config.deciding_reward.uses_own_model)
judgements = needed("judgements.parquet", lambda config: config.judge)
# The first update waits for the checks, and uses them to prove which policy sampled. New checks do not retrain a round.
# Rollouts do not wait for them, so a changed reward function does not resample.
checks_of = without_rerun(several(lambda config, w: ["warmstart/checks.json"]))
# A new diagnosis does not resample or retrain. With a lag, rollouts do not wait for the previous round, so the
# update does.
gate = without_rerun(of_round_before("rounds/{}/diagnosis.json", lambda config: config.rollout.lag))
gate_of_policy = without_rerun(of_policy("rounds/{}/diagnosis.json"))
# For the policy's optimizer steps. If the policy changes, the round is sampled again anyway.
metrics_of_policy = without_rerun(of_policy("rounds/{}/metrics.json"))
# Delays a job until the next rollout, so that it does not compete with the scoring that the update waits for.
update_before = without_rerun(several(lambda config, w: [f"rounds/{w.round}/metrics.json"]))
tracked_before = of_round_before("tracking/{}.json")

DECIDES_ROLLOUT = decides("rollout")


def decides_rollout(wildcards):
    """Params of a rollout, with `rollout.lag` as it affects this round, so that changing it does not resample round 1."""
    params = DECIDES_ROLLOUT(wildcards) if callable(DECIDES_ROLLOUT) else DECIDES_ROLLOUT
    lag = RUNS.of(wildcards).rollout.lag_of(int(wildcards.round))
    return params | {"rollout": params["rollout"] | {"lag": lag}}


# For each run: rounds with held-out accuracy, and rounds after which a page is written.
HELD_OUT = {
    run: run_folders.held_out_rounds(config, CONTROLLER.run_folder(run), in_job=not workflow.is_main_process)
    for run, config in RUNS.configs.items()
}
PAGES = {run: run_folders.page_rounds(config, CONTROLLER.run_folder(run)) for run, config in RUNS.configs.items()}


def measured(wildcards):
    return [f"{number:05d}" for number in HELD_OUT[RUNS.folder_of(wildcards)]]


held_out_of = several(lambda config, w: [f"rounds/{w.round}/held_out.json"] if w.round in measured(w) else [])
held_out_of_all = several(lambda config, w: [f"rounds/{name}/held_out.json" for name in measured(w)])
metrics_of_all = several(lambda config, w: [f"rounds/{name}/metrics.json" for name in names_of(config)])


def shards(config):
    return [f"{shard:03d}.parquet" for shard in range(config.rollout.shards)]


def shards_of(table, asked=lambda config: True):
    """All shards of a table of a round."""
    return several(lambda config, w: [f"rounds/{w.round}/{table}/{shard}" for shard in shards(config) if asked(config)])


def shards_and_refill(table, asked=lambda config: True):
    """All files of a table of a round: the shards, then the refill."""
    refill = several(
        lambda config, w: (
            [f"rounds/{w.round}/refill/{table}.parquet"] if config.rollout.refill and asked(config) else []
        )
    )
    return lambda wildcards: [*shards_of(table, asked)(wildcards), *refill(wildcards)]


all_reference = shards_and_refill("reference", lambda config: config.uses_reference)
all_teacher = shards_of("teacher", lambda config: config.algorithm.teacher)
# Rollouts of the previous round, whose unfinished groups are continued (rollout.token_budget).
carried_over = several(
    lambda config, w: [
        f"rounds/{before(w)}/rollouts/{shard}"
        for shard in (shards(config) if config.rollout.token_budget and int(w.round) > 1 else [])
    ]
)
# Pass rates of policy 0, if dataset.select needs them.
difficulty_shards = several(
    lambda config, w: [f"warmstart/difficulty/{shard}" for shard in shards(config) if config.measures_difficulty]
)
rates_of_round_before = of_round_before("rounds/{}/pass_rates.parquet")
# Pass rates from the rounds that made the policy. If later scores counted, their timing would decide a round's prompts.
pass_rates_of_policy = of_policy("rounds/{}/pass_rates.parquet", lambda config: config.updates_pass_rates)
# Scores of the reward functions that run in separate jobs.
scored_alone = several(
    lambda config, w: [f"rounds/{w.round}/scores/parts/{name}/{w.shard}.parquet" for name in alone(w)]
)


def pass_rates_before(wildcards):
    """The pass rates before a round: those of policy 0, or those after the previous round."""
    return rates_of_round_before(wildcards) or difficulty_shards(wildcards)


def evaluations(*files, after=0, asked=lambda config: True):
    """An input function for files of a run's evaluations, starting at number `after`."""
    return several(
        lambda config, w: [
            f"evaluation/{name}/{one}" for name in list(config.evaluated)[after:] for one in files if asked(config)
        ]
    )


benchmarks = evaluations("harness.json", asked=lambda config: config.evaluation.harness)


def stopped(wildcards):
    """The file of the gate that ended the run early; the report waits for it when the run is finished at that round."""
    return RUNS.path(wildcards, "stopped.json") if RUNS.folder_of(wildcards) in CONTROLLER.stopped else []


def finished(run, config):
    """The files of a finished run."""
    tracked = [f"results/{run}/tracking/{last(config)[0]}.json"] if config.trackers else []
    pages = [f"results/{run}/pages/{number:05d}.json" for number in PAGES[run]]
    return [f"results/{run}/summary.json", f"results/{run}/report.html", *tracked, *pages]


def of_run(run, file):
    """The path of a run's file, for jobs that read several runs."""
    return RUNS.path(SimpleNamespace(run=run), file)


# With `select`: the evaluations on dataset.dev to choose from, and the files that depend on the choice.
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
    """The runs with a job's seed, by folder below results/."""
    return {run: config for run, config in RUNS.configs.items() if config.seed == int(wildcards.seed)}


def checks_of_seed(wildcards):
    """Like `checks_of`, for the runs of a seed."""
    return [ancient(of_run(run, "warmstart/checks.json")) for run in of_seed(wildcards)]


def reward_models_of_seed(wildcards):
    """checks.json of the reward models that the runs of a seed train."""
    return [
        of_run(run, "reward_model/checks.json") for run, config in of_seed(wildcards).items() if config.reward_model
    ]


def policies_of_seed(wildcards):
    """Policies that may be chosen, and policy 0 as the base of adapters."""
    return [
        of_run(run, f"policies/{number:05d}")
        for run, config in of_seed(wildcards).items()
        for number in (0, *config.candidates.values())
    ]
