"""Combinations of `algorithm` that mean nothing are refused in one sentence that says why and what to do."""

import pytest
from helpers import mini

from rloo_pipeline.config_file import validate
from rloo_pipeline.errors import UserError

TOKEN = {"importance_sampling_level": "token"}
REFUSED = {
    "delta clips first": ({"delta": 1.1}, {}, ["delta (1.1)", "1.2"]),
    "delta without ppo": ({"delta": 3, "clip": "cispo"}, {}, ["delta", "clip: ppo"]),
    "token KL on sequences": ({"kl": {"placement": "token_reward"}}, {}, ["importance_sampling_level: token"]),
    "steering nothing": ({"kl": {"target": 6.0}, "beta": 0}, {}, ["kl.target", "set beta"]),
    "bias of a KL in the reward": ({"kl": {"bias_correction": True}}, {}, ["kl.placement: loss"]),
    "correcting the sampler with itself": (
        {"old_logps": "sampler", "mismatch": {"correction": "token_tis"}, **TOKEN},
        {},
        ["mismatch.correction: token_tis", "old_logps: trainer"],
    ),
    "token weights on sequences": ({"mismatch": {"correction": "token_tis"}}, {}, ["sequence_tis"]),
    "dropping without a threshold": (
        {"mismatch": {"correction": "sequence_mis", "max": None}},
        {},
        ["mismatch.min or mismatch.max"],
    ),
    "thresholds the wrong way round": (
        {"mismatch": {"correction": "sequence_mis", "min": 3, "max": 2}},
        {},
        ["mismatch.min (3) exceeds mismatch.max (2)"],
    ),
    "a cut distribution against the trainer's": (
        {"mismatch": {"correction": "sequence_tis"}},
        {"rollout": {"top_p": 0.9}},
        ["rollout.top_p", "cut distribution"],
    ),
    "a cut distribution as the old one": ({"old_logps": "sampler"}, {"rollout": {"min_p": 0.1}}, ["rollout.min_p"]),
    "a cache longer than completions": (
        {"response_length": {"overlong_cache": 100}},
        {},
        ["overlong_cache (100)", "max_completion_length (48)"],
    ),
    "a preset that is none": ({"preset": "grp"}, {}, ["grpo"]),
    "shards over the sampled prompts": ({}, {"rollout": {"oversample": 1.5, "shards": 25}}, ["25", "24 prompts"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_means_nothing_is_refused(name) -> None:
    algorithm, changes, words = REFUSED[name]
    with pytest.raises(UserError) as caught:
        validate(mini(algorithm=algorithm, **changes), "test.yaml")
    said = str(caught.value)
    assert all(word in said for word in ["test.yaml", *words]), said
    assert "\n" not in said


def test_what_means_something_is_not() -> None:
    algorithm = {"kl": {"placement": "token_reward"}, "delta": 3, "mismatch": {"correction": "token_tis"}, **TOKEN}
    found = validate(mini(algorithm=algorithm), "test.yaml").algorithm
    assert found.delta == 3
