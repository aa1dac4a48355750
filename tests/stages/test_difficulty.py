"""Pass rates of policy 0 as a command, and the prompts of rollouts that use them."""

import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from helpers import done, mini, rloo, write_prompts

from rloo_pipeline.artifacts import prompt_counts, tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_counts import Counts
from rloo_pipeline.config import Config
from rloo_pipeline.config.loading import load
from rloo_pipeline.data.prompts_of_round import draw, uncertainty
from rloo_pipeline.rollout import groups
from rloo_pipeline.seeds import derive
from rloo_pipeline.stages import difficulty as stage

pytestmark = [pytest.mark.slow, pytest.mark.long]

NAMES = [f"p{number:02d}" for number in range(24)]
REWARD = '''
import zlib

def even(completions, level, **_):
    """Right by a hash of the completion, with a chance of level / 8: 0 and 8 are never and always right."""
    return [float(zlib.crc32(text.encode()) % 8 < one) for text, one in zip(completions, level)]
'''


def level(name: str) -> int:
    return zlib.crc32(name.encode()) % 9


@pytest.fixture
def run(tmp_path):
    """A folder with prompts whose levels differ, and a function that writes its configuration."""
    rows = [
        {"prompt_id": name, "prompt": name, "prompt_ids": [4 + number % 10, 5 + number // 10], "level": level(name)}
        for number, name in enumerate(NAMES)
    ]
    write_prompts(tmp_path / "prompts", rows)
    (tmp_path / "own.py").write_text(REWARD)

    def configure(select: dict | None = None, **changes) -> Path:
        rewards = [{"function": f"{tmp_path}/own.py:even", "name": "even"}]
        sizes = {"generation_batch_size": 16, "num_generations": 2, "shards": 2, "max_completion_length": 4}
        keys = {"rewards": rewards, "correct": {"reward": "even"}, "evaluation": {"each_round": 0}}
        config = mini(dataset={"select": select}, rollout=sizes | changes, **keys)
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        return tmp_path

    return configure


def sampled(folder: Path, stage: str, model: Path, shards: int, *arguments: object) -> list[Path]:
    """Runs a stage for all shards; it succeeds."""
    files = [folder / f"{stage}-of-{shards}" / f"{shard:03d}.parquet" for shard in range(shards)]
    for shard, file in enumerate(files):
        inputs = ("--prompts", folder / "prompts", "--policy", model)
        done(stage, *inputs, "--shard", shard, *arguments, "--output", file)
    return files


def test_pass_rates_are_the_same_in_one_shard_or_two_and_what_rollouts_draw_by(run, tiny_model) -> None:
    folder = run({"pass_rate": [0.2, 0.8], "weights": "static"}, shards=1)
    whole = prompt_counts.read(sampled(folder, "difficulty", tiny_model, 1), 0)
    run({"pass_rate": [0.2, 0.8], "weights": "static"})
    files = sampled(folder, "difficulty", tiny_model, 2)
    assert prompt_counts.read(files, 0) == whole
    assert list(whole) == NAMES
    assert {whole[name].pass_rate for name in NAMES if level(name) in (0, 8)} == {0.0, 1.0}
    assert {one.samples for one in whole.values()} == {8.0}
    rates = [whole[name].pass_rate for name in sorted(NAMES, key=level)]
    assert sum(rates[:8]) < sum(rates[8:16]) < sum(rates[16:]), "harder prompts are solved less often"

    drawn = sampled(folder, "rollout", tiny_model, 2, "--round", 3, "--difficulty", *files)
    names = tables.read_all(drawn, "rollouts")["prompt_id"].to_pylist()[::2]
    uncertain = {name: uncertainty(one) for name, one in whole.items() if 0.2 <= one.pass_rate <= 0.8}
    assert 8 <= len(uncertain) < len(NAMES)
    assert names == draw(uncertain, 8, derive(derive(1, "prompts"), 3))


@pytest.mark.holds_vllm
def test_however_many_prompts_there_are_only_so_many_completions_are_sampled_at_a_time(
    run, tiny_model, monkeypatch
) -> None:
    """Memory would hold all of them as objects."""
    folder = run({"pass_rate": [0.2, 0.8]}, shards=1)
    whole = prompt_counts.read(sampled(folder, "difficulty", tiny_model, 1), 0)
    sizes, sample_groups = list[int](), groups.sample_groups

    def counted(*arguments: Any) -> list[pa.Table]:
        tables = sample_groups(*arguments)
        sizes.append(len(tables[0]))
        return tables

    monkeypatch.setattr(groups, "sample_groups", counted)
    monkeypatch.setattr(stage, "TOGETHER", 50)
    stage.difficulty(
        load(folder / "config.yaml"), folder / "prompts", Policy(tiny_model), 0, folder / "in-pieces.parquet"
    )
    assert sizes == [56, 56, 56, 24]
    assert prompt_counts.read([folder / "in-pieces.parquet"], 0) == whole


def test_rollouts_by_the_scores_of_earlier_rounds(run, tiny_model) -> None:
    """The tables of two rounds, as the stage pass-rates makes them, and the draw that follows."""
    folder = run({"weights": "online"})
    earlier: list[Path] = []
    for number in (1, 2):
        scores = []
        for shard in range(2):
            rows = [
                {"prompt_id": name, "sample": sample, "scores/even": float(sample < number), "reward": 0.0}
                for name in NAMES[4 * shard : 4 * shard + 4]
                for sample in range(2)
            ]
            scores.append(folder / f"{number}-{shard}.parquet")
            facts = {"run": "mini", "round": number, "shard": shard, "seed": 1, "policy": "0"}
            tables.write(scores[-1], rows, tables.scores_schema(["even"]), "scores", **facts)
        output = folder / f"{number}.parquet"
        arguments = ("--round", number, "--scores", *scores, "--earlier", *earlier, "--output", output)
        done("pass-rates", *arguments)
        earlier = [output]
    counts = prompt_counts.read(earlier, 2)
    assert counts == dict.fromkeys(NAMES[:8], Counts(1 / 2 + 2, 2 / 2 + 2)), "1 of 2, then 2 of 2 are right"
    [drawn] = sampled(folder, "rollout", tiny_model, 1, "--round", 3, "--pass-rates", earlier[0])
    names = tables.read(drawn, "rollouts")["prompt_id"].to_pylist()[::2]
    weights = {name: uncertainty(counts.get(name, Counts())) for name in NAMES}
    assert names == draw(weights, 8, derive(derive(1, "prompts"), 3))[:4], "the first of two shards"

    refused = rloo(*("rollout", "--prompts", folder / "prompts", "--policy", tiny_model, "--shard", 0, "--round", 4),
                   *("--pass-rates", earlier[0], "--output", folder / "out.parquet"))  # fmt: skip
    assert refused.returncode == 1
    assert "2.parquet" in refused.stderr
    assert "delete it and run again" in refused.stderr


def test_difficulty_without_a_selection_gives_a_one_line_error(run, tiny_model) -> None:
    folder = run()
    inputs = ("--prompts", folder / "prompts", "--policy", tiny_model)
    outcome = rloo("difficulty", *inputs, "--shard", 0, "--output", folder / "out.parquet")
    assert outcome.returncode == 1
    assert "the configuration has no dataset.select; set it, or leave this stage out" in outcome.stderr
    assert Config(**mini()).dataset.select is None
