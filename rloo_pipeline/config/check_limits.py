"""Section `checks`: the checks of policy 0 and their limits."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from rloo_pipeline.config.section import Section

Limit = tuple[float | None, float | None]
FP8 = "fp8"
"""Name of the number format of an engine with quantized weights (`rollout.quantization`)."""
LOGPROB_LIMITS: dict[str, dict[str, Limit]] = {
    "logprob_difference": {"float32": (1e-3, 1e-2), "bfloat16": (0.1, 0.3), "float16": (0.02, 0.1), FP8: (0.35, 0.7)},
    "logprob_difference_q95": {"float32": (1e-3, 1e-2), "bfloat16": (0.4, 1.0), "float16": (0.1, 0.4), FP8: (0.9, 2)},
}
"""Default limits by number format. They lie between rounding and a wrong attention mask.

Measured on random models of 4 to 32 layers against the same model in float32, mean difference in nats: 0.01 to 0.04 in
bfloat16 (0.16 with experts), 0.001 to 0.02 in float16; 0.8 to 2.5 where packed sequences attend to each other, 0.15 to
0.8 where the sliding window is missing. FP8 weights and inputs of linear layers, emulated in PyTorch with each of
vLLM's schemes: 0.03 where weights deviate by 0.02, 0.35 where they deviate by 0.1.
"""


class CheckLimits(Section):
    """Limits of the checks of policy 0: `[warn, fail]`; `null` means never."""

    round_trip: Limit = (1, None)
    """Minimum fraction of prompts whose token ids survive decoding and encoding unchanged."""
    double_bos: Limit = (None, 0)
    """Maximum number of prompts that begin with two BOS tokens."""
    generation_prompt: Limit = (1, None)
    """Minimum fraction of chat prompts that end with the template's generation prompt."""
    stop_ids: Limit = (0, None)
    """Maximum number of disagreements between tokenizer, generation config and chat template on the end token."""
    chat_template: Limit = (0, None)
    """Maximum number of silent faults of the chat template: it leaves out a role of the data, does not read a variable
    of `dataset.chat_template_kwargs`, closes the answer that it opens, and the like.
    """
    pad_token: Limit = (0, None)
    """Limits of a value that is 1 if the PAD token is also an end token, or if the tokenizer has no PAD token and EOS
    takes its place; otherwise 0.
    """
    packed_logprobs: Limit = (1e-4, 1e-3)
    """Maximum difference, in nats, between a token's log-prob in the trainer's packed model and in plain transformers;
    measured on a small copy of the model in float32.
    """
    logprob_difference: Limit | None = None
    """Maximum difference, in nats, between the log-probs of vLLM and the trainer: of any token in float32, of the mean
    over tokens in others. Default: [0.001, 0.01] in float32, [0.1, 0.3] in bfloat16, [0.02, 0.1] in float16, [0.35,
    0.7] with `rollout.quantization`.
    """
    logprob_difference_q95: Limit | None = None
    """Maximum 95th percentile, over tokens, of that difference in nats. Default: [0.001, 0.01] in float32, [0.4, 1] in
    bfloat16, [0.1, 0.4] in float16, [0.9, 2] with `rollout.quantization`.
    """
    perplexity: Limit = (20, None)
    """Maximum perplexity on demonstrations that SFT trains on."""
    perplexity_held_out: Limit = (20, None)
    """Maximum perplexity on held-out demonstrations."""
    overfitting: Limit = (1.5, None)
    """Maximum ratio of held-out perplexity to training perplexity."""
    pair_accuracy: Limit = (0.55, 0.5)
    """Minimum lower end of the 95% interval of the accuracy of the run's reward model: the fraction of held-out pairs
    in which `chosen` gets the higher reward. 0.5 is chance.
    """
    reward_length: Limit = (0.8, None)
    """Maximum absolute correlation of that model's rewards with the lengths of the held-out conversations."""
    scorable: Limit = (0.9, 0.01)
    """Minimum fraction of completions that get a reward."""
    mean_reward: Limit = (None, None)
    """Minimum mean reward."""
    pass_at_1: Limit = (None, None)
    """Minimum pass@1, the probability that a completion is right."""
    pass_at_k: Limit = (0.1, None)
    """Minimum pass@K, the probability that at least one of K completions is right."""
    all_right: Limit = (0.5, None)
    """Maximum fraction of groups in which every completion is right."""
    all_wrong: Limit = (0.8, None)
    """Maximum fraction of groups in which no completion is right."""
    mixed: Limit = (0.2, None)
    """Minimum fraction of groups with both right and wrong completions."""
    wasted: Limit = (0.8, None)
    """Maximum expected fraction of completions in groups that are all right or all wrong."""
    teaching: Limit = (0.2, 0.01)
    """Minimum fraction of groups with at least two different rewards. RLOO learns from these groups only."""
    truncated: Limit = (0.2, None)
    """Maximum fraction of completions that reach the length limit."""
    format_rate: Limit = (0.5, None)
    """Minimum fraction of completions with the format that `checks.format_reward` tests."""
    entropy: Limit = (0.01, None)
    """Minimum mean entropy of a token, in nats."""
    duplicates: Limit = (0.8, None)
    """Maximum fraction of completions that are identical to another completion of the same prompt."""

    def by_name(self, dtype: str) -> dict[str, Limit]:
        """`(warn, fail)` of every check; log-prob limits that are not set get the default of `dtype`."""
        limits = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: LOGPROB_LIMITS[name][dtype] if limit is None else limit for name, limit in limits.items()}


class Checks(Section):
    """Checks of policy 0 before the first round: sampling and scoring on probe prompts, tokens, log-probs."""

    probe_prompts: int = Field(64, ge=1)
    """Number of training prompts that policy 0 answers for the checks."""
    probe_num_generations: int | None = Field(None, ge=2)
    """Completions per probe prompt. Default: `rollout.num_generations`."""
    demonstrations: int = Field(64, ge=1)
    """Demonstrations used to measure perplexity: this many of the training set and this many held-out ones."""
    format_reward: str | None = None
    """Name of a reward (0 or 1) that tests the format. Default: the reward named `format`, if there is one."""
    limits: CheckLimits = CheckLimits()
    """Limits at which each check warns and fails."""
    accept: list[str] = []
    """Names of checks whose failure does not stop the run. checks.json and the report still show it."""

    def _problems(self) -> Iterator[str]:
        for name in self.accept:
            if name not in CheckLimits.model_fields:
                yield f"accept: no check is named '{name}' (there are {', '.join(CheckLimits.model_fields)})"
