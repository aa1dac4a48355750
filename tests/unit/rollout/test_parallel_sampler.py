"""Groups are dealt to several engines of a job by the lengths that are likely."""

import multiprocessing
import os
import signal
import time
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import mini

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Config
from rloo_pipeline.data import prompts_of_round
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import parallel_sampler
from rloo_pipeline.rollout.parallel_sampler import deal
from rloo_pipeline.rollout.requests import Completion, Request, SamplingConfig
from rloo_pipeline.seeds import derive, earlier_rounds, rows_of_round

HOW = SamplingConfig(1.0, 1.0, 0, None, 8)


def requests(*groups: tuple[int, float | None]) -> list[Request]:
    """Requests of groups, by their sizes and the tokens that are expected of each completion."""
    return [
        Request(prompt, sample, HOW, expected=expected)
        for prompt, (size, expected) in (([7], group) for group in groups)
        for sample in range(size)
    ]


def test_the_longest_groups_are_dealt_first_each_to_the_engine_with_the_fewest_tokens() -> None:
    batch = requests((2, 10), (2, 50), (2, 20), (2, 30))
    assert deal(batch, 2) == [[2, 3, 0, 1], [6, 7, 4, 5]], "50, and 30 with 20; the last goes to the first of equals"


def test_without_earlier_rounds_groups_are_dealt_in_turns() -> None:
    assert deal(requests((2, None), (2, None), (2, None)), 2) == [[0, 1, 4, 5], [2, 3]]
    assert deal(requests((1, None)), 2) == [[0], []]


def test_a_prompt_that_was_never_sampled_counts_as_the_mean_of_the_others() -> None:
    assert deal(requests((1, 10), (1, None), (1, 30), (1, 15)), 2) == [[2, 0], [1, 3]]


def test_earlier_rounds_are_those_that_sampled_the_rows_last() -> None:
    length, count, seed = 10, 4, 5
    found = earlier_rounds(range(length), length, count, 7, seed)
    for row in range(length):
        rounds = [number for number in range(1, 8) if row in rows_of_round(length, count, number, seed)]
        assert found.get(row) == max(rounds, default=None)


def test_lengths_are_those_of_the_latest_round_that_the_policy_was_trained_on(tmp_path) -> None:
    config = Config.model_validate(mini(rollout={"num_generations": 2, "generation_batch_size": 4, "lag": 1}))
    ids = ["a", "b", "c"]
    train: Any = UserDict(dict.fromkeys(ids))
    train.table = {"prompt_id": SimpleNamespace(to_pylist=lambda: ids)}
    lengths: dict[int, dict[str, list[int]]] = {}
    for number in range(1, 5):
        rows = rows_of_round(len(ids), 2, number, derive(config.seed, "prompts"))
        lengths[number] = {ids[row]: [number, number + 1] for row in rows}
        write_round(tmp_path / f"{number:05d}" / "rollouts" / "000.parquet", lengths[number])
    found = prompts_of_round.expected_lengths(config, train, range(3), 5, tmp_path)
    latest = {name: max(number for number in (1, 2, 3) if name in lengths[number]) for name in ids}
    assert found == {name: number + 0.5 for name, number in latest.items()}, "round 4 may still be in flight"
    assert prompts_of_round.expected_lengths(config, train, range(3), 1, tmp_path) == {}


def write_round(file: Path, lengths: dict[str, list[int]]) -> None:
    rows = [
        {"prompt_id": name, "sample": sample, "prompt_ids": [1], "completion_ids": [2] * length, "completion": ""}
        | {"sampling_logps": [0.0] * length, "finish_reason": "stop", "seed": 0}
        for name, counts in lengths.items()
        for sample, length in enumerate(counts)
    ]
    tables.write(file, rows, tables.ROLLOUTS, "rollouts", round=1)


def test_each_engine_has_gpus_of_its_own_and_too_few_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(parallel_sampler.devices, "has_gpu", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert [*parallel_sampler._gpus(2, 2)] == [["4", "5"], ["6", "7"]]
    with pytest.raises(UserError, match=r"^vllm.data_parallel_size: 3 engines need 2 GPUs each, but this job has 4"):
        parallel_sampler._gpus(3, 2)


class Echo:
    """An engine whose completions are the seeds of their requests."""

    def __init__(self, policy: Any, *_: Any) -> None:
        if policy.folder.name == "broken":
            raise UserError("a broken policy")
        self.policy, self.seconds = policy, 0.5

    def play(self, turns: Any, _: str) -> None:
        for index, request in turns.requests(True):
            if request.seed == KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            if request.seed == STUCK:
                time.sleep(600)
            turns.take(index, Completion([request.seed], self.policy.folder.name, [0.0], "stop"))

    def swap(self, policy: Any, _: int) -> None:
        self.policy = policy

    def leave_gpu(self) -> None:
        pass


KILLED, STUCK = 99, 98


def test_engines_answer_in_the_order_of_the_requests_and_their_errors_are_raised(monkeypatch, tmp_path) -> None:
    """The engines are forks of this process, which have `Echo` in the place of `Sampler`."""
    monkeypatch.setattr(parallel_sampler, "Sampler", Echo)
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(parallel_sampler.multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(Policy, "digest", property(lambda policy: policy.folder.name))
    settings: Any = SimpleNamespace(tensor_parallel_size=1)
    sampler = parallel_sampler.ParallelSampler(Policy(tmp_path / "first"), settings, 64, 0, 2)
    batch = requests((2, 10), (2, 50), (2, 20))
    batch = [request._replace(seed=place) for place, request in enumerate(batch)]
    completions = sampler.sample(batch, "completions")
    assert [completion.ids for completion in completions] == [[place] for place in range(6)]
    assert {completion.text for completion in completions} == {"first"}
    assert sampler.engine_seconds == [0.5, 0.5]
    sampler.swap(Policy(tmp_path / "second"), 64)
    sampler.leave_gpu()
    assert sampler.digest == "second"
    assert {completion.text for completion in sampler.sample(batch[:3], "completions")} == {"second"}
    with pytest.raises(RuntimeError, match="an engine's process was killed"):
        sampler.sample([requests((1, 1))[0]._replace(seed=STUCK), batch[1]._replace(seed=KILLED)], "completions")
    with pytest.raises(RuntimeError, match="an engine's process was killed"):
        sampler.leave_gpu()
    busy = sampler._processes[1]
    assert busy.is_alive(), "the longer one was dealt first"
    sampler.close()
    assert busy.exitcode == -signal.SIGKILL, "an engine that samples is ended too"
    with pytest.raises(UserError, match="a broken policy"):
        parallel_sampler.ParallelSampler(Policy(tmp_path / "broken"), settings, 64, 0, 2)
