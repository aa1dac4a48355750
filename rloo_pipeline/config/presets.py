"""Presets: named values for the section `algorithm`, used for the keys that the user leaves out.

The name of a system stands for that system's RLOO; docs/algorithms.md has the sources and the remaining differences. A
preset sets every key that defines its algorithm, so that a new default of this package does not change it.
`steps_per_generation` belongs to the batch and is in no preset.
"""

from collections.abc import Mapping
from typing import Any

from rloo_pipeline.config.section import merge
from rloo_pipeline.errors import did_you_mean

Values = Mapping[str, Any]

_PLAIN: Values = {
    "normalize_advantages": False,
    "reward_normalization": "none",
    "reward_clip_range": None,
    "old_logps": "trainer",
    "clip": "ppo",
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "mask_truncated_completions": False,
    "keep_truncated_in_baseline": False,
    "filter_zero_variance": False,
    "mismatch": {"correction": "none"},
    "num_iterations": 1,
}
"""Shared by most presets: PPO's clip at 0.2, one pass over the completions, all options off."""
_COMPLETIONS: Values = {**_PLAIN, "importance_sampling_level": "sequence", "loss_agg_mode": "sequence"}
"""Each completion is one action."""
_TOKENS: Values = {**_PLAIN, "importance_sampling_level": "token", "loss_agg_mode": "token_mean"}
"""Each token is an action, and all tokens of a step have the same weight."""


def _kl(beta: float, placement: str, estimator: str) -> Values:
    """Coefficient, placement and estimator of the KL penalty."""
    return {"beta": beta, "kl": {"placement": placement, "estimator": estimator, "bias_correction": False}}


_NO_KL = _kl(0.0, "loss", "k3")
"""No KL. If the user sets beta, the KL goes into the loss with GRPO's k3; there no estimator divides by it."""


def _preset(base: Values, advantage: str, kl: Values = _NO_KL, **others: Any) -> Values:
    return {**base, **kl, "advantage": advantage, **others}


PRESETS: Mapping[str, Values] = {
    # arXiv 2402.14740, sections 2.2 and 2.3; beta is that of its Anthropic-HH runs (appendix C)
    "paper": _preset(_COMPLETIONS, "rloo", _kl(0.1, "reward", "k1"), clip="none"),
    # TRL 1.16.0, trainer/rloo_trainer.py and rloo_config.py
    "trl": _preset(_COMPLETIONS, "rloo", _kl(0.05, "reward", "k1"), keep_truncated_in_baseline=True),
    # OpenRLHF 0.11.2, trainer/ppo_utils/experience_maker.py and cli/train_ppo_ray.py
    "openrlhf": _preset(_TOKENS, "rloo", _kl(0.01, "token_reward", "k1")),
    # verl 0.9.1, trainer/ppo/core_algos.py and trainer/config/
    "verl": _preset(_TOKENS, "rloo", delta=3.0),
    # NeMo-RL, algorithms/advantage_estimator.py and examples/configs/grpo_math_1B.yaml
    "nemo_rl": _preset(_TOKENS, "rloo_std", _kl(0.01, "loss", "k3")),
    # SkyRL 0.4.0, train/config/config.py and backends/skyrl_train/utils/ppo_utils.py
    "skyrl": _preset(_TOKENS, "rloo", _kl(0.001, "loss", "k3")),
    # Tunix 0.1.7, rl/algo_core.py and rl/grpo/grpo_learner.py
    "tunix": _preset(_TOKENS, "rloo", _kl(0.04, "loss", "k1"), loss_agg_mode="sequence_mean_token_mean"),
    # the defaults of this package
    "rloo": {},
    # arXiv 2402.03300, equations 3 and 4, section 4.2; epsilon is PPO's
    "grpo": _preset(_TOKENS, "grpo", _kl(0.04, "loss", "k3"), loss_agg_mode="sequence_mean_token_mean"),
    # arXiv 2503.20783, section 3.2 and table 6
    "dr_grpo": _preset(_TOKENS, "dr_grpo", loss_agg_mode="sequence_mean_token_sum_norm"),
    # arXiv 2501.03262v9, section 3.1; beta and epsilon of v1, table 1; aggregation of OpenRLHF 0.11.2
    "reinforce_pp": _preset(_TOKENS, "reinforce_pp", _kl(0.01, "token_reward", "k1")),
    # arXiv 2501.03262v9, section 3.2; beta of OpenRLHF's train_reinforce_baseline_hybrid_engine.sh
    "reinforce_pp_baseline": _preset(_TOKENS, "reinforce_pp_baseline", _kl(1e-5, "loss", "k2")),
    # arXiv 2503.14476, equations 8 to 11; add response_length.overlong_cache, which depends on the longest completion
    "dapo": _preset(_TOKENS, "grpo", epsilon_high=0.28, filter_zero_variance=True),
    # arXiv 2507.18071, equations 5 to 7, section 5.1
    "gspo": _preset(_COMPLETIONS, "grpo", importance_sampling_level="sequence_mean", epsilon=3e-4, epsilon_high=4e-4),
    # arXiv 2506.13585, equations 4 and 5; the bound of 5 is ScaleRL's (arXiv 2510.13786) as TRL and SkyRL give it
    "cispo": _preset(_TOKENS, "grpo", clip="cispo", epsilon_high=4.0, filter_zero_variance=True),
    # arXiv 2511.20347; temperatures and aggregation of TRL 1.16.0, grpo_config.py
    "sapo": _preset(
        _TOKENS,
        "grpo",
        clip="sapo",
        loss_agg_mode="sequence_mean_token_mean",
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
    ),
    # arXiv 2602.04879, Binary-TV, as verl's dppo_tv; the trust region is around the sampler's policy
    "dppo": _preset(_TOKENS, "grpo", clip="dppo_tv", epsilon=0.15, old_logps="sampler"),
    # arXiv 2602.10693; k and lambda of TRL 1.16.0, grpo_config.py; w is the ratio to the policy that sampled
    "vespo": _preset(
        _TOKENS,
        "grpo",
        clip="vespo",
        old_logps="sampler",
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
    ),
    # arXiv 2505.22617; shares and bounds of verl 0.9.1, trainer/ppo/core_algos.py
    "clip_cov": _preset(_TOKENS, "grpo", clip="clip_cov", clip_cov_ratio=2e-4, clip_cov_lb=1.0, clip_cov_ub=5.0),
    "kl_cov": _preset(_TOKENS, "grpo", clip="kl_cov", kl_cov_ratio=2e-4, kl_cov_coef=1.0),
    # arXiv 2506.01939, on DAPO's loss; TRL 1.16.0, grpo_config.py
    "top_entropy": _preset(_TOKENS, "grpo", epsilon_high=0.28, top_entropy_quantile=0.2),
    # arXiv 2601.05242; TRL 1.16.0, multi_objective_aggregation: normalize_then_sum
    "gdpo": _preset(_TOKENS, "reinforce_pp", multi_objective_aggregation="normalize_then_sum"),
    # arXiv 2602.02710, algorithm 1; the loss of its authors' repository, tajwarfahim/maxrl
    "maxrl": _preset(_TOKENS, "maxrl"),
}


def fill(values: Values) -> dict[str, Any]:
    """Fills missing keys of `algorithm` from the preset that the user names; nested sections are merged key by key.

    Raises:
        ValueError: the preset does not exist.
    """
    name = values.get("preset")
    if name is None:
        return dict(values)
    if not isinstance(name, str) or name not in PRESETS:
        suggestion = did_you_mean(str(name), PRESETS) or f"; there are {', '.join(PRESETS)}"
        raise ValueError(f"no preset '{name}'{suggestion}")
    return merge(PRESETS[name], values)
