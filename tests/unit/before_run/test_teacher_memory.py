"""A plan counts what a teacher's likeliest tokens take, near what they are measured to take."""

from collections.abc import Callable
from pathlib import Path

import forks
import numpy as np
import pyarrow as pa
import pytest
import torch
from helpers import mini

from rloo_pipeline.algorithm import divergence
from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.model_dims import ModelDims
from rloo_pipeline.artifacts.round_tables import RoundTables
from rloo_pipeline.before_run import memory
from rloo_pipeline.before_run.memory import MicroBatch, RunMemory
from rloo_pipeline.config import Config
from rloo_pipeline.training import round_data

SHAPE = ModelDims(1024, 16, 1024, 512, 3072, 151_936, 300_000_000)
K, COMPLETIONS, LENGTH = 1024, 64, 65
VALUES = K * COMPLETIONS * LENGTH


def config(**teacher: object) -> Config:
    algorithm = {"beta": 0, "importance_sampling_level": "token", "teacher": {"name_or_path": "teacher"} | teacher}
    sizes = {"generation_batch_size": COMPLETIONS, "max_completion_length": LENGTH}
    return Config(**mini(algorithm=algorithm, rollout=sizes))


def of_tables() -> object:
    """Memory that an update holds for the tables of a round, the tables included."""
    logps = pa.array([[0.0] * LENGTH] * COMPLETIONS, pa.list_(pa.float32()))
    rows = {"completion_ids": [[0] * LENGTH] * COMPLETIONS, "finish_reason": ["stop"] * COMPLETIONS}
    offsets = np.arange(0, VALUES + 1, K * LENGTH, dtype=np.int32)
    top = {tables.TOP_IDS: np.ones(VALUES, np.int32), tables.TOP_LOGPS: np.ones(VALUES, np.float32)}
    lists = {name: pa.ListArray.from_arrays(offsets, pa.array(values)) for name, values in top.items()}
    rollouts, teacher = pa.table({**rows, "sampling_logps": logps}), pa.table({**lists, "teacher_logps": logps})
    scores = pa.table({"reward": [0.0] * COMPLETIONS})
    made = round_data.completions_of(config(top_k=K).algorithm, RoundTables(rollouts, scores, None, teacher), None, 5)
    return teacher, made, round_data.candidates_of(teacher, K, 5)


def of_divergence() -> object:
    """The divergence of as many tokens, with its gradient."""
    logps, teacher = (torch.full((COMPLETIONS * LENGTH, K), -9.0) for _ in range(2))
    loss = divergence.of_top(logps.requires_grad_(), teacher, 0.5).sum()
    return torch.autograd.grad(loss, logps)


def peak(function: Callable[[], object]) -> float:
    """Bytes by which the resident set of this process grows at most in a call, without pages of libraries' files."""

    def resident(line: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(words.split()[1] for words in lines if words.startswith(line)))

    torch.set_num_threads(1)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before, of_files = resident("VmRSS"), resident("RssFile")
    function()
    return resident("VmHWM") - before - (resident("RssFile") - of_files)


@pytest.mark.parametrize(
    ("function", "planned"),
    [
        (of_tables, memory.LIKELIEST["tables"] + memory.LIKELIEST["tensors"]),
        (of_divergence, memory.LIKELIEST["divergence"]),
    ],
)
def test_a_plan_has_about_what_a_likeliest_token_takes(function, planned) -> None:
    assert planned / 2 < forks.call(peak, function) / VALUES < 1.25 * planned


def test_a_plan_has_them_on_the_device_and_on_the_host_only_with_a_distribution() -> None:
    sampled, distribution = config(), config(top_k=K)
    on_cpu, on_gpu = (RunMemory(distribution, SHAPE, device).update() for device in ("cpu", "cuda"))
    assert on_cpu["teacher's tables"] == RunMemory(distribution, SHAPE).offloaded()["teacher's tables"] == 27 * VALUES
    assert "teacher's tables" not in on_gpu
    assert on_gpu["teacher's tokens"] > K * MicroBatch.largest(distribution).completion_tokens * 16
    assert not {"teacher's tables", "teacher's tokens"} & {*RunMemory(sampled, SHAPE, "cpu").update()}
    assert not RunMemory(sampled, SHAPE).offloaded()
