"""A rollout by two engines of one job has the bytes of one engine."""

from pathlib import Path

import forks
import pytest
import yaml
from helpers import mini, write_prompts

from rloo_pipeline.artifacts import tables
from rloo_pipeline.cli import main
from rloo_pipeline.workers import engine_cache, server

pytestmark = [pytest.mark.slow, pytest.mark.long]


def run_warm(*stages: list[str]) -> list[int]:
    """Runs stages as a worker does, which keeps its engines."""
    engine_cache.enable()
    return [server.status_of(main.main, stage) for stage in stages]


def test_two_engines_write_the_table_of_one_whatever_lengths_they_expect(tiny_model, tmp_path) -> None:
    rows = [{"prompt_id": f"p{n}", "prompt": "", "prompt_ids": [4 + n, 5]} for n in range(8)]
    write_prompts(tmp_path / "prompts", rows)
    sizes = {"generation_batch_size": 16, "num_generations": 2, "shards": 1, "max_completion_length": 12}

    def sampled(engines: int) -> list[Path]:
        """The tables of two rounds."""
        config, folder = tmp_path / f"{engines}.yaml", tmp_path / f"of-{engines}"
        keys = mini(rollout=sizes, vllm={"data_parallel_size": engines}, evaluation={"each_round": 0})
        config.write_text(yaml.safe_dump(keys))
        outputs = [folder / f"{round_:05d}" / "rollouts" / "000.parquet" for round_ in (1, 2)]
        inputs = ("--configfile", config, "--prompts", tmp_path / "prompts", "--policy", tiny_model, "--shard", 0)
        stages = [("rollout", *inputs, "--round", place, "--output", file) for place, file in enumerate(outputs, 1)]
        assert forks.call(run_warm, *(list(map(str, stage)) for stage in stages)) == [0, 0]
        return outputs

    of_two = sampled(2)
    lengths = tables.sampled_lengths(tables.read(of_two[0], "rollouts"))
    assert len(set(lengths)) > 1, "so the second round deals the groups in another way"
    assert [file.read_bytes() for file in of_two] == [file.read_bytes() for file in sampled(1)]
