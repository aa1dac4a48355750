"""The stage `score`: the content of its table, which depends neither on the number of processes nor on that of jobs."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from threading import Event

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from helpers import Round, done, mini, rloo, wait_until, write_prompts
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rloo_pipeline.artifacts import lineage, tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import REWARD_MODEL, Config
from rloo_pipeline.config.loading import load
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import cost
from rloo_pipeline.stages.score import score
from rloo_pipeline.training.metrics import sample_metrics
from rloo_pipeline.user_code.dispatch import WorkerPools
from rloo_pipeline.user_code.score_batch import FunctionScores, RewardBatch
from rloo_pipeline.workers import client, engine_cache, kept_models

MINE = """
import time

def length(completion_ids):
    return [float(len(ids)) for ids in completion_ids]

def named(completions, tokenizer_path):
    return [float(tokenizer_path != "")] * len(completions)

def of_task(completions, task):
    return [1.0 if t == "sums" else None for t in task]

def stuck(completions, sometimes):
    if any(sometimes):
        time.sleep(1e6)
    return [0.5] * len(completions)
"""


def untimed(scores: pa.Table) -> pa.Table:
    """The table without the seconds, the digest, in which they are, and what only a command notes."""
    left_out = (tables.DIGEST, lineage.DECIDED)
    facts = {key: value for key, value in tables.footer(scores).items() if key not in left_out}
    return scores.drop_columns("seconds").replace_schema_metadata(facts)


def test_the_table_keeps_nulls_monitors_seconds_and_errors_for_any_number_of_workers(
    tmp_path, tiny_model, monkeypatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "made-up")  # for the function with a GPU
    run = Round(tmp_path / "run", tiny_model).write(1)
    rows = [
        {"prompt_id": f"{shard}-{n}", "prompt": "x", "prompt_ids": [4], "answer": "1"}
        | {"task": "sums" if n % 2 else "code", "sometimes": n == 3}
        for shard in range(2)
        for n in range(8)
    ]
    write_prompts(run.run / "prompts", rows)
    (tmp_path / "mine.py").write_text(MINE)
    rewards = [
        {"function": f"{tmp_path}/mine.py:of_task", "name": "answer"},
        {"function": f"{tmp_path}/mine.py:length", "weight": 0, "gpus": 1},
        {"function": f"{tmp_path}/mine.py:stuck", "timeout": 0.4, "weight": 0.1},
        {"function": f"{tmp_path}/mine.py:named", "weight": 0},  # asks for the policy's tokenizer
    ]
    rollouts = tmp_path / "rollouts.parquet"
    completions = tables.read(run._table(1, "rollouts", 0), "rollouts")
    tables.write(
        rollouts, completions, tables.ROLLOUTS, "rollouts", run="made-up", round=1, shard=0, seed=1, policy="x"
    )
    read = []
    for workers in (1, 3):
        config = mini(rewards=rewards, scoring={"workers": workers})
        (run.run / "config.yaml").write_text(yaml.safe_dump(config))
        output = tmp_path / f"{workers}.parquet"
        if workers == 1:
            score(
                load(run.run / "config.yaml").only("score"), run.run / "prompts", Policy(tiny_model), rollouts, output
            )
        else:
            places = ("--prompts", run.run / "prompts", "--policy", tiny_model, "--rollouts", rollouts)
            arguments = ("--configfile", run.run / "config.yaml", *places)
            outcome = done("score", *arguments, "--output", output)
            assert "reward stuck: mean 0.5000 over 28 of 32; 4 failed" in outcome.stderr
        read.append(tables.read(output, "scores"))
    one, three = read
    assert untimed(one).equals(untimed(three), check_metadata=True)
    groups = [one.slice(first, 4).to_pylist() for first in range(0, 32, 4)]
    for n, group in enumerate(groups):
        for row in group:
            assert row["scores/answer"] == (1.0 if n % 2 else None)
            assert row["scores/length"] > 0
            assert row["scores/stuck"] == (None if n == 3 else 0.5)
            assert row["error"] == ("stuck took over 0.4 s" if n == 3 else None)
            assert (row["seconds"] >= 0.4) == (n == 3)
            assert row["reward"] == (1.0 if n == 3 else 1.05 if n % 2 else 0.05)
    parts, driver = [], tmp_path / "bin"
    driver.mkdir()
    (driver / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA L4'\n")
    (driver / "nvidia-smi").chmod(0o755)
    for name in ("stuck", "length"):
        parts.append(tmp_path / name / "000.parquet")
        one_function = (*arguments, "--only", name, "--output", parts[-1], f"--log={tmp_path / name}.log")
        done("score", *one_function, PATH=f"{driver}:{os.environ['PATH']}")
        used = "INFO rloo.time: used 1 x NVIDIA L4" in (tmp_path / f"{name}.log").read_text()
        assert used == (name == "length"), "the GPUs of a job are those of its function"
    outcome = done("score", *arguments, "--parts", *parts, "--output", tmp_path / "joined.parquet")
    assert "reward stuck" not in outcome.stderr, "it is not scored again"
    joined = tables.read(tmp_path / "joined.parquet", "scores")
    assert untimed(joined).equals(untimed(one), check_metadata=True)
    assert [s >= 0.4 for s in joined["seconds"].to_pylist()] == [s >= 0.4 for s in one["seconds"].to_pylist()]
    outcome = rloo("score", *arguments, "--only", "stuk", "--output", tmp_path / "none.parquet")
    assert outcome.returncode == 1
    assert "--only stuk: no reward of the configuration has this name; did you mean 'stuck'?" in outcome.stderr
    other = tmp_path / "other.parquet"
    tables.write(
        other, completions.slice(4), tables.ROLLOUTS, "rollouts", run="made-up", round=1, shard=1, seed=1, policy="x"
    )
    other_shard = ("--configfile", run.run / "config.yaml", *places[:4], "--rollouts", other, "--parts", *parts)
    outcome = rloo("score", *other_shard, "--output", tmp_path / "none.parquet")
    assert outcome.returncode == 1
    assert f"{parts[0]}: its rollouts is" in outcome.stderr
    metrics = sample_metrics(pq.read_table(rollouts), one, 4)
    assert metrics["scoring_errors"] == 4
    assert metrics["unscorable"] == 0
    assert "rewards/seconds/mean" not in metrics


def reward_model(model: Path, folder: Path) -> tuple[torch.nn.Module, Path, list[dict]]:
    """A reward model with the body of another model, its new folder, and the rewards of a run that scores with it."""
    weights, made = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1), folder / "model"
    AutoTokenizer.from_pretrained(model).save_pretrained(made)
    weights.save_pretrained(made)
    return weights, made, [{"function": REWARD_MODEL, "batch": "all", "options": {"model": str(made)}}]


def test_a_warm_worker_keeps_the_process_of_a_reward_model_and_gets_the_scores_of_a_new_one(
    tmp_path, tiny_model, monkeypatch
) -> None:
    run = Round(tmp_path / "run", tiny_model).write(1)
    rows = [{"prompt_id": f"0-{n}", "prompt": "x", "prompt_ids": [4], "answer": "1"} for n in range(8)]
    write_prompts(run.run / "prompts", rows)
    weights, model, rewards = reward_model(tiny_model, tmp_path)
    (run.run / "config.yaml").write_text(yaml.safe_dump(mini(rewards=rewards)))
    config, rollouts = load(run.run / "config.yaml").only("score"), run._table(1, "rollouts", 0)

    def scored() -> pa.Table:
        score(config, run.run / "prompts", Policy(tiny_model), rollouts, tmp_path / "scores.parquet")
        return untimed(tables.read(tmp_path / "scores.parquet", "scores"))

    def kept() -> list[subprocess.Popen]:
        return [worker.process for worker in engine_cache._engines[kept_models.KEPT][1]]

    alone = scored()
    monkeypatch.setattr(engine_cache, "_enabled", True)
    assert scored().equals(alone, check_metadata=True)
    [process] = kept()
    assert [one.pid for one in cost._others] == [process.pid], "its CPU time is the stage's"
    weights.score.weight.data *= -2
    weights.save_pretrained(model)
    assert scored()["reward"].to_pylist() == [-2 * reward for reward in alone["reward"].to_pylist()]
    assert kept() == [process], "it has loaded the model that replaced its own"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert kept_models._kept(config.rewards) == []
    assert process.poll() is not None, "one that no reward of the run fits ends"


@pytest.fixture
def scorer(tmp_path, monkeypatch):
    """A warm worker that scores, in a folder for this process and its stages."""
    folder = tmp_path / "workers"
    folder.mkdir(mode=0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(client.FOLDER, str(folder))
    command = [sys.executable, "-m", "rloo_pipeline", "worker", "--socket", folder / "scorer-0.sock"]
    with subprocess.Popen([*command, "--controller", str(os.getpid())]) as worker:
        wait_until((folder / "scorer-0.sock").exists)
        yield worker
        worker.kill()


def test_a_stage_that_scores_elsewhere_gets_the_scores_of_the_process_that_a_worker_keeps(
    tmp_path, tiny_model, monkeypatch, scorer
) -> None:
    config = Config(**mini(rewards=reward_model(tiny_model, tmp_path)[2]))
    batch = RewardBatch(["1+1="] * 4, ["1", "22", "333", "4444"], [[1]] * 4, {})

    def scored() -> tuple[list[float | None], int]:
        """The scores, and the number of processes that this one has started for them."""
        with WorkerPools(config.rewards, 1, elsewhere=kept_models.elsewhere(config)) as pools:
            [results] = pools.score(batch, [4])
            return results.scores, len([*chain(*pools.started)])

    monkeypatch.setattr(cost, "_cpu_before", before := cost._cpu_before)
    scores, started = scored()
    assert started == 0
    assert len({*scores}) == 4
    assert before - cost._cpu_before > 0, "the CPU time of the process is the stage's"
    [kept] = psutil.Process(scorer.pid).children()
    assert scored() == (scores, 0)
    assert psutil.Process(scorer.pid).children() == [kept]
    kept.suspend()
    with ThreadPoolExecutor() as other:
        answer = other.submit(scored)
        wait_until(lambda: any(tmp_path.glob("workers/tmp*")))
        scorer.kill()
        assert answer.result() == (scores, 1), "a stage whose worker dies calls the model itself"


def test_a_stage_that_had_to_load_a_model_itself_keeps_calling_it_and_asks_no_worker_again(
    tmp_path, tiny_model, monkeypatch
) -> None:
    folder, asked = tmp_path / "workers", []
    folder.mkdir()
    (folder / "scorer-0.sock").touch()
    monkeypatch.setenv(client.FOLDER, str(folder))
    config = Config(**mini(rewards=reward_model(tiny_model, tmp_path)[2]))
    elsewhere = kept_models.elsewhere(config)
    shutil.rmtree(folder)  # as the workers do at their end

    def ask(*arguments: object) -> FunctionScores | None:
        asked.append(arguments)
        return elsewhere(*arguments)

    batch = RewardBatch(["1+1="] * 4, ["1", "22", "333", "4444"], [[1]] * 4, {})
    with WorkerPools(config.rewards, 1, elsewhere=ask) as pools:
        [first], [second] = pools.score(batch, [4], more=True), pools.score(batch, [4])
    assert first.scores == second.scores
    assert len(asked) == 1


def test_a_model_that_fails_in_a_worker_is_not_called_again_for_the_words_of_its_error(
    tmp_path, tiny_model, scorer
) -> None:
    config = Config(**mini(rewards=[{"function": REWARD_MODEL, "options": {"model": str(tmp_path / "none")}}]))
    batch = RewardBatch(["1+1="] * 2, ["1", "22"], [[1]] * 2, {})
    with WorkerPools(config.rewards, 1, elsewhere=kept_models.elsewhere(config)) as pools:
        with pytest.raises(UserError, match="cannot be loaded as a model for sequence classification"):
            pools.score(batch, [2])
        assert [*chain(*pools.started)] == []
    assert scorer.poll() is None, "the worker goes on"


@pytest.mark.parametrize(("gpus", "beside"), [(1, True), (0, False)])
def test_a_model_on_a_gpu_is_called_while_the_stages_own_functions_run(tmp_path, gpus, beside) -> None:
    """And one on CPUs before them, so that they do not compete for cores."""
    own_runs = tmp_path / "own runs"
    (tmp_path / "own.py").write_text(
        f"from pathlib import Path\n\ndef own(completions, **_):\n    Path({str(own_runs)!r}).touch()\n"
        "    return [0.5 for _ in completions]\n"
    )
    rewards = [
        {"function": f"{tmp_path / 'own.py'}:own"},
        {"function": REWARD_MODEL, "name": "model", "gpus": gpus, "options": {"model": "not/here"}},
    ]

    def ask(*_: object) -> FunctionScores:
        if beside:
            wait_until(own_runs.exists)
        assert own_runs.exists() == beside
        return FunctionScores([2.0] * 2, [None] * 2, [None] * 2, [0.0] * 2)

    with WorkerPools(Config(**mini(rewards=rewards)).rewards, 2, elsewhere=ask) as pools:
        own, model = pools.score(RewardBatch(["1+1="] * 2, ["1", "22"], [[1]] * 2, {}), [2])
    assert (own.scores, model.scores) == ([0.5] * 2, [2.0] * 2)


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError])
def test_ctrl_c_does_not_wait_for_a_models_calls_in_a_worker_and_an_error_does(monkeypatch, error) -> None:
    """A worker that goes on would otherwise run its next stage beside the calls."""
    rewards = [
        {"function": "rloo_pipeline.rewards:exact_match", "name": "own"},
        {"function": REWARD_MODEL, "name": "model", "gpus": 1, "options": {"model": "not/here"}},
    ]
    failed, ended, answered = Event(), Event(), Event()

    def fail(*_: object) -> None:
        failed.set()
        raise error

    def ask(*_: object) -> None:
        failed.wait()
        if error is KeyboardInterrupt:
            ended.wait()
        answered.set()

    monkeypatch.setattr(WorkerPools, "_step", fail)
    with WorkerPools(Config(**mini(rewards=rewards)).rewards, 2, elsewhere=ask) as pools:
        with pytest.raises(error):
            pools.score(RewardBatch(["1+1="] * 2, ["1", "22"], [[1]] * 2, {}), [2])
        assert answered.is_set() == (error is UserError)
        ended.set()


def test_a_model_that_fails_in_a_worker_does_not_wait_for_the_stages_own_functions(tmp_path) -> None:
    own_runs = tmp_path / "own runs"
    (tmp_path / "own.py").write_text(
        f"import time\nfrom pathlib import Path\n\ndef own(completions, **_):\n    Path({str(own_runs)!r}).touch()\n"
        "    time.sleep(1000)\n"
    )
    rewards = [
        {"function": f"{tmp_path / 'own.py'}:own", "timeout": 100, "on_timeout": "fail"},
        {"function": REWARD_MODEL, "name": "model", "gpus": 1, "options": {"model": "not/here"}},
    ]

    def ask(*_: object) -> None:
        wait_until(own_runs.exists)
        raise UserError("the model fails")

    with (
        WorkerPools(Config(**mini(rewards=rewards)).rewards, 2, elsewhere=ask) as pools,
        pytest.raises(UserError, match="the model fails"),
    ):
        pools.score(RewardBatch(["1+1="] * 2, ["1", "22"], [[1]] * 2, {}), [2])
