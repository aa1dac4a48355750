"""A teacher's log-probs become advantages of tokens, alone or beside those of rewards; what does not fit is refused."""

import random
from pathlib import Path

import pytest
import torch
from helpers import mini

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run import model_inputs
from rloo_pipeline.config import Algorithm, Config, Rollout
from rloo_pipeline.errors import UserError
from rloo_pipeline.training.batch import AlgorithmState, Batch, RoundTensors, make_batch

NAN = float("nan")
TEACHER = {"name_or_path": "teacher"}
KEYS = {"beta": 0, "importance_sampling_level": "token"}
LENGTHS = [1, 3, 4, 2, 4, 1, 2, 3]


def drawn(scores: list[float]) -> RoundTensors:
    """Two groups of four completions, the fourth of which is truncated, with random log-probs."""
    draw = random.Random(0)
    mask = torch.arange(4) < torch.tensor(LENGTHS).unsqueeze(-1)
    old, teacher = (
        torch.where(mask, torch.tensor([[-draw.random() for _ in range(4)] for _ in LENGTHS]), 0.0) for _ in range(2)
    )
    truncated = torch.tensor([row == 3 for row in range(8)])
    return RoundTensors(torch.tensor(scores).double(), mask, truncated, old, None, teacher, old)


def batch_of(completions: RoundTensors, **keys) -> Batch:
    algorithm = Algorithm.model_validate({**KEYS, **keys})
    return make_batch(algorithm, Rollout(num_generations=4, generation_batch_size=8), completions, AlgorithmState())[0]


def by_loops(completions: RoundTensors, of_rewards: list[float], weight: float, discount: float) -> torch.Tensor:
    """A_it = A_i − w Σ_{t' ≥ t} γ^(t' − t) (log π_old − log π_teacher), sum by sum."""
    old, teacher = completions.old_logps.double(), completions.teacher_logps.double()
    advantages = torch.zeros(8, 4, dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        for token in range(length):
            kl = sum(discount ** (t - token) * (old[row, t] - teacher[row, t]) for t in range(token, length))
            advantages[row, token] = of_rewards[row] - weight * kl
    return advantages


@pytest.mark.parametrize("discount", [0.0, 0.9, 1.0])
def test_the_discounted_kl_to_the_teacher_is_taken_from_the_advantage_of_the_rewards(discount) -> None:
    completions = drawn([1, 0, 0, 1, 1, 1, NAN, 1])
    batch = batch_of(completions, teacher={**TEACHER, "weight": 0.5, "discount": discount})
    rloo = [1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3, 0, 0, 0, 0]
    torch.testing.assert_close(batch.advantages, by_loops(completions, rloo, 0.5, discount).float())
    kl = (completions.old_logps - completions.teacher_logps).double().sum(-1)
    torch.testing.assert_close(batch.teacher_kl, kl)


def test_without_any_reward_the_teacher_alone_teaches() -> None:
    completions = drawn([NAN] * 8)
    batch = batch_of(completions, teacher=TEACHER)
    torch.testing.assert_close(batch.advantages, by_loops(completions, [0.0] * 8, 1.0, 0.0).float())


def test_a_normalized_reward_leaves_the_weight_of_the_teacher_as_it_is() -> None:
    completions = drawn([1, 0, 0, 1, 1, 1, 1, 1])
    scaled = batch_of(completions, teacher=TEACHER, normalize_advantages=True).advantages
    alone = batch_of(completions._replace(scores=torch.full((8,), NAN).double()), teacher=TEACHER).advantages
    of_rewards = (scaled - alone)[:, 0]
    assert of_rewards.mean().item() == pytest.approx(0, abs=1e-6)
    assert of_rewards.std().item() == pytest.approx(1, rel=1e-3)


def test_a_masked_completion_has_no_kl_to_the_teacher() -> None:
    batch = batch_of(drawn([NAN] * 8), teacher=TEACHER, mask_truncated_completions=True)
    assert batch.teacher_kl[3] == 0
    assert batch.masked.tolist() == [row == 3 for row in range(8)]


REFUSED = {
    "teacher needs tokens as actions": {"importance_sampling_level": "sequence"},
    "filter_zero_variance cannot be used with teacher": {"filter_zero_variance": True},
    "rollout.oversample: 2": {"rollout": {"oversample": 2}},
    "rollout.top_p": {"rollout": {"top_p": 0.9}},
    "exactly one of name_or_path and build": {"teacher": {"build": "a:b", **TEACHER}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_teacher_is_refused_with_keys_that_it_cannot_be_used_with(message) -> None:
    changes = dict(REFUSED[message])
    rollout = changes.pop("rollout", {})
    algorithm = {**KEYS, "teacher": TEACHER, **changes}
    with pytest.raises(ValueError, match=message):
        Config.model_validate(mini(algorithm=algorithm, rollout=rollout))


def test_without_a_teacher_some_reward_needs_a_weight() -> None:
    monitors = [{**reward, "weight": 0} for reward in mini()["rewards"]]
    Config.model_validate(mini(rewards=monitors, algorithm={**KEYS, "teacher": TEACHER}))
    with pytest.raises(ValueError, match="all have weight 0"):
        Config.model_validate(mini(rewards=monitors))


def test_a_teacher_with_other_token_ids_is_refused(tiny_model, tmp_path) -> None:
    from rloo_pipeline.demo.character_model import tiny_qwen3, tool_qwen3

    def check(folder: Path) -> None:
        config = Config.model_validate(mini(algorithm={**KEYS, "teacher": {"name_or_path": str(folder)}}))
        model_inputs.check_teacher(config.teachers[""], Policy(folder), Policy(tiny_model))

    tiny_qwen3(tmp_path / "same", 1, hidden_size=32)
    check(tmp_path / "same")
    tool_qwen3(tmp_path / "more", 1, hidden_size=32)
    check(tmp_path / "more")
    config = Config.model_validate(mini(algorithm={**KEYS, "teacher": {"name_or_path": str(tiny_model)}}))
    with pytest.raises(UserError, match="13 of 37 tokens have a different id or none"):
        model_inputs.check_teacher(config.teachers[""], Policy(tiny_model), Policy(tmp_path / "more"))


def test_a_teacher_with_fewer_tokens_than_top_k_is_refused(tiny_model) -> None:
    teacher = Policy(tiny_model)
    config = Config.model_validate(mini(algorithm={**KEYS, "teacher": {**TEACHER, "top_k": teacher.vocabulary + 1}}))
    with pytest.raises(UserError, match=r"top_k \(\d+\) exceeds the \d+ tokens of .*; lower it"):
        model_inputs.check_teacher(config.teachers[""], teacher, teacher)


def test_a_teacher_whose_heads_processes_cannot_share_is_refused_before_the_run(tiny_model) -> None:
    teacher, parts = Policy(tiny_model), {"processes": 3, "sequence_parallel": 3}
    config = Config.model_validate(mini(algorithm={**KEYS, "teacher": TEACHER}, deepspeed=parts))
    with pytest.raises(UserError, match=r"config\.json: 2 attention heads cannot be divided among the 3 processes"):
        model_inputs.check_teacher(config.teachers[""], teacher, teacher)
