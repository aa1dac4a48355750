"""Advantages under random combinations of keys are those of a plain reading of docs/algorithms.md, step by step."""

import random
from typing import Any

import torch
from torch import Tensor

from rloo_pipeline.config import Algorithm, Rollout
from rloo_pipeline.training.batch import AlgorithmState, RoundTensors, make_batch

K, GROUPS, LONGEST = 3, 5, 6
KEYS: dict[str, list[Any]] = {
    "importance_sampling_level": ["token"],
    "advantage": ["rloo", "rloo_std", "grpo", "dr_grpo", "reinforce_pp", "reinforce_pp_baseline"],
    "beta": [0.5, 0.5, 0.0],
    "kl": [{"placement": place, "estimator": name} for place in ("reward", "token_reward") for name in ("k1", "k3")],
    "reward_clip_range": [(-0.3, 0.6), (0.0, 1.0)],
    "reward_normalization": ["batch"],
    "response_length": [{"target": 4, "target_penalty": 0.3}, {"overlong_cache": 3, "overlong_penalty": 0.7}],
    **{name: [True] for name in ("normalize_advantages", "mask_truncated_completions", "filter_zero_variance")},
    "keep_truncated_in_baseline": [True],
}


def drawn(rng: random.Random) -> Algorithm:
    """A valid configuration, with as many of the drawn keys as go together."""
    keys: dict[str, Any] = {"beta": 0.0}
    for name in rng.sample(sorted(KEYS), rng.randint(4, len(KEYS))):
        try:
            Algorithm.model_validate(more := {**keys, name: rng.choice(KEYS[name])})
            keys = more
        except ValueError:
            continue
    return Algorithm.model_validate(keys)


def make_round(rng: random.Random) -> RoundTensors:
    """Completions of which some have no score; in a few groups, or in all, the scores are equal."""
    generator = torch.Generator().manual_seed(rng.randrange(10**6))
    mask = torch.arange(LONGEST) < torch.tensor([rng.randint(1, LONGEST) for _ in range(K * GROUPS)]).unsqueeze(-1)
    old, reference = torch.where(mask, 0.2 * torch.randn(2, *mask.shape, generator=generator), 0.0)
    alike = rng.random() < 0.15
    scores = []
    for _ in range(GROUPS):
        value = rng.choice([0.0, 1.0]) if alike or rng.random() < 0.1 else rng.gauss(0, 1)
        scores += rng.choices([value, torch.nan] if alike or value in (0, 1) else [0.0, 1.0, value, torch.nan], k=K)
    return RoundTensors(
        torch.tensor(scores).double(), mask, torch.rand(len(mask), generator=generator) < 0.3, old, reference
    )


def known(values: Tensor) -> Tensor:
    return values[~values.isnan()]


def differ(values: Tensor) -> bool:
    return bool((known(values) - known(values)[:1]).abs().gt(1e-9).any())


def standardized(values: Tensor, like: Tensor, divide: bool) -> Tensor:
    """Values by the moments of others."""
    return (values - known(like).mean()) / (known(like).std() + 1e-4 if divide else 1.0)


def estimate(name: str, rewards: Tensor) -> Tensor:
    """Advantages of one group; NaN where undefined."""
    result = torch.full_like(rewards, torch.nan)
    for i, reward in enumerate(rewards):
        group, siblings = known(rewards), known(torch.cat([rewards[:i], rewards[i + 1 :]]))
        if reward.isnan():
            continue
        if name == "reinforce_pp":
            result[i] = reward
        elif len(siblings):
            result[i] = reward - (siblings if name.startswith("rloo") else group).mean()
        if (name == "grpo" and len(siblings)) or (name == "rloo_std" and differ(siblings)):
            result[i] /= (group if name == "grpo" else siblings).std() + 1e-4
    return result


def left_out(a: Algorithm, scores: Tensor, truncated: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Completions that are left out of the loss, and out of baselines too."""
    masked = truncated & a.mask_truncated_completions
    excluded = masked & (not a.keep_truncated_in_baseline)
    for start in range(0, len(scores), K) if a.filter_zero_variance else ():
        group = slice(start, start + K)
        values = torch.where(excluded[group], torch.nan, scores[group]).clamp(low, high)
        if not ((values - known(values).mean()).abs() > 1e-9)[~masked[group]].any():
            masked[group] = excluded[group] = True
    return masked, excluded


def advantages(a: Algorithm, data: RoundTensors) -> tuple[Tensor, Tensor]:
    """The advantage of each token, and the completions that are left out of the loss."""
    low, high = a.reward_clip_range or (-torch.inf, torch.inf)
    masked, excluded = left_out(a, data.scores, data.truncated, low, high)
    scores = torch.where(excluded, torch.nan, data.scores)
    length, tokens = a.response_length, data.mask.sum(-1).double()
    penalty = 0.3 * (tokens - length.target).abs() / length.target if length.target else torch.zeros(())
    if length.overlong_cache:
        penalty = 0.7 * ((tokens - LONGEST + 3) / 3).clamp(min=0)
    plain, rewards = scores, scores - penalty
    if a.reward_normalization == "batch" and len(known(scores)) > 1:
        plain, rewards = (standardized(values, rewards, differ(scores)) for values in (plain, rewards))
    plain, rewards = plain.clamp(low, high), rewards.clamp(low, high)
    x = data.old_logps.double() - data.reference_logps
    kl = torch.where(data.mask & ~masked.unsqueeze(-1), x if a.kl.estimator == "k1" else (-x).exp() - 1 + x, 0.0)
    if a.kl.placement == "reward":
        rewards = rewards - a.beta * kl.sum(-1)
    of_scores, values = (torch.cat([estimate(a.advantage, row) for row in each.split(K)]) for each in (plain, rewards))
    by_token = a.beta > 0 and a.kl.placement == "token_reward"
    if by_token:
        to_go = torch.stack([kl[:, token:].sum(-1) for token in range(LONGEST)], -1)
        values = torch.where(data.mask, values.unsqueeze(-1) - a.beta * to_go, torch.nan)
    if a.normalize_advantages or a.advantage.startswith("reinforce_pp"):
        values = standardized(values, values, differ(scores) and differ(of_scores) and len(known(values)) > 1)
    return (values if by_token else values.unsqueeze(-1)).nan_to_num(0.0) * data.mask, masked


def test_advantages_are_those_of_the_steps_in_their_order() -> None:
    rng, seen = random.Random(0), set[str]()
    rollout = Rollout(num_generations=K, generation_batch_size=K * GROUPS, max_completion_length=LONGEST)
    for _ in range(250):
        a, data = drawn(rng), make_round(rng)
        batch, _ = make_batch(a, rollout, data if a.beta else data._replace(reference_logps=None), AlgorithmState())
        expected, masked = advantages(a, data)
        found = batch.advantages if batch.advantages.dim() == 2 else batch.advantages.unsqueeze(-1) * data.mask
        assert batch.masked.tolist() == masked.tolist(), a
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5, msg=repr(a))
        seen |= {*a.model_fields_set}
    assert seen >= {*KEYS}
