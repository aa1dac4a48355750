"""What the sampler does where there is nothing to sample, and where samples are broken."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import mini

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import groups
from rloo_pipeline.rollout.requests import Completion, SamplingConfig
from rloo_pipeline.rollout.sampler import Sampler

HOW = SamplingConfig(1.0, 1.0, 0, None, 8)


def test_an_engine_that_left_the_gpu_is_not_started_to_sample_nothing() -> None:
    sampler = Sampler.__new__(Sampler)
    sampler.llm = None
    assert sampler.sample([], "completions") == []
    assert sampler.llm is None


def test_samples_of_a_broken_adapter_name_its_folder_and_not_that_of_its_base() -> None:
    broken = Completion([5], "1", [float("nan")], "stop")
    sampler: Any = SimpleNamespace(policy=Policy(Path("rounds/00003/policy")), settings={"model": "models/base"})
    sampler.sample = lambda requests, *_: [broken] * len(requests)
    draw = groups.Draw([{"prompt_id": "a", "prompt_ids": [4]}], 2, HOW, ("rollout", 4))
    with pytest.raises(UserError, match=r"^rounds/00003/policy: the policy samples with log-probs that are not finite"):
        groups.sample_groups(sampler, Config.model_validate(mini()), draw)
