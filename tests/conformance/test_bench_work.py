"""What tools/bench compares is the same work on both sides, and its floor is made of a run's own rules."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from rloo_pipeline.config import Reward
from rloo_pipeline.config.loading import load

BENCH = ROOT / "tools" / "bench"


@pytest.fixture
def bench(monkeypatch):
    """The modules of the benchmark, by their own names."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    import trl_run
    import whole

    yield trl_run, whole
    for name in {"trl_run", "whole"} - before:
        del sys.modules[name]


@pytest.mark.parametrize("file", ["config/config.yaml", "tools/bench/large.yaml"])
def test_trl_takes_as_many_steps_on_as_many_completions(bench, file, tmp_path) -> None:
    from trl.trainer.rloo_config import RLOOConfig

    trl_run, _ = bench
    config = load(ROOT / file)
    vocabulary = config.model.build_options.get("vocabulary", 25)
    arguments = RLOOConfig(**trl_run.options(config, tmp_path, vocabulary))
    algorithm, rollout = config.algorithm, config.rollout
    assert arguments.max_steps == config.rounds * algorithm.steps_per_generation * algorithm.num_iterations
    assert arguments.generation_batch_size == rollout.generation_batch_size
    assert arguments.per_device_train_batch_size * arguments.steps_per_generation == rollout.generation_batch_size
    a_step = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    assert a_step * algorithm.steps_per_generation == rollout.generation_batch_size
    assert arguments.per_device_train_batch_size * rollout.max_completion_length * vocabulary * 4 <= trl_run.LOGITS
    assert (arguments.num_generations, arguments.max_completion_length) == (
        rollout.num_generations,
        rollout.max_completion_length,
    )
    assert (arguments.learning_rate, arguments.beta, arguments.temperature) == (
        config.update.learning_rate,
        algorithm.beta,
        rollout.temperature,
    )
    assert arguments.reward_weights == [0.0, *(reward.weight for reward in config.rewards)], "the first one counts only"


def test_a_reward_gets_what_it_names_and_its_options(bench) -> None:
    trl_run, _ = bench
    section = Reward(function="rloo_pipeline.rewards.length:target_length_reward", options={"target": 2})
    scored = trl_run.reward(section)
    assert scored(completion_ids=[[1, 2], [1]], completions=["", ""], prompts=["", ""]) == [0.0, -0.5]
    assert scored.__name__ == section.column


@pytest.mark.slow
def test_the_floor_is_a_run_of_the_same_jobs(bench, tmp_path) -> None:
    _, whole = bench
    empty = whole.empty_rloo(tmp_path / "bin")
    configuration = ("--configfile", ".test/config/config.yaml", "--config", "workers=never")
    project = whole.Project(tmp_path / "project", "mini", *configuration)
    (project.folder / "tests").symlink_to(ROOT / "tests")
    project.start(empty)
    measured = project.rounds(2, empty)
    assert measured.seconds > 0
    assert measured.cpu_seconds > 0
    (seconds,) = project.seconds(2)
    assert 0 < seconds < measured.seconds
    files = {str(file.relative_to(project.run)) for file in project.run.rglob("*") if file.is_file()}
    tables = {
        f"rounds/{n:05d}/{name}/{s:03d}.parquet" for n in (1, 2) for name in ("rollouts", "scores") for s in (0, 1)
    }
    assert tables | {"rounds/00001/diagnosis.json", "benchmarks/update/00002.tsv"} <= files
    assert not any(Path(project.run / table).stat().st_size for table in tables)


def test_a_measurement_waits_for_its_own_processes_and_no_others(bench, tmp_path) -> None:
    _, whole = bench
    other = subprocess.Popen(["sleep", "600"])
    try:
        work = whole.run_measured(["sh", "-c", "(sleep 1; echo later > later) & echo printed"], tmp_path, {})
        assert work.stdout == "printed\n"
        assert (tmp_path / "later").exists(), "but what it leaves behind is"
        assert 0 < work.seconds < 300
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
