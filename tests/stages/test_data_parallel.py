"""A rollout by two engines of one job has the bytes of one engine."""

import pytest
import yaml
from helpers import done, mini, write_prompts

from rloo_pipeline.artifacts import tables

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_two_engines_write_the_table_of_one_whatever_lengths_they_expect(tiny_model, tmp_path) -> None:
    rows = [{"prompt_id": f"p{n}", "prompt": "", "prompt_ids": [4 + n, 5]} for n in range(8)]
    write_prompts(tmp_path / "prompts", rows)
    sizes = {"generation_batch_size": 16, "num_generations": 2, "shards": 1, "max_completion_length": 12}

    def sample(engines: int, round_: int) -> bytes:
        config = mini(rollout=sizes, vllm={"data_parallel_size": engines}, evaluation={"each_round": 0})
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        output = tmp_path / f"of-{engines}" / f"{round_:05d}" / "rollouts" / "000.parquet"
        inputs = ("--configfile", tmp_path / "config.yaml", "--prompts", tmp_path / "prompts", "--policy", tiny_model)
        done("rollout", *inputs, "--round", round_, "--shard", 0, "--output", output)
        return output.read_bytes()

    assert sample(2, 1) == sample(1, 1)
    lengths = tables.sampled_lengths(tables.read(tmp_path / "of-2" / "00001" / "rollouts" / "000.parquet", "rollouts"))
    assert len(set(lengths)) > 1, "so the second round deals the groups in another way"
    assert sample(2, 2) == sample(1, 2)
