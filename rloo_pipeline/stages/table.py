"""The table of all rules of a run. All code that lists rules or stages reads it.

A stage is the command that a rule calls; for example, the rules `score_alone` and `score` both call the stage `score`.
Inputs, outputs and resources of rules are in workflow/rules/; the stages' commands are in cli/stages.py.

Every command of a run imports this module before anything else, so it imports nothing from this package.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple


class Keys(NamedTuple):
    """The keys of a section that decide a result."""

    only: frozenset[str] | Literal[True] = True
    """True for all keys."""
    but: frozenset[str] = frozenset()
    """Keys that do not count."""


def _whole(*sections: str, **others: Keys) -> dict[str, Keys]:
    """Sections whose every key counts, and others of which only some do."""
    return dict.fromkeys(sections, Keys()) | others


def but(*keys: str) -> Keys:
    """All keys of a section but these."""
    return Keys(but=frozenset(keys))


def only(*keys: str) -> Keys:
    """Only these keys of a section."""
    return Keys(frozenset(keys))


class StageRow(NamedTuple):
    """A rule of the workflow, and the stage that it calls."""

    rule: str
    """Name of the rule; `update` for all rules of updates."""
    output: str
    """File that a job writes last, or folder that it writes atomically, relative to the run's folder. Its fields are
    {round}, {shard}, {reward}, {seed} and the {name} of an evaluation.
    """
    stage: str
    """Command that the rule calls."""
    log: str
    """Log of a job, below logs/, without its suffix, with the same fields as `output`."""
    phase: Literal["before", "round", "after"] = "round"
    """Before the rounds, in each round, or after them."""
    each: Literal["", "shard", "reward", "evaluation", "trained"] = ""
    """Number of jobs in a phase: one in all, or one per shard, per shard and reward that needs a GPU, per evaluation,
    or per evaluation of a trained policy.
    """
    when: Callable[[Any, int], bool] | None = None
    """True if a run has these jobs, given its configuration and the round number; None if every run has them."""
    policy: Literal["none", "first", "sampled", "previous", "last"] = "sampled"
    """Policy from which the output is made; `sampled` is the one that the round samples from."""
    decides: Mapping[str, Keys] | None = None
    """Sections of the configuration that the stage's result depends on, or parts of one as SECTION.KEY. None if another
    row has the same stage, or if the command is not a stage.
    """
    reads: tuple[str, ...] = ()
    """Sections that only affect where and how the stage runs, or what it reports besides its result."""
    worker: Literal["sampler", "logprobs", "trainer", "scorer", "observer"] | None = None
    """Role of the warm worker that can run the stage: its engine is vLLM, a model for log-probs, a trainer, or none
    (`scorer`). `observer` is a separate role, so that no round waits for stages that only observe.
    """
    engine: Literal["sampler", "trainer"] | None = None
    """Role of the worker that has such an engine, if the stage starts one that no worker keeps."""
    watched: bool = True
    """True if the live view shows it; stages that take only seconds are left out."""
    local: bool = False
    """True if it runs on Snakemake's machine, in seconds, not as a SLURM job."""
    identifies: bool = False
    """True if trackers start a new run when something that decides this stage changes."""


EACH = {"{reward}": "reward", "{shard}": "shard", "{name}": "evaluation"}
"""Number of jobs of a row, by the first of these fields that its output has."""


def _row(rule: str, output: str, phase: str = "round", **other: Any) -> StageRow:
    """A row whose stage defaults to the rule's name, and whose log and number of jobs to the fields of its output."""
    fields = [f"{{{part.partition('}')[0]}}}" for part in output.split("{")[1:]]
    log = "/".join([rule, "-".join(fields)]) if fields else rule
    each = next((jobs for field, jobs in EACH.items() if field in fields), "")
    own = {"stage": rule.replace("_", "-"), "log": log, "phase": phase, "each": each}
    return StageRow(rule, output, **(own | other))


_before, _after = partial(_row, phase="before", policy="none"), partial(_row, phase="after")


_MODEL = ("reproducible", "seed", "model")
"""Sections that decide what any computation with the model gives."""
_WHERE = ("environment_workers", "environment_gpus")
"""Keys of `rollout` for processes and GPUs of environments, which do not change results."""
_SAMPLED = but("lag", "refill", "token_budget", *_WHERE)
"""Keys of `rollout` that decide samples. The lag only selects the policy, a rule's input; a refill is a stage; a
budget decides in which round completions end."""
_COMPLETIONS = but("num_generations", "generation_batch_size", "oversample", "lag", "refill", "token_budget", *_WHERE)
"""Keys of `rollout` that decide what a prompt's completions are."""
_OF_PROBE = but("generation_batch_size", "oversample", "shards", "lag", "refill", "token_budget", *_WHERE)
"""Keys of `rollout` that decide what the groups of some prompts are, but not how many prompts a round has."""
_OF_ROUND = but("lag", "refill", *_WHERE)
"""Keys of `rollout` that decide the rollouts of a round."""
_ENVIRONMENTS = (
    *("environment", "environment_timeout", "environment_sandbox", "environment_memory_mb", "environment_image"),
    *("environment_python", "environment_read_only"),
)
_RANKS = only("processes", "zero_stage", "communication_data_type", "offload", "config")
"""Keys of `deepspeed` that change a result; the others decide memory and speed."""
_ALL_PROMPTS = but("select", "shuffle_dataset")
"""Keys of `dataset` except those that change neither the prompts themselves nor policy 0."""
_CHOICE = {"dataset.select": but("num_generations"), "dataset.shuffle_dataset": Keys()}
"""Keys of `dataset` that decide which prompts a round gets."""
_SIGNAL = only(
    *("mask_truncated_completions", "keep_truncated_in_baseline", "filter_zero_variance"),
    *("reward_clip_range", "reward_normalization"),
)
"""Keys of `algorithm` that decide which groups have a signal."""
_TEACHER = but("weight", "discount", "beta", "top_k")
"""Keys of `algorithm.teacher` that identify the model."""
_STARTING_POINT = only("name_or_path", "revision", "build", "build_options", "train", "eval")
"""Keys of `reward_model` that say which model and data its training starts with."""
_EVALUATED = but("every", "each_round", "harness")
"""Keys of `evaluation` that decide an evaluation's result."""
_EVALUATE = _whole(
    *_MODEL,
    "rewards",
    "correct",
    rollout=but(
        *("num_generations", "generation_batch_size", "oversample", "shards", "lag", "refill", "token_budget"),
        *("temperature", "top_p", "top_k", "min_p", "quantization", *_WHERE),
    ),
    evaluation=_EVALUATED,
)
_SAMPLER_READS = ("run", "scoring", "vllm", "dataset")
_LENGTHS = ("rollout", "evaluation")
"""Sections whose completion lengths are checked against the model's context."""
_BESIDE = ("rewards",)
"""Section whose reward models wait on the GPU on which the stage computes."""

ROWS = (
    _before(
        "stage_assets",
        "assets/assets.json",
        decides=_whole("seed", "data_dir", "model", "warmstart", dataset=_ALL_PROMPTS, reward_model=_STARTING_POINT)
        | {"algorithm.teacher": _TEACHER},
        reads=(*_LENGTHS, "update", "deepspeed"),
        local=True,
        identifies=True,
    ),
    _before(
        "prompts",
        "prompts/counts.json",
        # prompts contain tool schemas, and end with the text that an environment's `reset` returns
        decides=_whole("model", dataset=_ALL_PROMPTS, rollout=only("tools", *_ENVIRONMENTS)),
        reads=("evaluation",),
        identifies=True,
    ),
    _before(
        "reward_model",
        "reward_model/checks.json",
        when=lambda config, _: config.reward_model is not None,
        decides=_whole(*_MODEL, "reward_model", dataset=only("system_prompt"), deepspeed=_RANKS),
        reads=(*_LENGTHS, *_BESIDE, "update"),
        engine="trainer",
        identifies=True,
    ),
    _before(
        "warmstart",
        "policies/00000",
        decides=_whole(*_MODEL, "warmstart", dataset=_ALL_PROMPTS, deepspeed=_RANKS),
        reads=(*_LENGTHS, *_BESIDE, "update"),
        engine="trainer",
        identifies=True,
    ),
    _before(
        "probe",
        "warmstart/probe.parquet",
        policy="first",
        decides=_whole(*_MODEL, "rewards", rollout=_OF_PROBE, checks=only("probe_prompts")),
        reads=_SAMPLER_READS,
        worker="sampler",
    ),
    _before(
        "checks",
        "warmstart/checks.json",
        policy="first",
        decides=_whole(*_MODEL, "warmstart", "rewards", "checks", "correct", dataset=_ALL_PROMPTS, rollout=_OF_PROBE),
        reads=("deepspeed",),
        worker="logprobs",
    ),
    _before(
        "difficulty",
        "warmstart/difficulty/{shard}.parquet",
        when=lambda config, _: config.measures_difficulty,
        policy="first",
        decides=_whole(*_MODEL, "rewards", "correct", rollout=_COMPLETIONS)
        | {"dataset.select": but("pass_rate", "weights")},
        reads=("run", "scoring", "vllm"),
        worker="sampler",
    ),
    _row(
        "rollout",
        "rounds/{round}/rollouts/{shard}.parquet",
        decides=_whole(*_MODEL, rollout=_OF_ROUND) | _CHOICE,
        reads=("run", "vllm", "evaluation", "rewards", "correct"),
        worker="sampler",
        identifies=True,
    ),
    _row(
        "score_alone",
        "rounds/{round}/scores/parts/{reward}/{shard}.parquet",
        when=lambda config, _: any(reward.gpus for reward in config.rewards),
        stage="score",
        log="score/{round}-{shard}-{reward}",
    ),
    _row(
        "score",
        "rounds/{round}/scores/{shard}.parquet",
        decides=_whole("rewards"),
        reads=("scoring",),
        worker="scorer",
        identifies=True,
    ),
    _row(
        "refill",
        "rounds/{round}/refill/scores.parquet",
        when=lambda config, _: config.rollout.refill > 0,
        decides=_whole(*_MODEL, "rewards", rollout=but("lag", "token_budget", *_WHERE), algorithm=_SIGNAL) | _CHOICE,
        reads=("run", "vllm", "scoring"),
        worker="sampler",
    ),
    _row(
        "reference",
        "rounds/{round}/reference/{shard}.parquet",
        when=lambda config, _: config.uses_reference,
        decides=_whole("reproducible", "model", rollout=_SAMPLED),
        reads=(*_BESIDE, "deepspeed"),
        worker="logprobs",
        identifies=True,
    ),
    _row(
        "refill_reference",
        "rounds/{round}/refill/reference.parquet",
        when=lambda config, _: config.rollout.refill > 0 and config.uses_reference,
        stage="reference",
    ),
    _row(
        "teacher",
        "rounds/{round}/teacher/{shard}.parquet",
        when=lambda config, _: config.algorithm.teacher is not None,
        decides=_whole("reproducible", "model", rollout=_SAMPLED)
        | {"algorithm.teacher": but("weight", "discount", "beta")},
        reads=(*_BESIDE, "deepspeed"),
        worker="logprobs",
        identifies=True,
    ),
    _row(
        "update",
        "rounds/{round}/metrics.json",
        policy="previous",
        decides=_whole(*_MODEL, "algorithm", "update", rollout=_OF_ROUND, deepspeed=_RANKS),
        reads=(*_BESIDE, "run", "rounds", "dataset", "keep_every", "exchange"),
        worker="trainer",
        identifies=True,
    ),
    _row(
        "pass_rates",
        "rounds/{round}/pass_rates.parquet",
        when=lambda config, round_: config.updates_pass_rates and round_ <= config.rollout.policy_of(config.rounds),
        decides=_whole("correct"),
        reads=("rollout", "rewards"),
        worker="scorer",
        watched=False,
    ),
    _row(
        "gate",
        "rounds/{round}/diagnosis.json",
        when=lambda config, round_: round_ < config.rounds,
        decides={},
        reads=("rewards", "gates"),
        worker="scorer",
        watched=False,
        local=True,
    ),
    _row(
        "held_out",
        "rounds/{round}/held_out.json",
        when=lambda config, _: config.held_out_each_round > 0,
        decides=_whole("seed", "rewards", "correct", evaluation=_EVALUATED),
        reads=("run", "rollout"),
        worker="observer",
        watched=False,
    ),
    _row("track", "tracking/{round}.json", when=lambda config, _: bool(config.trackers), watched=False, local=True),
    _row(
        "report_so_far",
        "pages/{round}.json",
        when=lambda config, round_: round_ < config.rounds and config.page_is_due(round_),
        worker="observer",
        watched=False,
    ),
    _after(
        "stage_harness",
        "harness/tasks.json",
        when=lambda config, _: config.evaluation.harness is not None,
        policy="none",
        decides=_whole(evaluation=only("harness")),
        reads=("dataset", "update"),
        watched=False,
        local=True,
    ),
    _after("evaluate", "evaluation/{name}/summary.json", decides=_EVALUATE, reads=_SAMPLER_READS, worker="sampler"),
    _after(
        "distance",
        "evaluation/{name}/distance.json",
        each="trained",
        decides=_whole(*_MODEL, evaluation=_EVALUATED),
        reads=(*_BESIDE, "deepspeed", "rollout"),
        worker="logprobs",
    ),
    _after(
        "harness",
        "evaluation/{name}/harness.json",
        when=lambda config, _: config.evaluation.harness is not None,
        decides=_whole(*_MODEL, evaluation=only("harness"), dataset=only("chat_template_kwargs", "system_prompt")),
        reads=("vllm", "update"),
        engine="sampler",
    ),
    _after(
        "judge_pairs",
        "judgements.parquet",
        when=lambda config, _: config.judge is not None,
        policy="last",
        decides=_whole("judge"),
        reads=("scoring",),
        worker="scorer",
    ),
    _after(
        "select",
        "selection.json",
        when=lambda config, _: config.select is not None,
        policy="last",
        decides=_whole("select"),
        watched=False,
        local=True,
    ),
    _after(
        "evaluate_chosen",
        "test/{seed}/summary.json",
        when=lambda config, _: config.select is not None,
        policy="last",
        decides=_EVALUATE,
        reads=_SAMPLER_READS,
        worker="sampler",
    ),
    _after(
        "prove_chosen",
        "test/{seed}/proof.json",
        when=lambda config, _: config.select is not None,
        policy="last",
        decides=_whole(*_MODEL, evaluation=only("temperature")),
        reads=(*_BESIDE, "deepspeed", "rollout"),
        worker="logprobs",
    ),
    _after(
        "report",
        "summary.json",
        policy="last",
        decides=_whole(
            *("run", "rounds", "seed", "rewards", "correct", "gates", "select", "dataset.select"),
            evaluation=but("each_round"),
            report=but("every"),
        ),
        reads=("rollout", "algorithm", "judge"),
    ),
)
"""All rows, in the order in which a run's jobs start."""


PICTURE: Mapping[str, tuple[int, int, tuple[str, ...]]] = {
    "stage_assets": (0, 90, ()),
    "prompts": (1, 90, ("stage_assets",)),
    "reward_model": (1, -15, ("stage_assets",)),
    "warmstart": (2, 90, ("prompts",)),
    "probe": (2, 215, ("warmstart",)),
    "checks": (3, 215, ("probe",)),
    "difficulty": (2, 10, ("warmstart",)),
    "rollout": (3, 90, ("warmstart", "difficulty")),
    "score": (4, 55, ("rollout", "reward_model")),
    "refill": (5, -15, ("score",)),
    "reference": (4, 125, ("rollout",)),
    "refill_reference": (5, 55, ("refill",)),
    "teacher": (5, 125, ("rollout",)),
    "update": (6, 90, ("score", "reference", "teacher", "checks", "refill", "refill_reference")),
    "pass_rates": (6, -15, ("score", "refill")),
    "gate": (6, 215, ("update",)),
    "held_out": (4, -15, ("score",)),
    "track": (7, -50, ("update",)),
    "stage_harness": (7, 315, ()),
    "evaluate": (7, 90, ("update",)),
    "distance": (7, 165, ("evaluate",)),
    "harness": (7, 240, ("update", "stage_harness")),
    "judge_pairs": (8, 190, ("evaluate",)),
    "select": (7, 20, ("evaluate",)),
    "evaluate_chosen": (8, 20, ("select",)),
    "prove_chosen": (8, -50, ("evaluate_chosen",)),
    "report": (8, 90, ("evaluate", "distance", "harness", "judge_pairs", "evaluate_chosen")),
}
"""The picture of the DAG: column and height of each rule's box, and the rules whose boxes have an arrow to it. Boxes of
the phase `round` are inside its frame, except those that run on Snakemake's machine.
"""


CALL_THE_DECIDING_REWARD = frozenset({"difficulty"})
"""Stages that call only the reward function that decides what is right; `rewards` means that one for them."""


class Sections(NamedTuple):
    """Sections of the configuration that a stage gets."""

    decides: Mapping[str, Any]
    """Sections that its result depends on, with the keys that count; True for all (pydantic's `include`)."""
    but: Mapping[str, Any]
    """Keys of these sections that do not count (pydantic's `exclude`)."""
    reads: tuple[str, ...]
    """Sections that its result does not depend on."""


def _sections(parts: Mapping[str, Keys], reads: tuple[str, ...]) -> Sections:
    """The sections of a stage, from the deciding keys of a section, or of a part of it as SECTION.KEY."""
    decides: dict[str, Any] = {}
    excluded: dict[str, Any] = {}
    for path, (included, but) in parts.items():
        section, _, key = path.partition(".")
        if key:
            decides.setdefault(section, {})[key], excluded.setdefault(section, {})[key] = included, but
        else:
            decides[section], excluded[section] = included, but
    return Sections(decides, excluded, reads)


STAGES: Mapping[str, Sections] = {
    row.stage: _sections(row.decides, row.reads) for row in ROWS if row.decides is not None
}
"""The sections that each stage gets."""
