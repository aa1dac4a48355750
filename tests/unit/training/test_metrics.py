"""The metrics of the samples of a round."""

import pyarrow as pa
import pytest
import torch

from rloo_pipeline.artifacts import tables
from rloo_pipeline.config import Algorithm
from rloo_pipeline.training.batch import Batch, RoundTensors
from rloo_pipeline.training.metrics import sample_metrics, update_metrics
from rloo_pipeline.training.objective import Record


def metrics(*rewards: float | None) -> dict[str, float | int | None]:
    """Metrics of groups of two completions with these rewards."""
    keys = [{"prompt_id": str(row // 2), "sample": row % 2} for row in range(len(rewards))]
    tokens = {"prompt_ids": [4], "completion_ids": [5, 2], "sampling_logps": [-1.0, -1.0]}
    rollouts = [{**key, **tokens, "completion": "", "finish_reason": "stop", "seed": 0} for key in keys]
    scores = [{**key, "scores/answer": r, "reward": r} for key, r in zip(keys, rewards, strict=True)]
    return sample_metrics(
        pa.Table.from_pylist(rollouts, schema=tables.ROLLOUTS),
        pa.Table.from_pylist(scores, schema=tables.scores_schema(["answer"])),
        2,
    )


def test_rewards_of_a_group_that_differ_by_the_rounding_of_their_sum_are_equal() -> None:
    """As they are where groups that teach are counted; in TRL a deviation that is close to 0 is 0."""
    assert 0.1 + 0.2 != 0.3
    values = metrics(0.1 + 0.2, 0.3, 1.0, 0.0, None, 1.0, None, None)
    assert values["frac_reward_zero_std"] == 0.75


@pytest.mark.parametrize(("level", "mean"), [("token", 1.1), ("sequence", 1.5)])
def test_the_mean_ratio_weighs_every_action_equally(level: str, mean: float) -> None:
    """Completions of 1 and 9 tokens with ratios 2 and 1."""
    none, left_out = torch.zeros(2), torch.zeros(2, dtype=torch.bool)
    mask = torch.arange(9) < torch.tensor([[1], [9]])
    batch = Batch(RoundTensors(none.double(), mask, left_out, None), none.double(), None, none, left_out, left_out, 0.0)
    record = Record.empty(2)._replace(ratio=torch.tensor([2.0, 1.0]), trained=torch.ones(2))
    algorithm = Algorithm(importance_sampling_level=level, beta=0)
    assert update_metrics(batch, record, algorithm, ratio_is_known=True)["ratio/mean"] == pytest.approx(mean)
