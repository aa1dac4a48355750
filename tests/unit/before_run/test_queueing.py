"""What SLURM's queue costs a run in each of the ways to run there, and which one `rloo plan` advises."""

import re

import pytest
from helpers import ROOT, done, mini, rloo

from rloo_pipeline.artifacts.model_dims import ModelDims
from rloo_pipeline.before_run import cards, estimate, queueing
from rloo_pipeline.before_run.estimate import GpuEstimate
from rloo_pipeline.config import Config


def longest_chain(config: Config) -> int:
    """Jobs on the longest path of the DAG that are SLURM jobs, counted by walking along it."""
    chain = ["prompts", "warmstart"]
    for _ in range(config.rounds):
        chain += ["rollout", "score", "update"]
    return len([*chain, "evaluate", "distance", "report"])


def test_stages_wait_along_the_longest_chain_and_one_job_waits_once() -> None:
    config = Config(**mini(rounds=7))
    stages, one = queueing.modes(config, 600)
    assert stages.waits == longest_chain(config)
    assert stages.queue == stages.waits * (600 + queueing.SUBMISSION)
    assert (one.jobs, one.waits, one.queue) == (1, 1, 600)
    assert stages.jobs == sum(estimate.jobs(config).values()) - 1 - (config.rounds - 1), (
        "without stage-assets and gates"
    )


@pytest.mark.parametrize(
    ("lag", "refill", "waits"), [(0, 0, 21), (0, 1, 35), (1, 0, 12), (1, 1, 20), (2, 0, 9), (9, 0, 9)]
)
def test_a_lag_shortens_the_chain_of_seven_rounds_and_a_refill_lengthens_it(lag, refill, waits) -> None:
    """With a lag of 1, rounds 1 and 2 have policy 0, so that update 1 is job 3, update 2 job 4, and update 3 job 6."""
    changes = {"rollout": {"lag": lag, "refill": refill}, "algorithm": {"filter_zero_variance": True}}
    stages, one = queueing.modes(Config(**mini(rounds=7, **changes)), 60)
    assert stages.waits == 2 + waits + 3
    assert stages.gpus == one.gpus == (3 if lag else 2)


@pytest.mark.parametrize(("lag", "waits"), [(0, 28), (1, 16)])
def test_a_reward_with_a_job_of_its_own_is_one_more_wait_of_a_round(lag, waits) -> None:
    on_gpus = [{**reward, "gpus": 1} for reward in mini()["rewards"]]
    stages, _ = queueing.modes(Config(**mini(rounds=7, rewards=on_gpus, rollout={"lag": lag})), 60)
    assert stages.waits == 2 + waits + 3


def test_stages_that_run_on_snakemakes_machine_have_a_local_rule() -> None:
    """But for `experiment`, which no run has a row for."""
    text = "".join(file.read_text() for file in (ROOT / "workflow" / "rules").glob("*.smk"))
    local = re.findall(r"^rule (\w+):\n(?:(?!rule |use ).*\n)*?    localrule: True$", text, re.MULTILINE)
    assert {rule.replace("_", "-") for rule in local} - {"experiment"} == queueing.ON_SNAKEMAKES_MACHINE


def test_wall_clock_is_gpu_time_over_the_gpus_of_each_stage() -> None:
    config = Config(**mini(rollout={"shards": 4}, deepspeed={"processes": 2}, vllm={"tensor_parallel_size": 2}))
    wall = queueing.wall_seconds(config, {"rollout": 8.0, "reference": 4.0, "update": 3.0})
    assert wall == {"rollout": 3600.0, "reference": 3600.0, "update": 5400.0}
    assert {mode.gpus for mode in queueing.modes(config, 0)} == {8}


def test_gpus_of_environments_are_held_as_long_as_the_engine_works() -> None:
    tools = ["rloo_pipeline.environments.tools:calculator"]
    without_environments, with_environments = (
        Config(
            **mini(rollout={"shards": 2, "tools": tools, "environment_gpus": count}, vllm={"tensor_parallel_size": 2})
        )
        for count in (0, 1)
    )
    card, shape = cards.Card("H100", 80, 990, 3.35), ModelDims(1024, 16, 1024, 512, 3072, 32000, 300_000_000)
    hours = [
        GpuEstimate(config, shape, card).hours()["rollout"] for config in (without_environments, with_environments)
    ]
    assert hours[1] == pytest.approx(hours[0] * 3 / 2)
    walls = [
        queueing.wall_seconds(c, {"rollout": h})["rollout"]
        for c, h in zip((without_environments, with_environments), hours, strict=True)
    ]
    assert walls[1] == pytest.approx(walls[0])
    assert [mode.gpus for mode in queueing.modes(with_environments, 0)] == [6, 6]


@pytest.mark.parametrize(
    ("wait", "hours", "warm", "mode"),
    [(30, 50, 49, "snakemake"), (600, 3, 3, "rloo submit"), (3600, 50, 50, "rloo"), (30, 50, 30, "rloo submit")],
)
def test_one_job_is_advised_where_queue_and_starts_of_engines_would_be_much_of_the_time(
    wait, hours, warm, mode
) -> None:
    assert queueing.advice(Config(**mini(rounds=100)), wait, (hours * 3600, warm * 3600)).startswith(mode)


def test_the_command_shows_both_modes_and_refuses_what_is_not_slurm(tmp_path) -> None:
    config = ROOT / ".test" / "config" / "config.yaml"
    outcome = done("plan", config, "--profile", ROOT / "profiles" / "slurm", "--wait", 5)
    assert "SLURM, 5 min in the queue for each job" in outcome.stdout
    assert "advice: rloo submit" in outcome.stdout
    refused = rloo("plan", config, "--profile", ROOT / "profiles" / "allocation")
    assert "does not run on SLURM; name one that does" in refused.stderr
    refused = rloo("plan", ROOT / "config" / "experiment.yaml", "--profile", ROOT / "profiles" / "slurm")
    assert (
        "--profile plans a single run, but demo-algorithms is an experiment; pass the configuration" in refused.stderr
    )
    refused = rloo("plan", config, "--profile", ROOT / "profiles" / "slurm", "--wait", "nan")
    assert "--wait nan: not a wait in the queue; give the minutes, 0 or more" in refused.stderr
    assert "--wait is for SLURM; name the profile too" in rloo("plan", config, "--wait", 5).stderr
