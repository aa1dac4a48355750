"""A round with `rollout.token_budget` has as many groups as have ended, in tables that hold the others too."""

import json

import pyarrow as pa
import pytest
import torch
from helpers import Round, done, succeeded, write_prompts
from safetensors.torch import load_file

from rloo_pipeline.artifacts import tables

pytestmark = pytest.mark.slow

K, ENDED = 4, 3
GROUPS = {0: 0, 1: ENDED}
"""Groups that have ended in the two shards of 8."""


class Carrying(Round):
    """A round of which most groups go on in the next one; half of the completions had begun under policy 0."""

    def put(self, number: int, ended: dict[int, int]) -> "Carrying":
        self.write(number)
        for shard in range(2):
            kinds = ("rollouts", "scores", "reference")
            rows = {kind: tables.read(self._table(number, kind, shard), kind).to_pylist() for kind in kinds}
            about = tables.footer(tables.read(self._table(number, "rollouts", shard), "rollouts"))
            for place, row in enumerate(rows["rollouts"]):
                tokens = len(row["completion_ids"])
                cuts = [(1, 0)] if place % 2 and tokens > 1 else []
                segments = [{"end": end, "policy_round": policy} for end, policy in [*cuts, (tokens, number - 1)]]
                row |= {"segments": segments, "carried": place >= ended[shard] * K}
            table = pa.Table.from_pylist(rows["rollouts"], schema=tables.IN_SEGMENTS).replace_schema_metadata(about)
            count = ended[shard] * K
            self._save(number, shard, table, rows["scores"][:count], rows["reference"][:count])
        return self


@pytest.fixture
def run(tmp_path, tiny_model) -> Carrying:
    algorithm = {"beta": 0, "steps_per_generation": 2}
    return Carrying(tmp_path / "run", tiny_model, rollout={"token_budget": 9}, algorithm=algorithm)


def test_an_update_trains_on_the_groups_that_have_ended_whatever_their_number(run) -> None:
    """In round 1 none has, so the policy stays as it is."""
    outcome = succeeded(run.put(1, {0: 0, 1: 0}).update(1))
    assert "2 optimizer steps so far (2 of this round left out, without a completion to train on)" in outcome.stderr
    succeeded(run.put(2, GROUPS).update(2))
    first, second = (
        json.loads((run.run / "rounds" / name / "metrics.json").read_text()) for name in ("00001", "00002")
    )
    assert (first["groups/sampled"], first["steps_left_out"], first["reward"]) == (0, 2, None)
    before = load_file(run.model / "model.safetensors")
    assert all(torch.equal(weights, before[name]) for name, weights in run.weights(1).items())
    assert second["groups/sampled"] == ENDED
    assert 0 < second["sampling/staleness"] < 1
    assert not all(torch.equal(weights, before[name]) for name, weights in run.weights(2).items())
    assert len(tables.read(run.run / "rounds" / "00002" / "train.parquet", "train")) == ENDED * K


def test_a_shard_in_which_no_group_has_ended_has_empty_tables(run, tmp_path) -> None:
    run.put(1, GROUPS)
    prompts, scores, reference = tmp_path / "prompts", tmp_path / "scores.parquet", tmp_path / "reference.parquet"
    prompts.mkdir()
    write_prompts(prompts, [{"prompt_id": "a", "prompt": "1+1=", "prompt_ids": [4], "answer": "2"}])
    rollouts = run._table(1, "rollouts", 0)
    config = ("--config", run.run / "config.yaml", "--policy", run.model, "--rollouts", rollouts)
    done("score", *config, "--prompts", prompts, "--output", scores)
    done("reference", *config, "--output", reference)
    assert [len(tables.read(file, kind)) for file, kind in ((scores, "scores"), (reference, "reference"))] == [0, 0]
