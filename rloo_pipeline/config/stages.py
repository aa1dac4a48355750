"""`STAGES`: the sections of the configuration that each stage gets, and those that decide its result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rloo_pipeline.config.algorithm import Algorithm
from rloo_pipeline.config.check_limits import Checks
from rloo_pipeline.config.data import Dataset
from rloo_pipeline.config.evaluation import Evaluation
from rloo_pipeline.config.sampling import Rollout
from rloo_pipeline.config.training import Deepspeed

But = dict[str, Any]
"""By section: a set of keys, or a mapping of keys to True or to a set of keys below them (pydantic's `exclude`)."""


class Sections(NamedTuple):
    """Sections of the configuration that a stage gets."""

    decides: tuple[str, ...]
    """Sections that its result depends on."""
    reads: tuple[str, ...] = ()
    """Sections that only affect where and how it runs, or what it reports besides its result."""
    but: But = {}
    """Keys of `decides` sections that do not affect the result."""


_WHERE = {"environment_workers", "environment_gpus"}
"""How many processes and GPUs environments have changes no result."""
_ELSEWHERE = {"rollout": {"lag", "refill", *_WHERE}}
"""The lag decides which policy is sampled, which the rule of the rollouts gives; a refill has a stage of its own."""
_TEACHING = {
    *("mask_truncated_completions", "keep_truncated_in_baseline", "filter_zero_variance"),
    *("reward_clip_range", "reward_normalization"),
}
"""Keys of the algorithm that decide which groups teach."""
_TOOLS = {"rollout": {*_WHERE, *(key for key in Rollout.model_fields if "environment" not in key and key != "tools")}}
"""All but the tools, whose schemas are in the prompts, and the environments, whose `reset` ends them."""
_ALL_PROMPTS = {"dataset": {"select"}}
"""Which training prompts are used changes no prompt, and not what policy 0 is and does."""


def _of_selection(*but: str) -> But:
    """Nothing of `dataset` but `select`, without some of its keys."""
    return {"dataset": {**dict.fromkeys(set(Dataset.model_fields) - {"select"}, True), "select": set(but)}}


_SAMPLE = {"num_generations", "generation_batch_size", "oversample", "refill", "lag", *_WHERE}
"""Keys of `rollout` that do not change a single completion."""
_LENGTHS = ("rollout", "evaluation")
"""Sections whose completion lengths are checked against the context of the model."""
_OTHERS = {"evaluation": {"every", "each_round", "harness"}}
_EVALUATION = Sections(
    ("seed", "model", "rollout", "rewards", "correct", "evaluation"),
    ("run", "scoring", "vllm", "dataset"),
    _OTHERS | _ELSEWHERE,
)
_JUDGING = set(Checks.model_fields) - {"probe_prompts", "probe_num_generations"}
_MEMORY = set(Deepspeed.model_fields) - {"processes", "zero_stage", "communication_data_type", "offload", "config"}
_PAGES = {"report": {"every"}, "evaluation": {"each_round"}}
_HARNESS_ALONE = {"evaluation": set(Evaluation.model_fields) - {"harness"}}

STAGES: Mapping[str, Sections] = {
    "stage-assets": Sections(
        ("seed", "data_dir", "model", "dataset", "warmstart"), (*_LENGTHS, "update"), _ALL_PROMPTS
    ),
    "prompts": Sections(("dataset", "model", "rollout"), ("evaluation",), _TOOLS | _ALL_PROMPTS),
    "warmstart": Sections(
        ("seed", "model", "dataset", "warmstart", "deepspeed"),
        (*_LENGTHS, "update"),
        {"deepspeed": _MEMORY} | _ALL_PROMPTS,
    ),
    "probe": Sections(
        ("seed", "model", "rollout", "rewards", "checks"),
        ("run", "scoring", "vllm", "dataset"),
        {"checks": _JUDGING} | _ELSEWHERE,
    ),
    "checks": Sections(
        ("seed", "model", "dataset", "warmstart", "rollout", "rewards", "checks"),
        ("correct", "deepspeed"),
        _ELSEWHERE | _ALL_PROMPTS,
    ),
    "difficulty": Sections(
        ("seed", "model", "rollout", "rewards", "correct", "dataset"),
        ("run", "scoring", "vllm"),
        {"rollout": _SAMPLE} | _of_selection("pass_rate", "weights"),
    ),
    "rollout": Sections(
        ("seed", "model", "rollout", "dataset"),
        ("run", "vllm", "evaluation", "rewards", "correct"),
        _ELSEWHERE | _of_selection("num_generations"),
    ),
    "score": Sections(("rewards",), ("scoring",)),
    "refill": Sections(
        ("seed", "model", "rollout", "rewards", "algorithm", "dataset"),
        ("run", "vllm", "scoring"),
        {
            "rollout": {"lag", *_WHERE},
            "algorithm": set(Algorithm.model_fields) - _TEACHING,
            **_of_selection("num_generations"),
        },
    ),
    "pass-rates": Sections(("correct",), ("rollout", "rewards")),
    "reference": Sections(("model", "rollout"), ("deepspeed",), _ELSEWHERE),
    "update": Sections(
        ("seed", "model", "rollout", "algorithm", "update", "deepspeed"),
        ("run", "dataset"),
        {"deepspeed": _MEMORY} | _ELSEWHERE,
    ),
    "evaluate": _EVALUATION,
    "select": Sections(("select",)),
    "evaluate-chosen": _EVALUATION,
    "held-out": Sections(("seed", "rewards", "correct", "evaluation"), ("run", "rollout"), _OTHERS),
    "distance": Sections(("seed", "model", "evaluation"), ("deepspeed",), _OTHERS),
    "stage-harness": Sections(("evaluation",), (), _HARNESS_ALONE),
    "harness": Sections(("seed", "model", "evaluation"), ("vllm",), _HARNESS_ALONE),
    "gate": Sections((), ("rewards", "gates")),
    "report": Sections(
        ("run", "rounds", "seed", "rewards", "evaluation", "correct", "gates", "report", "select", "dataset"),
        ("rollout", "algorithm"),
        _PAGES | _of_selection(),
    ),
}
