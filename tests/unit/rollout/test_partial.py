"""With `rollout.token_budget` a round cuts completions by their tokens alone, and the next one goes on with them."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import mini, write_prompts

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import groups, partial
from rloo_pipeline.rollout.requests import Completion, Request
from rloo_pipeline.seeds import derive
from rloo_pipeline.training.metrics import staleness
from rloo_pipeline.training.sampler_proof import RolloutProof

K, PROMPTS, LONGEST, BUDGET, ROUNDS = 4, 6, 20, 6, 7


def of(shards: int) -> Config:
    sizes = {"num_generations": K, "generation_batch_size": K * PROMPTS, "shards": shards}
    return Config.model_validate(mini(rollout={**sizes, "max_completion_length": LONGEST, "token_budget": BUDGET}))


@pytest.fixture(scope="module")
def train(tmp_path_factory) -> PromptSet:
    folder = tmp_path_factory.mktemp("prompts")
    write_prompts(folder, [{"prompt_id": f"p{n}", "prompt": "", "prompt_ids": [n]} for n in range(PROMPTS * ROUNDS)])
    return PromptSet(folder / "train")


class Engine:
    """An engine whose completions have lengths of their own, and log-probs that name round and place of a token."""

    policy = SimpleNamespace()

    def __init__(self, round_: int) -> None:
        self.round = round_

    def sample(self, requests: list[Request], _: str) -> list[Completion]:
        done = []
        for request in requests:
            begun = request.begun
            assert begun is not None
            key = begun.ids[0] if begun.ids else random.Random(request.seed).randrange(100)
            length = min(LONGEST, 1 + key % 26)
            end = min(length, len(begun.ids) + request.sampling.max_completion_length)
            logps = [-self.round - place / 100 for place in range(len(begun.ids), end)]
            reason = "stop" if end == length < LONGEST else "length"
            done.append(Completion([key] * end, str(end), [*begun.logps, *logps], reason))
        return done


def play(folder: Path, train: PromptSet, shards: int) -> list[Path]:
    """The tables of all rounds, shard by shard."""
    config, before, files = of(shards), list[Path](), list[Path]()
    for round_ in range(1, ROUNDS + 1):
        begins = range((round_ - 1) * PROMPTS, round_ * PROMPTS)
        written = []
        for shard in range(shards):
            draw = partial.groups_of_shard(config, train, begins, round_, shard, before)
            engine: Any = Engine(round_)
            [table] = groups.sample_groups(engine, config, draw)
            written.append(folder / f"{round_}-{shard}.parquet")
            about = {"round": round_, "shard": shard, "seed": config.seed, "policy_round": round_ - 1}
            tables.write(written[-1], table, tables.IN_SEGMENTS, "rollouts", **about)
        files += written
        before = written
    return files


def rows(files: list[Path]) -> list[dict[str, Any]]:
    return [row for file in files for row in tables.read(file, "rollouts").to_pylist()]


def test_a_completion_goes_on_until_it_ends_and_trains_once_with_its_group(tmp_path, train) -> None:
    whole = rows(play(tmp_path, train, 1))
    keys = [(row["prompt_id"], row["sample"]) for row in whole]
    assert len(set(keys)) == len(keys) >= K * PROMPTS * (ROUNDS - 3)
    for row in whole:
        length = min(LONGEST, 1 + row["completion_ids"][0] % 26)
        ends = [segment["end"] for segment in row["segments"]]
        assert len(row["completion_ids"]) == len(row["sampling_logps"]) == ends[-1] == length
        assert ends[:-1] == list(range(BUDGET, length, BUDGET))
        assert row["finish_reason"] == ("stop" if length < LONGEST else "length")
        first = row["segments"][0]["policy_round"] + 1
        assert [segment["policy_round"] for segment in row["segments"]] == list(range(first - 1, first - 1 + len(ends)))
        expected = [-(first + place // BUDGET) - place / 100 for place in range(length)]
        assert row["sampling_logps"] == pytest.approx(expected)
        assert row["seed"] == derive(1, "round", first, row["prompt_id"], row["sample"])


def test_what_is_sampled_does_not_depend_on_the_number_of_shards(tmp_path, train) -> None:
    folders = [tmp_path / str(shards) for shards in (1, 3)]
    for folder in folders:
        folder.mkdir()
    assert rows(play(folders[0], train, 1)) == rows(play(folders[1], train, 3))


def test_a_round_without_all_shards_of_the_round_before_is_refused(tmp_path, train) -> None:
    files = play(tmp_path, train, 3)
    with pytest.raises(UserError, match=r"--before: 2 tables, but rollout\.token_budget needs all 3"):
        partial.groups_of_shard(of(3), train, range(6), ROUNDS + 1, 0, files[-2:])
    with pytest.raises(UserError, match="round"):
        partial.groups_of_shard(of(3), train, range(6), ROUNDS, 0, files[-3:])


def test_age_counts_tokens_and_the_proof_looks_at_completions_of_the_rounds_policy_alone(tmp_path, train) -> None:
    file = play(tmp_path, train, 1)[-1]
    table = tables.read(file, "rollouts")
    tokens = [ROUNDS - (-round(logp)) for row in table["sampling_logps"].to_pylist() for logp in row]
    assert staleness(table, ROUNDS) == pytest.approx(sum(tokens) / len(tokens))
    proof = RolloutProof.__new__(RolloutProof)
    proof.config, proof.round = of(1), ROUNDS
    own = [all(-round(logp) == ROUNDS for logp in row) for row in table["sampling_logps"].to_pylist()]
    assert proof._own(table) == own
    assert 0 < sum(own) < len(own)
    others = table.filter([not sampled for sampled in own])
    proof.by_pass(others, SimpleNamespace(logps=lambda *_, **__: pytest.fail("a pass of nothing")))
