"""Options of TRL's trainers, and the same options here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One setting of both sides."""

    name: str
    other_algorithms: Sequence[Options]
    """Options of this package that change the algorithm: with each of them the two sides must differ."""
    common_options: Options = field(default_factory=dict)
    """Options that have one name and meaning on both sides."""
    trl_options: Options = field(default_factory=dict)
    our_options: Options = field(default_factory=dict)
    samples: int = 4
    functions: int = 1
    unknown: Sequence[tuple[int, int]] = ()
    """Pairs of a reward function and a completion to which it gives None."""
    sampler: bool = False
    """Whether log-probs of the sampler are known."""


KEPT = {"keep_truncated_in_baseline": True}
MASKED = {"mask_truncated_completions": True}
NOT_KEPT = (
    {"keep_truncated_in_baseline": False},
    {"keep_truncated_in_baseline": False, "mask_truncated_completions": False},
)
GAPS = {"functions": 2, "unknown": [(0, 2), (0, 6), (1, 6), (1, 9)]}
"""Completion 6 has no reward at all, 2 and 9 have one of two."""
LONE = {"unknown": [(0, 4), (0, 5), (0, 7)]}
"""Completion 6 is the only one of its group with a reward."""

RLOO = [
    Case(
        "the defaults",
        [
            {"beta": 0.0},
            {"kl": {"estimator": "k3"}},
            {"kl": {"placement": "token_reward"}, "importance_sampling_level": "token"},
            {"importance_sampling_level": "token"},
            {"importance_sampling_level": "sequence_mean"},
            {"clip": "none"},
            {"advantage": "dr_grpo"},
        ],
    ),
    Case("no KL", [{"beta": 0.05}], {"beta": 0.0}),
    Case("much KL", [{"kl": {"placement": "loss"}}], {"beta": 0.5}),
    Case("normalized advantages", [{"normalize_advantages": False}], {"normalize_advantages": True}),
    Case("clipped rewards", [{"reward_clip_range": None}], {"reward_clip_range": (-0.5, 0.5)}),
    Case("another upper bound", [{"epsilon_high": None}], {"epsilon": 0.1, "epsilon_high": 0.6}),
    Case("truncated ones masked", NOT_KEPT, MASKED, our_options=KEPT),
    Case("truncated ones masked and normalized", NOT_KEPT, MASKED | {"normalize_advantages": True}, our_options=KEPT),
    Case("temperature", [{"temperature": 1.0}], {"temperature": 0.7}),
    Case("two samples", [{"advantage": "dr_grpo"}], samples=2),
    Case(
        "two rewards with gaps",
        [{"advantage": "dr_grpo"}, {"reward_weights": (1.0, 1.0)}],
        {"reward_weights": [1.0, -0.4]},
        **GAPS,
    ),
    Case("a lone reward in a group", [{"advantage": "reinforce_pp"}], **LONE),
    Case(
        "a lone reward in a group and normalized",
        [{"advantage": "reinforce_pp"}],
        {"normalize_advantages": True},
        **LONE,
    ),
    Case("the preset", [{"preset": "verl"}, {"preset": "rloo"}], MASKED, our_options={"preset": "trl"}),
    Case("a round in two steps", [{"importance_sampling_level": "token"}], trl_options={"steps_per_generation": 2}),
    Case("a step in two micro-batches", [{"clip": "none"}], trl_options={"gradient_accumulation_steps": 2}),
]

GROUP = {"advantage": "grpo", "beta": 0.0, "importance_sampling_level": "token"}
MEANS = GROUP | {"loss_agg_mode": "sequence_mean_token_mean"}
TOKENS = GROUP | {"loss_agg_mode": "token_mean"}
SUMS = GROUP | {"loss_agg_mode": "sequence_mean_token_sum_norm"}

GSPO = {"importance_sampling_level": "sequence", "epsilon": 0.02}
OUR_GSPO = {"importance_sampling_level": "sequence_mean", "epsilon": 0.02}
K3 = {"kl": {"placement": "loss", "estimator": "k3"}}
K3_TIMES_RATIO = {"kl": {"placement": "loss", "estimator": "k3", "bias_correction": True}}
PLAIN_KL = {"use_bias_correction_kl": False}


def sampled(name: str, mode: str, correction: str, low: float | None, high: float | None, **more: Options) -> Case:
    """A case of sampler against trainer; with other thresholds it must come out differently."""
    wide = {"correction": correction, "min": None, "max": 1e9}
    return Case(
        name,
        [{"mismatch": {"correction": "none", "min": None, "max": 2.0}}, {"mismatch": wide}],
        more.get("both", {}),
        {"loss_type": "bnpo"}
        | {"vllm_importance_sampling_mode": mode}
        | {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}
        | more.get("theirs", {}),
        TOKENS | {"mismatch": {"correction": correction, "min": low, "max": high}} | more.get("ours", {}),
        sampler=True,
    )


GRPO = [
    Case("grpo", [TOKENS, {"clip": "none"}], {}, {"loss_type": "grpo"}, MEANS),
    Case("bnpo", [MEANS, {"importance_sampling_level": "sequence_mean"}], {}, {"loss_type": "bnpo"}, TOKENS),
    Case("dapo", [{"epsilon_high": None}], {"epsilon_high": 0.28}, {"loss_type": "dapo"}, TOKENS),
    Case(
        "dapo in two micro-batches",
        [MEANS],
        {},
        {"loss_type": "dapo", "gradient_accumulation_steps": 2},
        TOKENS,
    ),
    Case(
        "dr_grpo",
        [{"loss_agg_mode": "sequence_mean_token_sum"}, {"advantage": "grpo"}],
        {},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        SUMS | {"advantage": "dr_grpo"},
    ),
    Case(
        "cispo",
        [{"epsilon_high": 5.0}, {"clip": "ppo"}],
        {},
        {"loss_type": "cispo", "epsilon_high": 1.1},
        TOKENS | {"clip": "cispo", "epsilon_high": 0.1},
    ),
    Case(
        "cispo of sequences with KL",
        [{"epsilon_high": 5.0}],
        {"beta": 0.5},
        PLAIN_KL | GSPO | {"loss_type": "cispo", "epsilon_high": 1.01},
        TOKENS | OUR_GSPO | K3 | {"clip": "cispo", "epsilon": 0.2, "epsilon_high": 0.01},  # 0.2: as if left out
    ),
    Case(
        "luspo",
        [{"loss_agg_mode": "sequence"}],
        {},
        GSPO | {"loss_type": "luspo"},
        GROUP | OUR_GSPO | {"loss_agg_mode": "sequence_mean_token_sum"},
    ),
    Case("gspo", [{"importance_sampling_level": "token"}], {}, GSPO | {"loss_type": "grpo"}, MEANS | OUR_GSPO),
    Case("gspo over tokens", [{"loss_agg_mode": "sequence"}], {}, GSPO | {"loss_type": "bnpo"}, TOKENS | OUR_GSPO),
    Case(
        "rewards as they are",
        [{"advantage": "rloo"}, {"advantage": "grpo"}],
        {},
        {"loss_type": "grpo", "scale_rewards": "none"},
        MEANS | {"advantage": "dr_grpo"},
    ),
    Case(
        "rewards scaled by the batch",
        [{"reward_normalization": "none"}, {"advantage": "grpo"}],
        {},
        {"loss_type": "grpo", "scale_rewards": "batch"},
        MEANS | {"advantage": "dr_grpo", "reward_normalization": "batch"},
    ),
    Case(
        "KL in the loss",
        [{"beta": 0.0}, K3_TIMES_RATIO],
        {"beta": 0.04},
        PLAIN_KL | {"loss_type": "grpo"},
        MEANS | K3,
    ),
    Case(
        "KL times the ratio",
        [K3 | {"kl": {"bias_correction": False}}],
        {"beta": 0.04},
        {"loss_type": "bnpo"},
        TOKENS | K3_TIMES_RATIO,
    ),
    Case(
        "KL times the ratio of sequences",
        [{"kl": {"bias_correction": False}}],
        {"beta": 0.5},
        GSPO | {"loss_type": "grpo"},
        MEANS | OUR_GSPO | K3_TIMES_RATIO,
    ),
    Case(
        "KL of completions without a reward",
        [{"beta": 0.0}],
        {"beta": 0.5},
        PLAIN_KL | {"loss_type": "grpo"},
        MEANS | K3,
        unknown=[(0, 1), (0, 4), (0, 5), (0, 7)],
    ),
    Case("dual clip", [{"delta": None}], {"epsilon": 0.05, "delta": 1.06}, {"loss_type": "grpo"}, MEANS),
    Case("truncated ones masked in grpo", NOT_KEPT, MASKED, {"loss_type": "grpo"}, MEANS | KEPT),
    Case("truncated ones masked in bnpo", NOT_KEPT, MASKED, {"loss_type": "bnpo"}, TOKENS | KEPT),
    Case("truncated ones masked in gspo", NOT_KEPT, MASKED, GSPO | {"loss_type": "bnpo"}, TOKENS | OUR_GSPO | KEPT),
    Case(
        "truncated ones masked in dr_grpo with KL",
        NOT_KEPT,
        MASKED | {"beta": 0.04},
        PLAIN_KL | {"loss_type": "dr_grpo"},
        SUMS | KEPT | K3,
    ),
    Case("temperature", [{"temperature": 1.0}], {"temperature": 0.7}, {"loss_type": "grpo"}, MEANS),
    Case("two samples", [{"advantage": "rloo"}], {}, {"loss_type": "grpo"}, MEANS, samples=2),
    Case(
        "two rewards with gaps",
        [{"advantage": "dr_grpo"}, {"reward_weights": (1.0, 1.0)}],
        {"reward_weights": [1.0, -0.4]},
        {"loss_type": "grpo"},
        MEANS,
        **GAPS,
    ),
    Case("a lone reward in a group", [{"advantage": "reinforce_pp"}], {}, {"loss_type": "grpo"}, MEANS, **LONE),
    Case(
        "a round in two steps",
        [{"importance_sampling_level": "sequence_mean"}],
        {},
        {"loss_type": "grpo", "steps_per_generation": 2},
        MEANS,
    ),
    sampled("weights of tokens truncated", "token_truncate", "token_tis", None, 1.2),
    sampled("weights of tokens truncated on both sides", "token_truncate", "token_tis", 0.8, 1.2),
    sampled("tokens dropped", "token_mask", "token_mis", 0.8, 1.3),
    sampled("weights of sequences truncated on both sides", "sequence_truncate", "sequence_tis", 0.8, 1.2),
    sampled("sequences dropped", "sequence_mask", "sequence_mis", None, 1.3),
    sampled("sequences dropped on both sides", "sequence_mask", "sequence_mis", 0.8, 1.5),
    sampled(
        "weights that leave the KL alone",
        *("sequence_truncate", "sequence_tis", None, 1.2),
        common_options={"beta": 0.5},
        trl_options=PLAIN_KL,
        our_options=K3,
    ),
    sampled(
        "weights of tokens on ratios of sequences",
        *("token_truncate", "token_tis", 0.8, 1.2),
        trl_options=GSPO,
        our_options=OUR_GSPO,
    ),
    sampled(
        "weights of sequences on ratios of sequences",
        *("sequence_mask", "sequence_mis", 0.8, 1.5),
        trl_options=GSPO,
        our_options=OUR_GSPO,
    ),
    sampled(
        "weights under cispo",
        *("token_truncate", "token_tis", None, 1.2),
        trl_options={"loss_type": "cispo", "epsilon_high": 1.1},
        our_options={"clip": "cispo", "epsilon_high": 0.1},
    ),
    sampled(
        "weights and truncated ones masked",
        *("sequence_mask", "sequence_mis", 0.8, 1.5),
        common_options=MASKED,
        our_options=KEPT,
    ),
]
