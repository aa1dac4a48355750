"""The jobs of a run that the package knows without Snakemake are those of the rules."""

import re

from helpers import ROOT, mini

from rloo_pipeline.config import STAGES, Config, RewardModel
from rloo_pipeline.config.distillation import Teacher
from rloo_pipeline.config.rewards import Judge
from rloo_pipeline.config.run_jobs import all_jobs
from rloo_pipeline.report.run_progress import SHOWN
from rloo_pipeline.workers import client

WITHOUT_A_WORKER = {
    *("stage-assets", "stage-harness", "prompts", "reward-model", "warmstart", "harness", "select", "report"),
}
"""Stages that load no engine which the next job could use."""
NOT_WATCHED = {"stage_harness", "pass_rates", "gate", "held_out", "track", "report_so_far", "select"}
"""Stages of a run that `rloo watch` leaves out: they take seconds."""
EVERYTHING = {
    "rounds": 3,
    "report_to": ["wandb"],
    "rollout": {"refill": 1},
    "algorithm": {"filter_zero_variance": True, "beta": 0.1},
    "dataset": {
        "dev": {"generator": "rloo_pipeline.demo.arithmetic:problems", "options": {"split": "dev"}},
        "select": {"pass_rate": [0.1, 0.9], "weights": "online"},
    },
    "correct": {"reward": "answer"},
    "select": {},
    "evaluation": {"each_round": 4, "every": 1, "harness": {"tasks": ["gsm8k"]}},
    "report": {"every": 1},
}
"""Changes with which a run has a job of every stage."""


def stages_of_a_run() -> set[str]:
    config = Config(**mini(**EVERYTHING))
    on_gpu = config.deciding_reward.model_copy(update={"gpus": 1, "name": "on_gpu"})
    distilled = config.algorithm.model_copy(update={"teacher": Teacher(name_or_path="teacher")})
    section = RewardModel(train=config.dataset.train)
    changes = {
        "judge": Judge(function="judges:prefer"),
        "rewards": [*config.rewards, on_gpu],
        "algorithm": distilled,
        "reward_model": section,
    }
    return {job.stage for job in all_jobs(config.model_copy(update=changes))}


def test_every_rule_of_a_run_has_jobs() -> None:
    texts = [file.read_text() for file in (ROOT / "workflow" / "rules").glob("*.smk")]
    rules = {name for text in texts for name in re.findall(r"^(?:use rule \w+ as|rule) (\w+)", text, re.MULTILINE)}
    assert stages_of_a_run() == rules - {"experiment", "update_transient", "update_last"}


def test_every_stage_has_a_worker_or_needs_none() -> None:
    assert STAGES.keys() - client.ROLES.keys() == WITHOUT_A_WORKER


def test_the_live_view_shows_every_stage_that_takes_long() -> None:
    assert stages_of_a_run() - set(SHOWN) == NOT_WATCHED
