"""From scores to advantages: each key of `algorithm` does what its docstring says, in the order that batch.py gives."""

import json

import pytest
import torch
from torch import tensor

from rloo_pipeline.algorithm import nan_stats, shaping
from rloo_pipeline.artifacts import tables
from rloo_pipeline.config import Algorithm, Rollout
from rloo_pipeline.errors import UserError
from rloo_pipeline.training.batch import AlgorithmState, Batch, RoundTensors, make_batch
from rloo_pipeline.training.selection import ScoresByFunction, scores_of_functions, select

NAN = float("nan")
ROLLOUT = Rollout(num_generations=4, generation_batch_size=8, max_completion_length=4)
SCORES = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def batch_of(scores=SCORES, lengths=(1, 2, 3, 4, 1, 2, 3, 4), truncated=(), kl=None, **keys) -> Batch:
    """The batch of two groups of four; `kl` is log π_old − log π_ref of every token."""
    keys = {"beta": 0.0 if kl is None else 0.5, **keys}
    data = completions(scores, lengths, truncated, kl)
    return make_batch(Algorithm.model_validate(keys), ROLLOUT, data, AlgorithmState())[0]


def completions(scores, lengths, truncated=(), kl=None) -> RoundTensors:
    mask = torch.arange(4) < tensor(lengths).unsqueeze(-1)
    old = torch.where(mask, -1.0, 0.0)
    reference = None if kl is None else torch.where(mask, old - kl, 0.0)
    cut = tensor([row in truncated for row in range(8)])
    return RoundTensors(tensor(scores, dtype=torch.float64), mask, cut, old, reference, old)


def rloo(*rewards: float) -> list[float]:
    others = [(sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    return [r - mean for r, mean in zip(rewards, others, strict=True)]


def test_the_default_is_rloo() -> None:
    assert batch_of().advantages.tolist() == pytest.approx([*rloo(1, 0, 0, 1), 0, 0, 0, 0])


@pytest.mark.parametrize("result", ["rewards.mean(1)", "rewards.mean(1, keepdim=True)", "rewards.tolist()"])
def test_an_estimator_of_ones_own_returns_an_advantage_for_each_completion(tmp_path, result) -> None:
    """Of four groups of four, torch would take one number a group for one a sample."""
    (tmp_path / "mine.py").write_text(f"def estimator(rewards):\n    return {result}\n")
    with pytest.raises(UserError, match=r"mine.py:estimator returned .*\(2, 4\); return a tensor of their shape"):
        batch_of(advantage=f"{tmp_path}/mine.py:estimator")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("rewards - rewards.mean(1, keepdim=True)", "returns NaN for a completion with a reward"),
        ("(rewards - nan_stats.mean(rewards)) / nan_stats.std(nan_stats.siblings(rewards)).squeeze(-1)", "infinite"),
        ("rewards.nanmean(1, keepdim=True)", r"returned \(2, 1\)"),
    ],
)
@pytest.mark.parametrize("mark", ["", "@advantages.estimator\n"])
def test_an_update_refuses_advantages_of_ones_own_that_would_count_as_0_or_as_their_neighbours(
    tmp_path, result, message, mark
) -> None:
    """A completion without a score makes a plain mean NaN, and equal siblings a spread of 0."""
    imports = "from rloo_pipeline.algorithm import advantages, nan_stats\n"
    (tmp_path / "mine.py").write_text(f"{imports}{mark}def mine(rewards):\n    return {result}\n")
    with pytest.raises(UserError, match=message):
        batch_of([1.0, 0.0, 0.0, 0.0, 1.0, NAN, 0.0, 1.0], advantage=f"{tmp_path}/mine.py:mine")


def test_a_mean_of_the_batch_is_refused_also_if_all_groups_are_equal(tmp_path) -> None:
    """The groups differ from each other, so they have advantages. A mean of a group alone would give 0 there."""
    for axis, name in (("", "batch"), ("1, keepdim=True", "group")):
        (tmp_path / f"{name}.py").write_text(f"def mine(rewards):\n    return rewards - rewards.mean({axis})\n")
    for missing in ([1.0, 1.0, NAN, 1.0, 0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, NAN, NAN, NAN, NAN]):
        with pytest.raises(UserError, match="returns NaN for a completion with a reward"):
            batch_of(missing, beta=0.0, advantage=f"{tmp_path}/batch.py:mine")
        assert not batch_of(missing, beta=0.0, advantage=f"{tmp_path}/group.py:mine").advantages.any()


def test_equal_groups_may_have_nan_for_0_divided_by_0(tmp_path) -> None:
    centred = "rewards - rewards.nanmean(1, keepdim=True)"
    (tmp_path / "mine.py").write_text(
        f"def mine(rewards):\n    return ({centred}) / (rewards.amax() - rewards.amin())\n"
    )
    assert not batch_of([1.0] * 8, beta=0.0, advantage=f"{tmp_path}/mine.py:mine").advantages.any()


def test_a_median_of_ones_own_is_the_baseline_of_the_scored_completions(tmp_path) -> None:
    text = "def mine(rewards):\n    return rewards - rewards.nanmedian(1, keepdim=True).values\n"
    (tmp_path / "mine.py").write_text(text)
    batch = batch_of([1.0, 0.25, 0.0, NAN, 1.0, 1.0, 1.0, 1.0], kl=0.0, advantage=f"{tmp_path}/mine.py:mine")
    assert batch.advantages.tolist() == [0.75, 0.0, -0.25, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_the_kl_of_the_sequence_comes_before_the_baseline() -> None:
    batch = batch_of(kl=0.1)
    assert batch.kl.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4] * 2)
    assert batch.advantages.tolist() == pytest.approx([*rloo(0.95, -0.1, -0.15, 0.8), *rloo(0.95, 0.9, 0.85, 0.8)])


def test_the_kl_of_tokens_comes_after_the_baseline_as_a_reward_to_go() -> None:
    keys = {"kl": {"placement": "token_reward"}, "importance_sampling_level": "token", "beta": 0.5}
    batch = make_batch(
        Algorithm.model_validate(keys), ROLLOUT, completions(SCORES, (1, 2, 3, 4) * 2, kl=0.1), AlgorithmState()
    )[0]
    first = rloo(1, 0, 0, 1)
    expected = [[first[0] - 0.05, 0, 0, 0], [first[1] - 0.1, first[1] - 0.05, 0, 0]]
    torch.testing.assert_close(batch.advantages[:2], tensor(expected))


def test_whitening_is_over_tokens_where_tokens_have_advantages() -> None:
    keys = {"kl": {"placement": "token_reward"}, "importance_sampling_level": "token", "advantage": "reinforce_pp"}
    data = completions(SCORES, (1, 2, 3, 4) * 2, kl=0.1)
    advantages = make_batch(Algorithm.model_validate({**keys, "beta": 0.5}), ROLLOUT, data, AlgorithmState())[
        0
    ].advantages
    assert advantages[data.mask].mean().item() == pytest.approx(0, abs=1e-6)
    assert advantages[data.mask].std().item() == pytest.approx(1, rel=1e-3)
    assert (advantages[~data.mask] == 0).all()


def test_a_masked_completion_leaves_the_baseline_and_the_loss() -> None:
    batch = batch_of(truncated={3}, mask_truncated_completions=True)
    assert batch.advantages.tolist() == pytest.approx([*rloo(1, 0, 0), 0, 0, 0, 0, 0])
    assert (batch.masked.nonzero().flatten().tolist(), batch.excluded.nonzero().flatten().tolist()) == ([3], [3])


def test_with_keep_truncated_it_stays_in_the_baseline_with_kl_0() -> None:
    batch = batch_of(truncated={3}, kl=0.1, mask_truncated_completions=True, keep_truncated_in_baseline=True)
    assert batch.kl.tolist() == pytest.approx([0.1, 0.2, 0.3, 0, 0.1, 0.2, 0.3, 0.4])
    assert batch.advantages[:4].tolist() == pytest.approx(rloo(0.95, -0.1, -0.15, 1))
    assert (batch.masked.nonzero().flatten().tolist(), batch.excluded.any().item()) == ([3], False)


def test_groups_of_equal_rewards_are_filtered_before_anything_is_added_to_them() -> None:
    batch = batch_of(kl=0.1, filter_zero_variance=True, response_length={"target": 2})
    assert batch.masked.tolist() == batch.excluded.tolist() == [False] * 4 + [True] * 4
    assert batch.advantages[4:].tolist() == [0, 0, 0, 0]
    assert batch.rewards[4:].isnan().all()


EQUAL = [1.0] * 8
PENALISED = {
    "KL and TRL's normalization": {"kl": 0.1, "beta": 1e-3, "normalize_advantages": True},
    "KL and REINFORCE++'s baseline": {"kl": 0.1, "beta": 1e-3, "advantage": "reinforce_pp_baseline"},
    "KL and REINFORCE++": {"kl": 0.1, "beta": 1e-3, "advantage": "reinforce_pp"},
    "KL of tokens and REINFORCE++": {
        "kl": 0.1,
        "beta": 1e-3,
        "keys": {"placement": "token_reward"},
        "advantage": "reinforce_pp",
        "importance_sampling_level": "token",
    },
    "length and normalized rewards": {
        "response_length": {"target": 2, "target_penalty": 1e-3},
        "reward_normalization": "batch",
    },
    "length and running moments": {
        "response_length": {"target": 2, "target_penalty": 1e-3},
        "reward_normalization": "running",
    },
    "GRPO with its KL in the loss": {"kl": 0.1, "beta": 1e-3, "preset": "grpo"},
    "the siblings' spread with its KL in the loss": {"kl": 0.1, "beta": 1e-3, "preset": "nemo_rl"},
    "MaxRL with a beta of one's own": {"kl": 0.1, "beta": 1e-3, "preset": "maxrl"},
    "DAPO with its length penalty": {"preset": "dapo", "response_length": {"overlong_cache": 2}},
}


@pytest.mark.parametrize("name", PENALISED)
def test_with_equal_scores_a_small_penalty_gives_small_advantages(name) -> None:
    """A β or a penalty of 0.001 on completions of 1 to 4 tokens: nothing may be divided by their spread."""
    keys = dict(PENALISED[name])
    kl, placement = keys.pop("kl", None), keys.pop("keys", None)
    algorithm = Algorithm.model_validate({"beta": 0, **keys} | ({"kl": placement} if placement else {}))
    data = completions(EQUAL, (1, 2, 3, 4) * 2, kl=kl)
    assert make_batch(algorithm, ROLLOUT, data, AlgorithmState())[0].advantages.abs().max() < 0.01


ROUNDED = [0.3, 0.1 + 0.2, 0.3, 0.3, 0.8, 0.8, 0.1 + 0.7, 0.8]


@pytest.mark.parametrize(
    "keys",
    [
        {"normalize_advantages": True, "kl": 0.1, "beta": 1e-3},
        {"advantage": "reinforce_pp_baseline", "kl": 0.1, "beta": 1e-3},
        {"normalize_advantages": True},
        {"normalize_advantages": True, "advantage": "dr_grpo", "reward_normalization": "batch"},
    ],
)
def test_scores_of_a_group_that_differ_by_rounding_are_equal(keys) -> None:
    assert ROUNDED[0] != ROUNDED[1]
    assert ROUNDED[6] != ROUNDED[7]
    batch = batch_of(ROUNDED, **keys)
    assert batch.advantages.abs().max() < 0.01
    if "kl" not in keys:
        assert (batch.advantages == 0).all()


def test_scores_of_a_round_that_differ_by_rounding_are_equal() -> None:
    keys = {"advantage": "reinforce_pp", "kl": 0.1, "beta": 1e-3}
    for more in ({}, {"reward_normalization": "batch"}):
        assert batch_of([0.3] * 4 + [0.1 + 0.2] * 4, **keys, **more).advantages.abs().max() < 0.01
    assert batch_of([0.3] * 4 + [0.31] * 4, **keys).advantages.abs().max() > 0.9


@pytest.mark.parametrize("normalization", ["batch", "running"])
def test_while_all_scores_are_equal_only_the_mean_of_rewards_is_subtracted(normalization) -> None:
    """Also in later rounds, whose running moments have the length penalties of earlier ones."""
    length = {"target": 2, "target_penalty": 1e-3}
    algorithm = Algorithm.model_validate({"reward_normalization": normalization, "response_length": length, "beta": 0})
    state = AlgorithmState()
    for _ in range(3):
        batch, state = make_batch(algorithm, ROLLOUT, completions(EQUAL, (1, 2, 3, 4) * 2), state)
        state = AlgorithmState.from_json(json.loads(json.dumps(state.to_json())))
        assert batch.rewards.tolist() == pytest.approx([0, 5e-4, 0, -5e-4] * 2)
        assert batch.advantages.abs().max() < 0.01
    batch, _ = make_batch(algorithm, ROLLOUT, completions(SCORES, (1, 2, 3, 4) * 2), state)
    assert batch.advantages.abs().max() > 1


CLIPPED = [1.0, 1.2] * 4
"""Standardized they are -0.94 and 0.94."""


@pytest.mark.parametrize(
    "keys",
    [
        {"advantage": "reinforce_pp", "reward_clip_range": (0, 1)},
        {"normalize_advantages": True, "reward_clip_range": (0, 1)},
        {"normalize_advantages": True, "reward_clip_range": (1, 2), "reward_normalization": "batch"},
    ],
)
def test_where_the_clip_makes_scores_equal_a_small_kl_gives_small_advantages(keys) -> None:
    batch = batch_of(CLIPPED, kl=0.1, **{"beta": 1e-3, **keys})
    assert batch.rewards.tolist() == [1.0] * 8
    assert 0 < batch.advantages.abs().max() < 0.01
    without = batch_of(CLIPPED, kl=0.1, **{"beta": 1e-3, **keys, "reward_clip_range": (-9, 9)})
    assert without.advantages.abs().max() > 0.9


def centred_by_the_batch(rewards):
    """A user's estimator without a mark."""
    return rewards - rewards.nanmean()


@pytest.mark.parametrize(("keys", "rollout"), [({"filter_zero_variance": True}, {}), ({}, {"oversample": 2.0})])
def test_where_the_baseline_is_of_the_round_no_group_is_left_out(keys, rollout) -> None:
    algorithm = Algorithm(advantage=f"{__name__}:centred_by_the_batch", beta=0.0, **keys)
    data = completions(SCORES, (1,) * 8)
    with pytest.raises(UserError, match="groups of equal scores a signal too"):
        make_batch(algorithm, ROLLOUT.model_copy(update=rollout), data, AlgorithmState())
    make_batch(Algorithm(beta=0.0, **keys), ROLLOUT.model_copy(update=rollout), data, AlgorithmState())


def test_groups_that_the_clip_makes_equal_do_not_teach() -> None:
    scores = tensor([1.0, 1.2, 1.0, 1.2, 0.0, 1.0, 1.2, 1.2], dtype=torch.float64)
    algorithm = Algorithm.model_validate({"preset": "dapo", "reward_clip_range": (0, 1)})
    selection = select(algorithm, 4, scores, tensor([False] * 8))
    assert selection.teaching.tolist() == [False, True]
    assert selection.masked.tolist() == [True] * 4 + [False] * 4


def test_running_moments_standardize_a_round_of_equal_scores() -> None:
    algorithm = Algorithm(reward_normalization="running", beta=0)
    _, state = make_batch(algorithm, ROLLOUT, completions(SCORES, (1,) * 8), AlgorithmState())
    batch, after = make_batch(algorithm, ROLLOUT, completions(EQUAL, (1,) * 8), state)
    expected = (1 - after.moments.mean) / ((after.moments.squares / 15) ** 0.5 + nan_stats.STD_EPSILON)
    assert batch.rewards.tolist() == pytest.approx([expected] * 8)


@pytest.mark.parametrize("score", [0.5, -1.0, 1.0000001, 2.0])
def test_maxrl_refuses_scores_other_than_0_and_1(score) -> None:
    with pytest.raises(UserError, match=rf"maxrl needs scores of 0 and 1.*such as {score:g}"):
        batch_of(scores=[0.0, 1.0, score, NAN, 1.0, 1.0, 0.0, 1.0], preset="maxrl", beta=0.0)
    batch_of(scores=[0.0, 1.0, NAN, 1.0, 1.0, 1.0, 0.0, 1.0], preset="maxrl", beta=0.0)


def test_an_over_sampled_round_trains_on_groups_that_teach_after_masking() -> None:
    """Of four groups the first differs by truncated completions alone, the second not at all."""
    scores = tensor([0.0, 1.0, 1.0, 1.0] + [1.0] * 4 + [1.0, 0.0, 0.0, 1.0] * 2, dtype=torch.float64)
    truncated = tensor([True] + [False] * 15)
    masking = {"mask_truncated_completions": True}
    for keys, expected in (({}, [0, 2]), (masking, [2, 3]), ({**masking, "keep_truncated_in_baseline": True}, [0, 2])):
        for extra in ({}, {"filter_zero_variance": True}):
            selection = select(Algorithm.model_validate(keys | extra), 4, scores, truncated)
            assert nan_stats.first_teaching(selection.teaching, 2) == expected
            if extra:
                filtered = selection.excluded.view(-1, 4).all(-1).tolist()
                assert filtered == [not teaches for teaches in selection.teaching.tolist()]


def test_a_fully_masked_group_in_the_baseline_does_not_teach() -> None:
    keys = {"mask_truncated_completions": True, "keep_truncated_in_baseline": True}
    selection = select(Algorithm.model_validate(keys), 4, tensor(SCORES, dtype=torch.float64), tensor([True] * 8))
    assert not selection.teaching.any()


def test_rewards_are_shaped_then_standardized_then_clipped() -> None:
    length = {"overlong_cache": 2, "overlong_penalty": 0.5, "target": 2, "target_penalty": 0.1}
    shaped = batch_of(response_length=length).rewards
    assert shaped.tolist() == pytest.approx([1 - 0.05, 0, -0.25 - 0.05, 1 - 0.5 - 0.1, 0.95, 1, 0.7, 0.4])
    scaled = batch_of(response_length=length, reward_normalization="batch").rewards
    torch.testing.assert_close(scaled, (shaped - shaped.mean()) / (shaped.std() + nan_stats.STD_EPSILON))
    clipped = batch_of(response_length=length, reward_normalization="batch", reward_clip_range=[-1, 0.5]).rewards
    torch.testing.assert_close(clipped, scaled.clamp(-1, 0.5))


def test_running_moments_are_those_of_all_rounds_together() -> None:
    algorithm = Algorithm(reward_normalization="running", beta=0)
    rounds = [[1.0, 2.0, NAN, 4.0, 0.0, 0.0, 3.0, 1.0], [9.0, -2.0, 5.0, 4.0, 0.0, NAN, NAN, 1.0]]
    state = AlgorithmState()
    for scores in rounds:
        batch, state = make_batch(algorithm, ROLLOUT, completions(scores, (1,) * 8), state)
        state = AlgorithmState.from_json(json.loads(json.dumps(state.to_json())))
    all_scores = tensor([score for scores in rounds for score in scores if score == score], dtype=torch.float64)
    assert state.moments.number == len(all_scores)
    expected = (tensor(rounds[1], dtype=torch.float64) - all_scores.mean()) / (all_scores.std() + nan_stats.STD_EPSILON)
    torch.testing.assert_close(batch.rewards, expected, equal_nan=True)


def test_the_adapted_beta_replaces_the_configured_one() -> None:
    algorithm = Algorithm.model_validate({"beta": 0.5, "kl": {"target": 1.0}})
    data = completions(SCORES, (1, 2, 3, 4) * 2, kl=0.1)
    batch, _ = make_batch(algorithm, ROLLOUT, data, AlgorithmState(beta=0.25))
    assert batch.beta == 0.25
    assert batch.advantages[:4].tolist() == pytest.approx(rloo(0.975, -0.05, -0.075, 0.9))


def test_an_unscorable_completion_has_advantage_0_and_counts_in_the_denominator() -> None:
    batch = batch_of(scores=[1.0, NAN, 0.0, NAN, NAN, NAN, NAN, 2.0])
    assert batch.advantages.tolist() == [1, 0, -1, 0, 0, 0, 0, 0]
    assert not batch.excluded.any()


def test_the_soft_overlong_penalty_is_that_of_dapo() -> None:
    penalties = shaping.overlong(tensor([100, 900, 950, 1000, 1200, 907]), longest=1000, cache=100)
    assert penalties.tolist() == [0, 0, -0.5, -1, -1, -0.07]


def test_two_rewards_are_standardized_and_a_single_one_is_not() -> None:
    for rewards, expected in (([3.0], [3.0]), ([1.0, 3.0], [-1 / (2**0.5 + 1e-4), 1 / (2**0.5 + 1e-4)])):
        values = tensor(rewards).double()
        assert shaping.Moments().add(values, values).standardize(values).tolist() == pytest.approx(expected)


def test_gdpo_is_whitened_and_tells_apart_groups_whose_sums_are_equal() -> None:
    """In the first group one function differs, in the second two cancel: only GDPO gives the second a signal."""
    values = tensor([[1.0, 0], [0, 0], [1, 0], [0, 0], [1, 0], [0, 1], [1, 0], [0, 1]], dtype=torch.float64)
    data = completions(values.sum(-1).tolist(), (1, 2, 3, 4) * 2)
    data = data._replace(functions=ScoresByFunction(values, tensor([1.0, 0.5]).double()))
    advantages = make_batch(Algorithm(preset="gdpo"), ROLLOUT, data, AlgorithmState())[0].advantages
    one = 0.5 / (1 / 3**0.5 + 1e-4)
    sums = [one, -one, one, -one, *[one - one / 2, one / 2 - one] * 2]
    spread = (sum(value**2 for value in sums) / 7) ** 0.5 + 1e-4
    assert advantages.tolist() == pytest.approx([value / spread for value in sums], rel=1e-6)
    masked = make_batch(
        Algorithm(preset="gdpo", mask_truncated_completions=True),
        ROLLOUT,
        data._replace(truncated=tensor([row in (0, 1) for row in range(8)])),
        AlgorithmState(),
    )[0]
    assert masked.rewards[:2].isnan().all()
    assert masked.rewards[2].item() == pytest.approx(0.5 / (0.5**0.5 + 1e-4)), "of the two completions that are left"


def test_the_scores_of_each_function_come_from_the_table_of_scores() -> None:
    rows = [
        {"prompt_id": "a", "sample": 0, "scores/one": 0.1, "scores/two": None, "reward": 0.1, "error": None},
        {"prompt_id": "a", "sample": 1, "scores/one": 1 / 3, "scores/two": 2.0, "reward": 1 / 3, "error": None},
    ]
    weights = json.dumps({"one": 1.0, "two": 0.0})
    table = tables.build(rows, tables.scores_schema(["one", "two"]), "scores", **{tables.WEIGHTS: weights})
    found = scores_of_functions(table)
    assert found.values[:, 0].tolist() == [0.1, 1 / 3]
    assert found.values[:, 1].isnan().tolist() == [True, False]
    assert found.weights.tolist() == [1, 0]
