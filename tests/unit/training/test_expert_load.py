"""The metrics of experts are those of the tokens that the router sends to them."""

from math import log

import pytest
import torch
from cases import PACKED, config

from rloo_pipeline.training.expert_load import ExpertLoad
from rloo_pipeline.training.self_check import small


def same(values: torch.Tensor) -> torch.Tensor:
    return values


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_every_layer_with_experts_is_counted(kind) -> None:
    model = small.build(config(kind, PACKED[kind]), False, "eager")
    load = ExpertLoad(model)
    assert load.metrics(same) == {}, "nothing has been counted"
    model(torch.tensor([[5, 6, 7, 8, 9]]))
    assert load.metrics(same) == {}, "nor without a word that it counts"
    load.counts_now = True
    model(torch.tensor([[5, 6, 7, 8, 9]]))
    assert {int(counts.sum()) for counts in load.counts} == {5 * 2}, "two experts a token"
    assert 0 < load.metrics(same)["experts/entropy"] <= 1
    load.reset()
    assert load.metrics(same) == {}


def test_the_metrics_are_those_of_the_worst_layer_over_all_ranks() -> None:
    load = ExpertLoad(small.build(config("mixtral", PACKED["mixtral"]), False, "eager"))
    load.counts[0] += torch.tensor([10, 2, 2, 2])
    load.counts[1] += torch.tensor([9, 7, 0, 0])
    metrics = load.metrics(lambda counts: 2 * counts)
    p = 9 / 16
    assert metrics["experts/largest_share"] == p, "a share of 10/16 is of the layer with the higher entropy"
    assert metrics["experts/entropy"] == pytest.approx(-(p * log(p) + (1 - p) * log(1 - p)) / log(4))


def test_another_model_has_none() -> None:
    assert ExpertLoad(small.build(config("llama", {}), False, "eager")).counts == []
