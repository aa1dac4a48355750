"""The jobs of a run that the package knows without Snakemake are those of the rules."""

import re

from helpers import ROOT, mini

from rloo_pipeline.config import Config, RewardModel
from rloo_pipeline.config.distillation import Teacher
from rloo_pipeline.config.rewards import Judge
from rloo_pipeline.config.run_jobs import all_jobs
from rloo_pipeline.report.run_progress import SHOWN
from rloo_pipeline.stages.table import ROWS
from rloo_pipeline.workers import gpu_shares

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


def rules() -> dict[str, str]:
    """The text of each rule of a run, by its name."""
    text = "".join(file.read_text() for file in sorted((ROOT / "workflow" / "rules").glob("*.smk")))
    _, *parts = re.split(r"^(?:use rule \w+ as|rule) (\w+)", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_rule_of_a_run_has_jobs() -> None:
    assert stages_of_a_run() == rules().keys() - {"experiment", "update_transient", "update_last"}


def test_a_rule_runs_again_by_the_keys_and_the_code_of_the_stage_that_it_runs() -> None:
    """Others have parameters of their own, or follow only from their inputs."""
    others = {"score_alone", "experiment", "gate", "track", "report_so_far"}
    for name, text in rules().items():
        above, _, command = text.partition("shell:")
        named = re.findall(r'(?:made_by|params|source|source_digest)\("([\w-]+)"', above)
        assert {*named} == (set() if name in others else {*re.findall(r"rloo ([\w-]+)", command)}), name


def test_the_stage_of_a_rule_that_takes_a_gpu_has_a_worker_or_an_engine_of_its_own() -> None:
    on_gpu = {row.stage for row in ROWS if "gpu_stages=1" in rules()[row.rule] and row.rule != "score_alone"}
    assert on_gpu == {stage for stage, role in gpu_shares.ROLES.items() if role not in ("scorer", "observer")}


def test_the_live_view_shows_every_stage_that_takes_long() -> None:
    assert stages_of_a_run() - set(SHOWN) == NOT_WATCHED
