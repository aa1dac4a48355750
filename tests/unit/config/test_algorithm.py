"""Contradictory keys of `algorithm` are refused in one sentence that says why and what to do."""

import pytest
from helpers import mini

from rloo_pipeline.before_run import inputs
from rloo_pipeline.config import STAGES, lag
from rloo_pipeline.config.loading import validate
from rloo_pipeline.errors import UserError

NO_KL = {"beta": 0}
KL_IN_REWARD = {"beta": 0.01, "kl": {"placement": "reward"}}
TOKEN = {"importance_sampling_level": "token"}
REFUSED = {
    "delta clips first": ({"delta": 1.1}, {}, ["delta (1.1)", "1.2"]),
    "delta without ppo": ({"delta": 3, "clip": "cispo"}, {}, ["delta: 3.0", "clip: cispo"]),
    "token KL on sequences": ({"kl": {"placement": "token_reward"}}, {}, ["importance_sampling_level: token"]),
    "steering nothing": ({"kl": {"target": 6.0}, "beta": 0}, {}, ["kl.target", "set beta"]),
    "bias of a KL in the reward": ({"kl": {"bias_correction": True}}, {}, ["with kl.placement: reward"]),
    "correcting the sampler with itself": (
        {"old_logps": "sampler", "mismatch": {"correction": "token_tis"}, **TOKEN},
        {},
        ["old_logps: sampler cannot be used with mismatch.correction: token_tis"],
    ),
    "token weights on sequences": ({"mismatch": {"correction": "token_tis"}}, {}, ["sequence_tis"]),
    "dropping without a threshold": (
        {"mismatch": {"correction": "sequence_mis", "max": None}},
        {},
        ["algorithm.mismatch: needs a threshold; set min or max"],
    ),
    "thresholds the wrong way round": (
        {"mismatch": {"correction": "sequence_mis", "min": 3, "max": 2}},
        {},
        ["algorithm.mismatch: min (3) exceeds max (2)"],
    ),
    "a cut distribution against the trainer's": (
        {"mismatch": {"correction": "sequence_tis"}},
        {"rollout": {"top_p": 0.9}},
        ["rollout.top_p: 0.9", "algorithm.mismatch.correction: sequence_tis"],
    ),
    "a cut distribution as the old one": ({"old_logps": "sampler"}, {"rollout": {"min_p": 0.1}}, ["rollout.min_p"]),
    "a cache longer than completions": (
        {"response_length": {"overlong_cache": 100}},
        {},
        ["overlong_cache (100)", "max_completion_length (48)"],
    ),
    "a KL in what GRPO divides by": ({"advantage": "grpo"}, {}, ["advantage: grpo", "kl.placement: loss"]),
    "a KL in the siblings' spread": ({"advantage": "rloo_std"}, {}, ["advantage: rloo_std", "kl.placement: loss"]),
    "a KL in what MaxRL divides by": ({"preset": "maxrl", **KL_IN_REWARD}, {}, ["maxrl", "kl.placement: loss"]),
    "length in what GRPO divides by": (
        {"preset": "grpo", "response_length": {"target": 9}},
        {},
        ["advantage: grpo", "response_length", "filter_zero_variance: true"],
    ),
    "length in the siblings' spread": (
        {"preset": "nemo_rl", "response_length": {"target": 9}, "filter_zero_variance": True},
        {},
        ["advantage: rloo_std", "response_length", "another estimator"],
    ),
    "length in a success": ({"preset": "maxrl", "response_length": {"target": 9}}, {}, ["maxrl", "response_length"]),
    "a standardized success": (
        {"preset": "maxrl", "reward_normalization": "batch"},
        {},
        ["maxrl", "reward_normalization", "leave it out"],
    ),
    "a clipped success": ({"preset": "maxrl", "reward_clip_range": [0, 0.5]}, {}, ["maxrl", "reward_clip_range"]),
    "a range the wrong way round": ({"reward_clip_range": [1, 0]}, {}, ["algorithm.reward_clip_range", "[1, 0]"]),
    "a range without width": ({"reward_clip_range": [0, 0]}, {}, ["algorithm.reward_clip_range", "[0, 0]"]),
    "a lag that steers beta": (
        {"kl": {"target": 6}},
        {"rollout": {"lag": 1}},
        ["rollout.lag: 1", "algorithm.kl.target", "change one of the two"],
    ),
    "a cut that steers beta": (
        {"kl": {"target": 6}},
        {"rollout": {"top_k": 9}},
        ["rollout.top_k: 9", "algorithm.kl.target"],
    ),
    "a token budget that steers beta": ({"kl": {"target": 6}}, {"rollout": {"token_budget": 9}}, ["token_budget: 9"]),
    "a token budget that cuts nothing": ({}, {"rollout": {"token_budget": 48}}, ["(48) cuts no completion of at most"]),
    "a token budget of a round behind": ({}, {"rollout": {"token_budget": 9, "lag": 1}}, ["token_budget", "with lag"]),
    "a token budget of episodes": (
        {},
        {"rollout": {"token_budget": 9, "tools": ["a:b"]}},
        ["rollout: tools cannot be used with token_budget: 9"],
    ),
    "a token budget with strings that it may cut": (
        {},
        {"rollout": {"token_budget": 9, "generation_kwargs": {"stop": ["a"]}}},
        ["token_budget: 9 cannot be used with generation_kwargs"],
    ),
    "thresholds of no correction": (
        {"mismatch": {"max": 5}},
        {},
        ["mismatch: max belongs to a correction", "set correction"],
    ),
    "no upper threshold of no correction": ({"mismatch": {"max": None}}, {}, ["mismatch: max belongs"]),
    "a lower threshold with the sampler's ratio": (
        {"old_logps": "sampler", "mismatch": {"min": 0.5}},
        {"rollout": {"lag": 1}},
        ["mismatch: min belongs"],
    ),
    "a filter before what is clipped": (
        {"filter_zero_variance": True, "reward_clip_range": [-1, 1], "reward_normalization": "running"},
        {},
        ["filter_zero_variance", "reward_clip_range", "reward_normalization: running"],
    ),
    "a gain that turns beta": ({"kl": {"target": 6, "gain": 5}}, {}, ["algorithm.kl.gain", "less than 5"]),
    "a success of two weights": (NO_KL | {"advantage": "maxrl"}, {}, ["maxrl", "format", "weight 0.1"]),
    "a geometric mean with one bound": (
        {"mismatch": {"correction": "sequence_mean_mis", "min": 0.98, "max": None}},
        {},
        ["algorithm.mismatch: completions are dropped", "set min and max"],
    ),
    "a geometric mean with bounds on one side": (
        {"mismatch": {"correction": "sequence_mean_mis", "min": 1.5}},
        {},
        ["algorithm.mismatch: completions are dropped", "0.98 and 1.02"],
    ),
    "a temperature that vLLM raises": ({}, {"rollout": {"temperature": 0.005}}, ["rollout.temperature", "0.01 to 2"]),
    "a temperature that vLLM refuses": ({}, {"rollout": {"temperature": 2.5}}, ["rollout.temperature", "0.01 to 2"]),
    "the same in evaluations": ({}, {"evaluation": {"temperature": 0.005}}, ["evaluation.temperature", "0.01 to 2"]),
    "a lag that nothing corrects": (
        {"mismatch": {"correction": "none"}},
        {"rollout": {"lag": 1}},
        ["rollout.lag: 1", "correction: none", "leave mismatch.correction out"],
    ),
    "a lag without a ratio": (
        {"clip": "none", "old_logps": "sampler"},
        {"rollout": {"lag": 2}},
        ["rollout.lag: 2", "clip: none", "old_logps: trainer"],
    ),
    "quantized rollouts without a ratio": (
        {"clip": "none", "old_logps": "sampler"},
        {"rollout": {"quantization": "fp8_per_block"}, "model": {"dtype": "bfloat16"}},
        ["rollout.quantization: fp8_per_block", "clip: none", "old_logps: trainer"],
    ),
    "quantized rollouts in float32": (
        {},
        {"rollout": {"quantization": "fp8_per_block"}, "model": {"dtype": "float32"}},
        ["rollout.quantization: fp8_per_block", "model.dtype: float32"],
    ),
    "quantized rollouts of a cut distribution": (
        {},
        {"rollout": {"quantization": "fp8_per_block", "top_k": 5}, "model": {"dtype": "bfloat16"}},
        ["rollout.top_k: 5", "algorithm.mismatch.correction: sequence_tis"],
    ),
    "a lag of a cut distribution": ({}, {"rollout": {"lag": 1, "top_k": 5}}, ["rollout.lag: 1", "rollout.top_k"]),
    "a refill without the filter": ({}, {"rollout": {"refill": 2}}, ["rollout.refill: 2", "filter_zero_variance"]),
    "a filter of groups that have a signal": (
        {"preset": "reinforce_pp", "filter_zero_variance": True},
        {},
        ["filter_zero_variance", "advantage: reinforce_pp", "reinforce_pp_baseline"],
    ),
    "a choice among groups that have a signal": (
        {"preset": "reinforce_pp"},
        {"rollout": {"oversample": 1.5}},
        ["rollout.oversample: 1.5", "algorithm.advantage: reinforce_pp", "reinforce_pp_baseline"],
    ),
    "a soft gate of completions": ({"clip": "sapo"}, {}, ["clip: sapo", "importance_sampling_level: token"]),
    "a gate's temperature without the gate": ({"sapo_temperature_pos": 2}, {}, ["sapo_temperature_pos", "clip: ppo"]),
    "a smooth weight of completions": ({"clip": "vespo"}, {}, ["clip: vespo", "importance_sampling_level: token"]),
    "tokens of high covariance in a completion": (
        {"clip": "kl_cov"},
        {},
        ["clip: kl_cov", "importance_sampling_level: token"],
    ),
    "a share of tokens without its clip": ({"clip_cov_ratio": 0.1}, {}, ["clip_cov_ratio works with clip: clip_cov"]),
    "bounds the wrong way around": (
        {"preset": "clip_cov", "clip_cov_lb": 9},
        {},
        ["clip_cov_lb (9)", "clip_cov_ub (5)"],
    ),
    "tokens of high entropy in a completion": (
        {"top_entropy_quantile": 0.2},
        {},
        ["top_entropy_quantile", "importance_sampling_level: token"],
    ),
    "entropies of the sampler": (
        {"preset": "top_entropy", "old_logps": "sampler"},
        {},
        ["old_logps: sampler cannot be used with top_entropy_quantile: 0.2"],
    ),
    "a smooth weight's k without it": ({"vespo_k_neg": 2}, {}, ["vespo_k_neg", "clip: vespo", "clip: ppo"]),
    "two weights of the sampler's policy": (
        {"preset": "vespo", "old_logps": "trainer", "mismatch": {"correction": "token_tis"}},
        {},
        ["clip: vespo cannot be used with mismatch.correction: token_tis"],
    ),
    "a rejection without a weight": (
        {"mismatch": {"reject": {"min": 0.98, "max": 1.02}}},
        {},
        ["mismatch: reject belongs to a correction", "set correction"],
    ),
    "two rejections by one weight": (
        {"mismatch": {"correction": "sequence_mis", "reject": {"by": "sequence", "max": 3}}},
        {},
        ["sequence_mis", "as reject", "leave one out"],
    ),
    "a rejection of tokens of one action": (
        {"mismatch": {"correction": "sequence_tis", "reject": {"by": "token", "max": 3}}},
        {},
        ["mismatch.reject.by: token", "sequence_mean"],
    ),
    "a rejection on one side of 1": (
        {"mismatch": {"correction": "sequence_tis", "reject": {"max": 1.02}}},
        {},
        ["mismatch.reject", "below and above 1"],
    ),
    "a rejection the wrong way round": (
        {"mismatch": {"correction": "sequence_tis", "reject": {"by": "sequence", "min": 3, "max": 2}}},
        {},
        ["mismatch.reject", "min (3) exceeds max (2)"],
    ),
    "a filter of sums with rewards normalized each": (
        {"multi_objective_aggregation": "normalize_then_sum", "filter_zero_variance": True},
        {},
        ["filter_zero_variance", "normalize_then_sum"],
    ),
    "a choice by sums with rewards normalized each": (
        {"preset": "gdpo", "advantage": "rloo"},
        {"rollout": {"oversample": 2}},
        ["rollout.oversample: 2", "normalize_then_sum"],
    ),
    "a spread divided by twice": (
        {"preset": "gdpo", "advantage": "grpo"},
        {},
        ["advantage: grpo", "normalize_then_sum"],
    ),
    "a preset that is none": ({"preset": "grp"}, {}, ["grpo"]),
    "shards over the sampled prompts": ({}, {"rollout": {"oversample": 1.5, "shards": 25}}, ["25", "24 prompts"]),
}


RATES = {
    "a horizon of a constant rate": (
        {"lr_scheduler_type": "constant"},
        ["update: lr_horizon_rounds", "does not decay"],
    ),
    "a floor of a constant rate": (
        {"lr_scheduler_type": "constant", "lr_horizon_rounds": None, "min_lr_ratio": 0.1},
        ["update: min_lr_ratio", "set lr_scheduler_type"],
    ),
    "a moment that forgets nothing": ({"adam_betas": [0.9, 1.0]}, ["update.adam_betas", "less than 1"]),
    "a warm-up to the horizon": ({"warmup_steps": 8}, ["update.warmup_steps (8)", "8 optimizer steps"]),
}
REFUSED |= {name: ({}, {"update": update}, parts) for name, (update, parts) in RATES.items()}
COMPILED = {
    "deepspeed.zero_stage: 3": {"deepspeed": {"zero_stage": 3}},
    "reproducible": {"reproducible": True},
    "model.quantization: nf4": {"model": {"dtype": "bfloat16", "quantization": "nf4"}, "warmstart": {"sft": None}},
}
REFUSED |= {
    f"compiled layers with {key}": (
        {},
        {"update": {"torch_compile": True}, **changes},
        [f"torch_compile cannot be used with {key}"],
    )
    for key, changes in COMPILED.items()
}
REFUSED["a warm-up as long as SFT"] = (
    {},
    {"warmstart": {"sft": {"steps": 10}}},
    ["warmstart.sft", "warmup_steps (10)", "10 steps"],
)


@pytest.mark.parametrize("name", REFUSED)
def test_contradictory_keys_are_refused(name) -> None:
    algorithm, changes, parts = REFUSED[name]
    with pytest.raises(UserError) as caught:
        validate(mini(algorithm=algorithm, **changes), "test.yaml")
    message = str(caught.value)
    assert all(part in message for part in ["test.yaml", *parts]), message
    assert "\n" not in message


LAGGING = {
    "completions": ({}, ("sequence_tis", None, 2)),
    "tokens": (TOKEN, ("token_mis", 0.5, 5)),
    "tokens of a preset": ({"preset": "grpo"}, ("token_mis", 0.5, 5)),
    "a threshold of its own": ({"preset": "dapo", "mismatch": {"max": 3}}, ("token_mis", 0.5, 3)),
    "no ratio": ({"preset": "paper"}, ("sequence_tis", None, 2)),
    "its own": ({"mismatch": {"correction": "sequence_mis"}}, ("sequence_mis", None, 2)),
    "the ratio to the sampler": ({"old_logps": "sampler"}, ("none", None, 2)),
}


@pytest.mark.parametrize("rollout", [{"lag": 1}, {"token_budget": 9}], ids=lambda keys: next(iter(keys)))
@pytest.mark.parametrize("name", LAGGING)
def test_with_older_samples_there_is_a_correction_that_suits_the_actions(name, rollout) -> None:
    algorithm, expected = LAGGING[name]
    config = validate(mini(algorithm=algorithm, rollout=rollout), "test.yaml")
    mismatch = config.algorithm.mismatch
    assert (mismatch.correction, mismatch.min, mismatch.max) == expected
    again = validate(config.model_dump(mode="json"), "config.yaml")
    assert again == config, "as the run's own config.yaml"


FP8 = {"rollout": {"quantization": "fp8_per_tensor"}, "model": {"dtype": "bfloat16"}}


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({}, ("sequence_tis", None, 2)),
        (TOKEN, ("token_tis", None, 2)),
        ({"mismatch": {"correction": "sequence_mis"}}, ("sequence_mis", None, 2)),
    ],
)
def test_samples_of_a_quantized_policy_are_weighted(algorithm, expected) -> None:
    config = validate(mini(algorithm=algorithm, **FP8), "test.yaml")
    mismatch = config.algorithm.mismatch
    assert (mismatch.correction, mismatch.min, mismatch.max) == expected
    assert lag.note(config.rollout, config.algorithm) is None


def test_who_trains_beyond_the_horizon_of_the_learning_rate_is_told() -> None:
    config = validate(mini(rounds=6), "test.yaml")
    assert "so 2 of 6 rounds change nothing" in config.update.note(config.rounds)
    assert any("after round 4 the learning rate is 0" in finding.message for finding in inputs.findings(config))
    assert config.update.note(4) is None
    assert validate(mini(update={"min_lr_ratio": 0.1}), "test.yaml").update.note(6) is None


def test_who_does_not_weight_them_is_told() -> None:
    config = validate(mini(algorithm={"mismatch": {"correction": "none"}}, **FP8), "test.yaml")
    assert "correction: none with rollout.quantization" in lag.note(config.rollout, config.algorithm)
    by_ratio = validate(mini(algorithm={"old_logps": "sampler"}, **FP8), "test.yaml")
    assert lag.note(by_ratio.rollout, by_ratio.algorithm) is None


def test_quantized_rollouts_are_sampled_again_and_evaluations_are_not() -> None:
    plain = validate(mini(model=FP8["model"]), "test.yaml")
    quantized = validate(mini(**FP8), "test.yaml")
    differ = {stage for stage in STAGES if quantized.params(stage) != plain.params(stage)}
    assert differ >= {"rollout", "refill", "probe", "checks", "difficulty", "update"}
    assert not differ & {"evaluate", "evaluate-chosen", "harness", "distance", "warmstart", "score"}


def test_a_lag_decides_the_policy_and_nothing_else() -> None:
    config = validate(mini(rollout={"lag": 2}, algorithm={"old_logps": "sampler"}), "test.yaml")
    assert [config.rollout.policy_of(number) for number in range(1, 7)] == [0, 0, 0, 1, 2, 3]
    plain = validate(mini(algorithm={"old_logps": "sampler"}), "test.yaml")
    assert [plain.rollout.policy_of(number) for number in range(1, 4)] == [0, 1, 2]
    assert all(config.params(stage) == plain.params(stage) for stage in STAGES)


def test_a_token_budget_decides_rollouts_and_updates_and_nothing_else() -> None:
    budget, plain = (
        validate(mini(rollout=keys, algorithm={"old_logps": "sampler"}), "test.yaml")
        for keys in ({"token_budget": 9}, {})
    )
    assert {stage for stage in STAGES if budget.params(stage) != plain.params(stage)} == {"rollout", "update"}


def test_what_does_not_change_verdicts_asks_the_judge_nothing_again() -> None:
    judge = {"function": "a.py:b", "name": "b"}
    config, others = (validate(mini(judge={**judge, **keys}), "test.yaml") for keys in ({}, {"concurrency": 4}))
    assert others.params("judge-pairs") == config.params("judge-pairs") != {}
    other = validate(mini(judge={**judge, "options": {"model": "other"}}), "test.yaml")
    assert other.params("judge-pairs") != config.params("judge-pairs")


@pytest.mark.parametrize(
    ("update", "rate"), [({}, 1e-6), ({"lora": {}}, 1e-5), ({"lora": {"r": 4}, "learning_rate": 3e-6}, 3e-6)]
)
def test_an_adapter_learns_ten_times_as_fast_unless_a_rate_is_set(update, rate) -> None:
    values = mini()
    values["update"] = update
    config = validate(values, "test.yaml")
    assert config.update.learning_rate == rate
    assert validate(config.model_dump(mode="json"), "config.yaml") == config


def test_a_refill_runs_again_where_other_scores_are_equal() -> None:
    plain, clipped = (
        validate(mini(rollout={"refill": 1}, algorithm={"filter_zero_variance": True, **keys}), "test.yaml")
        for keys in ({}, {"reward_clip_range": [0, 1]})
    )
    assert plain.params("refill") != clipped.params("refill")


ONE_REWARD = [{"function": "rloo_pipeline.rewards.answer:exact_answer_reward", "name": "answer"}]


@pytest.mark.parametrize(
    "algorithm",
    [
        {"kl": {"placement": "token_reward"}, "delta": 3, "mismatch": {"correction": "token_tis"}, **TOKEN},
        {"preset": "dapo", "response_length": {"overlong_cache": 9}},
        {"preset": "maxrl", "beta": 0.001},
        {"advantage": "grpo", "kl": {"placement": "token_reward"}, **TOKEN},
        {"advantage": "dr_grpo", "response_length": {"target": 9}},
        {"mismatch": {"correction": "sequence_mean_mis", "min": 0.98, "max": 1.02}},
        {"preset": "grpo", "mismatch": {"correction": "token_mis", "min": 0.5, "max": 5}},
        {"preset": "grpo", "mismatch": {"correction": "token_tis", "reject": {"min": 0.98, "max": 1.02}}},
    ],
)
def test_consistent_keys_are_accepted(algorithm) -> None:
    validate({**mini(), "algorithm": algorithm, "rewards": ONE_REWARD, "evaluation": {"temperature": 0}}, "test.yaml")
