"""Keys of `algorithm` in the update stage, which runs as a command on synthetic rounds."""

import json

import pyarrow.parquet as pq
import pytest
import torch
from helpers import Round, mini, succeeded

from rloo_pipeline.artifacts.files import read_artifact
from rloo_pipeline.config.loading import validate

pytestmark = [pytest.mark.slow, pytest.mark.long]

TRL_NAMES = {
    *("reward", "reward_std", "rewards/answer/mean", "rewards/answer/std", "frac_reward_zero_std", "kl", "entropy"),
    *("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "completions/clipped_ratio"),
    *(f"completions/{statistic}_length" for statistic in ("mean", "min", "max")),
    *(f"completions/{statistic}_terminated_length" for statistic in ("mean", "min", "max")),
    *("grad_norm", "learning_rate", "num_tokens", "loss", "step"),
    *(f"sampling/sampling_logp_difference/{statistic}" for statistic in ("mean", "max")),
    *(f"sampling/importance_sampling_ratio/{statistic}" for statistic in ("min", "mean", "max")),
}


def updated(tmp_path, model, rounds=1, **changes) -> Round:
    run = Round(tmp_path / "run", model, **changes)
    for number in range(1, rounds + 1):
        succeeded(run.write(number).update(number))
    return run


def metrics(run: Round, number: int = 1) -> dict:
    return read_artifact(run.run / "rounds" / f"{number:05d}" / "metrics.json")


def table(run: Round, number: int = 1) -> list[dict]:
    return pq.read_table(run.run / "rounds" / f"{number:05d}" / "train.parquet").to_pylist()


def test_metrics_have_trls_names_in_json_and_in_tensorboard(tmp_path, tiny_model) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = updated(tmp_path, tiny_model, rounds=2)
    values = metrics(run, 2)
    assert values.keys() >= TRL_NAMES
    assert all(values[name] is not None for name in TRL_NAMES)
    events = EventAccumulator(str(run.run / "tensorboard")).Reload()
    for name in TRL_NAMES - {"step"}:  # that is the axis
        scalars = events.Scalars(f"train/{name}")
        assert [event.step for event in scalars] == [metrics(run, 1)["step"], values["step"]]
        assert scalars[1].value == pytest.approx(values[name], rel=1e-6)


def test_metrics_are_what_the_tables_say(tmp_path, tiny_model) -> None:
    run = updated(tmp_path, tiny_model, rounds=2)
    rollouts = [row for shard in range(2) for row in pq.read_table(run._table(2, "rollouts", shard)).to_pylist()]
    used, values = table(run, 2), metrics(run, 2)
    lengths = [len(row["completion_ids"]) for row in rollouts]
    assert values["kl"] == pytest.approx(sum(row["kl"] for row in used) / sum(lengths), rel=1e-5)
    assert values["kl/sequence_mean"] == pytest.approx(sum(row["kl"] for row in used) / len(used), rel=1e-5)
    assert values["completions/max_length"] == max(lengths)
    assert values["num_tokens"] > metrics(run, 1)["num_tokens"] > values["num_completion_tokens"]
    assert values["loss"] != 0


def test_beta_is_steered_from_round_to_round(tmp_path, tiny_model) -> None:
    run = updated(tmp_path, tiny_model, rounds=3, algorithm={"beta": 0.05, "kl": {"target": 1e-6}})
    betas, kls = zip(*((metrics(run, n)["beta"], metrics(run, n)["kl/sequence_mean"]) for n in (1, 2, 3)), strict=True)
    expected = [0.05]
    for kl in kls[:2]:
        expected.append(expected[-1] * (1 + 0.1 * max(-0.2, min(0.2, kl / 1e-6 - 1))))
    assert betas == pytest.approx(expected)
    assert betas[1] != betas[0]


def test_running_moments_are_carried_to_the_next_round(tmp_path, tiny_model) -> None:
    run = updated(tmp_path, tiny_model, rounds=2, algorithm={"reward_normalization": "running", "beta": 0})
    moments = json.loads((run.run / "trainer" / "00002" / "carried.json").read_text())["moments"]
    scored = [
        [row["reward"] for shard in range(2) for row in pq.read_table(run._table(n, "scores", shard)).to_pylist()]
        for n in (1, 2)
    ]
    rewards_given = [reward for rewards in scored for reward in rewards if reward is not None]
    assert moments["number"] == len(rewards_given) > len(scored[0])
    assert moments["mean"] == pytest.approx(sum(rewards_given) / len(rewards_given))


def test_an_over_sampled_round_trains_on_the_first_groups_whose_rewards_differ(tmp_path, tiny_model) -> None:
    changes = {"rollout": {"generation_batch_size": 40, "oversample": 1.6}}
    run = updated(tmp_path, tiny_model, algorithm={"filter_zero_variance": True, "steps_per_generation": 1}, **changes)
    scored = [row for shard in range(2) for row in pq.read_table(run._table(1, "scores", shard)).to_pylist()]
    groups = [scored[first : first + 4] for first in range(0, 64, 4)]
    differ = [len({row["reward"] for row in group} - {None}) > 1 for group in groups]
    assert sum(differ) > 10, "else nothing is chosen"
    expected = [group[0]["prompt_id"] for group, good in zip(groups, differ, strict=True) if good][:10]
    assert [row["prompt_id"] for row in table(run)[::4]] == expected
    assert metrics(run)["num_completion_tokens"] > 0


def test_sampler_and_trainer_are_compared_also_where_no_pass_is_spent_on_it(tmp_path, tiny_model) -> None:
    """The synthetic sampler's log-probs differ much from the trainer's; both ways of measuring must show it."""
    one_step = {"steps_per_generation": 1, "beta": 0.0}
    free = metrics(updated(tmp_path / "free", tiny_model, algorithm=one_step))
    passed = metrics(updated(tmp_path / "pass", tiny_model, algorithm={**one_step, "beta": 0.05}))
    compared = [name for name in free if name.startswith("sampling/")]
    assert len(compared) == 11
    compared.remove("sampling/outside_thresholds")
    assert {name: free[name] for name in compared} == pytest.approx({name: passed[name] for name in compared}, rel=1e-4)
    assert free["sampling/sampling_logp_difference/mean"] > 0.1
    assert 0 < free["sampling/effective_sample_size"] < free["sampling/token_effective_sample_size"] < 1


@pytest.mark.parametrize(
    ("needed", "algorithm"),
    [
        (False, {"beta": 0, "steps_per_generation": 1}),
        (False, {"beta": 0.1, "kl": {"placement": "loss"}, "steps_per_generation": 1}),
        (False, {"beta": 0, "mismatch": {"correction": "sequence_tis"}, "steps_per_generation": 1}),
        (False, {"beta": 0, "old_logps": "sampler", "steps_per_generation": 8}),
        (False, {"beta": 0, "clip": "none", "steps_per_generation": 8}),
        (True, {"beta": 0.1, "steps_per_generation": 1}),
        (True, {"beta": 0, "steps_per_generation": 2}),
        (True, {"beta": 0, "num_iterations": 2, "steps_per_generation": 1}),
        (True, {"beta": 0, "clip": "none", "mismatch": {"correction": "sequence_tis"}, "steps_per_generation": 8}),
    ],
)
def test_old_log_probs_are_computed_only_where_something_compares_with_them(needed, algorithm) -> None:
    assert validate(mini(algorithm=algorithm), "test").algorithm.needs_old_pass == needed


def test_two_passes_over_one_batch_are_two_passes(tmp_path, tiny_model) -> None:
    values = metrics(updated(tmp_path, tiny_model, algorithm={"num_iterations": 2, "steps_per_generation": 1}))
    assert values["step"] == 2
    assert values["ratio/mean"] != 1


def test_a_ratio_that_no_step_measured_is_null(tmp_path, tiny_model) -> None:
    """REINFORCE in two steps needs no old log-probs, so the ratio of the second step is unknown."""
    run = updated(tmp_path, tiny_model, algorithm={"clip": "none", "beta": 0, "steps_per_generation": 2})
    assert metrics(run)["ratio/mean"] is None
    assert {row["ratio"] for row in table(run)} == {None}


VARIANTS = {
    "grpo": {"preset": "grpo", "steps_per_generation": 2},
    "dr_grpo": {"preset": "dr_grpo", "steps_per_generation": 2},
    "reinforce_pp": {"preset": "reinforce_pp", "steps_per_generation": 2},
    "token_reward": {"kl": {"placement": "token_reward"}, "importance_sampling_level": "token"},
    "cispo": {"clip": "cispo", "importance_sampling_level": "token", "loss_agg_mode": "token_mean"},
    "dual clip": {"delta": 1.5, "importance_sampling_level": "token"},
    "gspo": {"importance_sampling_level": "sequence_mean", "advantage": "grpo", "beta": 0},
    "sequence_tis": {"mismatch": {"correction": "sequence_tis"}},
    "token_mis": {"mismatch": {"correction": "token_mis", "max": 2, "min": 0.5}, "importance_sampling_level": "token"},
    "sequence_mean_mis": {"mismatch": {"correction": "sequence_mean_mis", "min": 0.7, "max": 1.4}},
    "trl's mask": {"mask_truncated_completions": True, "keep_truncated_in_baseline": True},
    "length": {"response_length": {"overlong_cache": 8, "target": 10}, "reward_normalization": "batch"},
}


@pytest.fixture(scope="module")
def variants(tmp_path_factory, tiny_model) -> dict[str, Round]:
    """A round with each of these settings, and one with the defaults."""
    folder = tmp_path_factory.mktemp("variants")
    runs = {
        name: Round(folder / name, tiny_model, algorithm=algorithm).write(1)
        for name, algorithm in {"defaults": {}, **VARIANTS}.items()
    }
    for run in runs.values():
        succeeded(run.update())
    return runs


@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_makes_another_policy_and_finite_metrics(name, variants) -> None:
    run = variants[name]
    weights, plain = run.weights(), variants["defaults"].weights()
    assert any((weights[key] != plain[key]).any() for key in weights)
    assert all(value is None or abs(value) < 1e9 for value in metrics(run).values())
    assert run.policy(1).joinpath("model.safetensors").exists()


def test_the_weights_of_the_mismatch_are_in_the_metrics_under_trls_names(variants) -> None:
    """The factors by which losses were multiplied: of completions or of tokens, truncated or dropped."""
    ratio = "sampling/importance_sampling_ratio"
    for name, longest in (("sequence_tis", 2), ("token_mis", 2), ("sequence_mean_mis", 1)):
        values = metrics(variants[name])
        assert 0 <= values[f"{ratio}/min"] < values[f"{ratio}/mean"] < values[f"{ratio}/max"] <= longest, name
        assert 0 < values["sampling/outside_thresholds"] < 1, name
    assert metrics(variants["defaults"])["sampling/outside_thresholds"] is None


FILTERED = {"algorithm": {"filter_zero_variance": True, "beta": 0}, "update": {"weight_decay": 0.1}}


def check_left_out(run: Round, message: str) -> None:
    """Round 2, whose rewards are all equal, makes neither of its two steps."""
    before, after = run.weights(1), run.weights(2)
    assert all((after[name] == before[name]).all() for name in before), "no momentum, no weight decay"
    values = metrics(run, 2)
    assert (values["steps_left_out"], values["step"], values["trained_completions"]) == (2, 4, 0)
    assert (values["loss"], values["grad_norm"], values["entropy"], values["frac_reward_zero_std"]) == (
        None,
        None,
        None,
        1,
    )
    assert all(row["masked"] and row["ratio"] is None for row in table(run, 2))
    assert "round 2: skipped 2 of 2 optimizer steps" in message


def test_steps_in_which_everything_is_filtered_are_left_out_and_the_next_ones_go_on(tmp_path, tiny_model) -> None:
    """The first round is left out too, so a trainer state without moments must be resumable."""
    run = Round(tmp_path / "run", tiny_model, **FILTERED)
    for number, reward in ((1, None), (2, 1.0), (3, None)):
        run.write(number, reward)
    first = Round(tmp_path / "first", tiny_model, **FILTERED).write(1, 1.0).write(2)
    for number in (1, 2):
        succeeded(first.update(number))
    outcomes = [succeeded(run.update(number)) for number in (1, 2, 3)]
    check_left_out(run, outcomes[1].stderr)
    third = metrics(run, 3)
    assert (third["step"], third["steps_left_out"]) == (6, 0)
    assert third["learning_rate"] == pytest.approx(0.0003 * (1 - 5 / 8)), (
        "the step number of the round, whichever steps were left out"
    )
    for one, before in ((run, 2), (first, 1)):
        assert any((one.weights(before + 1)[name] != tensor).any() for name, tensor in one.weights(before).items())


def test_several_processes_leave_out_the_same_steps(tmp_path, tiny_model) -> None:
    run = Round(tmp_path / "run", tiny_model, **FILTERED, deepspeed={"processes": 2, "zero_stage": 1})
    for number, reward in ((1, None), (2, 1.0)):
        outcomes = run.write(number, reward).update_by_ranks(number)
        assert [outcome.returncode for outcome in outcomes] == [0, 0], outcomes[0].stderr
    check_left_out(run, outcomes[0].stderr)


OWN_LOSS = """
def sapo(logps, old_logps, advantages, mask):
    temperature = (advantages > 0) * 1.0 + (advantages <= 0) * 1.05
    return -4 / temperature * (temperature * ((logps - old_logps).exp() - 1)).sigmoid() * advantages
"""


def test_two_rounds_with_a_loss_of_the_user_are_those_of_the_same_built_in_loss(tmp_path, tiny_model) -> None:
    (tmp_path / "mine.py").write_text(OWN_LOSS)
    keys = {"preset": "sapo", "steps_per_generation": 4}
    own = {"clip": "ppo", "loss": f"{tmp_path}/mine.py:sapo", "sapo_temperature_neg": 1.05}
    runs = [
        updated(tmp_path / name, tiny_model, rounds=2, algorithm={**keys, **more})
        for name, more in (("built-in", {}), ("own", own))
    ]
    first, second = (metrics(run, 2) for run in runs)
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-5)
    assert first["grad_norm"] > 0


CHOICES = {
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0},
    "kl_cov": {"kl_cov_ratio": 0.2, "kl_cov_coef": 0.5},
    "top_entropy": {"top_entropy_quantile": 0.3},
}


@pytest.mark.parametrize("preset", CHOICES)
def test_two_rounds_choose_the_same_tokens_in_micro_batches_of_any_size_and_on_two_ranks(
    tmp_path, tiny_model, preset
) -> None:
    algorithm = {"preset": preset, "steps_per_generation": 2, **CHOICES[preset]}
    layouts = {"one": {}, "small": {"max_tokens_per_micro_batch": 60}, "ranks": {"processes": 2}}
    runs = {name: Round(tmp_path / name, tiny_model, algorithm=algorithm, deepspeed=layouts[name]) for name in layouts}
    for run in runs.values():
        for number in (1, 2):
            run.write(number)
            for outcome in run.update_by_ranks(number) if run is runs["ranks"] else [run.update(number)]:
                assert outcome.returncode == 0, outcome.stderr
    first = metrics(runs["one"], 2)
    assert first["grad_norm"] > 0
    assert preset != "clip_cov" or first["clip_ratio/high_mean"] > 0.19
    for run in runs.values():
        again = metrics(run, 2)
        assert again["loss"] == pytest.approx(first["loss"], abs=1e-4)
        for name in ("grad_norm", "clip_ratio/high_mean"):
            assert again[name] == pytest.approx(first[name], rel=1e-3)
        assert all(
            torch.allclose(weights, run.weights(2)[name], atol=1e-4) for name, weights in runs["one"].weights(2).items()
        )


@pytest.mark.long
def test_two_rounds_of_dppo_leave_out_the_tokens_that_moved_too_far(tmp_path, tiny_model) -> None:
    """The synthetic sampler's log-probs differ much from the trainer's, so the trust region acts from the start."""
    values = metrics(updated(tmp_path, tiny_model, rounds=2, algorithm={"preset": "dppo", "epsilon": 0.01}), 2)
    assert 0 < values["clip_ratio/region_mean"] < 1
    assert values["grad_norm"] > 0
