"""Checks across the sections of a run's configuration."""

from collections.abc import Iterator

from rloo_pipeline.config import distillation, lag, rewards
from rloo_pipeline.config.algorithm import estimators
from rloo_pipeline.config.run_keys import RunKeys

ENVIRONMENT_REWARD = "rloo_pipeline.rewards.from_environment:environment_reward"
"""The reward function that returns the reward which the environment gave an episode."""


def problems(config: RunKeys) -> Iterator[str]:
    """A sentence for each pair of keys in different sections that conflict, and for each key that needs another."""
    yield from _reward_names(config)
    yield from _counts(config)
    yield from _exchange(config)
    yield from _selection(config)
    yield from lag.problems(config.rollout, config.algorithm)
    yield from _generation(config)
    yield from _algorithm(config)
    yield from distillation.problems(config.algorithm.teacher, config.rollout, config.rewards)
    yield from rewards.problems(config.reward_model, config.rewards, config.deepspeed)
    yield from _optimizers(config)
    yield from _torch_compile(config)
    yield from _offload(config)
    yield from _images(config)
    yield from _quantization(config)
    if config.vllm.decode_context_parallel_size > 1 and config.rollout.router_replay:
        yield "vllm.decode_context_parallel_size cannot be used with rollout.router_replay; leave one of the two out"
    if config.vllm.data_parallel_size > 1 and config.rollout.uses_tools:
        yield "vllm.data_parallel_size cannot be used with tools or an environment; set 1, and raise rollout.shards"


def _reward_names(config: RunKeys) -> Iterator[str]:
    columns = [reward.column for reward in config.rewards]
    if "reward" in columns:
        yield "rewards: 'reward' is the weighted sum; set another `name` for that function"
    if len(set(columns)) < len(columns):
        yield f"rewards: two functions share a name ({', '.join(columns)}); set a `name` for one"
    monitors = config.gates.of("reward_hacking").limits()["monitors"]
    for key, name in [
        ("correct.reward", config.correct.reward),
        ("checks.format_reward", config.checks.format_reward),
        *(("gates.reward_hacking.monitors", name) for name in monitors or ()),
    ]:
        if name is not None and name not in columns:
            yield f"{key}: no reward is named '{name}' (there are {', '.join(columns)})"
    given = next((reward.column for reward in config.rewards if reward.function == ENVIRONMENT_REWARD), None)
    if given is not None and config.rollout.environment is None:
        yield f"rewards: {given} needs an environment; set rollout.environment"


def _counts(config: RunKeys) -> Iterator[str]:
    steps, every = config.algorithm.steps_per_generation, config.evaluation.every
    cache = config.algorithm.response_length.overlong_cache
    horizon = (config.update.lr_horizon_rounds or 0) * config.algorithm.num_iterations * steps
    if horizon and config.update.warmup_steps >= horizon:
        yield (
            f"update.warmup_steps ({config.update.warmup_steps}) leaves none of the {horizon} optimizer steps of "
            "update.lr_horizon_rounds after it; set fewer, or more rounds"
        )
    if config.rollout.num_prompts % steps:
        yield (
            f"algorithm.steps_per_generation ({steps}) does not divide the {config.rollout.num_prompts} prompts of a "
            "round"
        )
    if every is not None and every % config.keep_every:
        yield (
            f"evaluation.every ({every}) is not a multiple of keep_every ({config.keep_every}), so some of these "
            "policies are not kept; change one of the two"
        )
    if cache is not None and cache > config.rollout.max_completion_length:
        yield (
            f"algorithm.response_length.overlong_cache ({cache}) exceeds rollout.max_completion_length "
            f"({config.rollout.max_completion_length})"
        )


def _exchange(config: RunKeys) -> Iterator[str]:
    if config.exchange != "shared" and config.update.lora is not None:
        yield "exchange: adapters (update.lora) are small, so they go into the run's folder; leave it out"
    if config.exchange != "shared" and config.keep_every == 1:
        yield "exchange: with keep_every: 1 each policy is kept, in the run's folder; set keep_every, or leave it out"


def _selection(config: RunKeys) -> Iterator[str]:
    """Problems of selecting a policy (`select`) and of selecting prompts (`dataset.select`)."""
    if config.select is not None and config.dataset.dev is None:
        yield f"select: {config.select.by} needs rows to choose by, which none trains on; set dataset.dev"
    if config.select is not None:
        yield from config.select.problems_with(config.evaluation)
    if config.dataset.select is not None and config.correct.reward is None:
        names = ", ".join(reward.column for reward in config.rewards)
        yield (
            "dataset.select: a pass rate needs a definition of a right completion; set correct.reward to the "
            f"reward that decides ({names}), and correct.threshold to the value from which on it is right"
        )


def _generation(config: RunKeys) -> Iterator[str]:
    """A sentence for each key that cannot be used together with `rollout.generation_kwargs`."""
    rollout, algorithm = config.rollout, config.algorithm
    kwargs = rollout.generation_kwargs
    if kwargs is None:
        return
    if rollout.uses_tools and kwargs.for_vllm:
        yield (
            "rollout.generation_kwargs cannot be used with tools or an environment, whose turns end and continue as "
            "the chat template says; leave one of the two out"
        )
    for section in ("rollout", "evaluation"):
        most = getattr(config, section).max_completion_length
        if most is not None and kwargs.min_tokens > most:
            yield (
                f"rollout.generation_kwargs.min_tokens ({kwargs.min_tokens}) exceeds {section}.max_completion_length "
                f"({most}); lower it"
            )
    if (key := kwargs.masked_by) is None:
        return
    name = f"rollout.generation_kwargs.{key}"
    if algorithm.mismatch.correction in ("none", "sequence_mean_mis"):
        correction = "token_tis" if algorithm.acts_on_tokens else "sequence_tis"
        yield (
            f"{name} masks tokens, so samples are from a different distribution than the trainer's, and without "
            f"importance weights the gradient is biased; set algorithm.mismatch.correction: {correction} and "
            "algorithm.old_logps: trainer, or leave it out"
        )
    reject = algorithm.mismatch.reject
    lower = {"min": algorithm.mismatch.min, "reject.min": None if reject is None else reject.min}
    for threshold in (threshold for threshold, value in lower.items() if value):
        yield (
            f"{name} masks tokens, and a weight is the probability that the mask leaves, however small; with "
            f"algorithm.mismatch.{threshold} the gradient is biased; set that to null, or leave the mask out"
        )
    if algorithm.teacher is not None:
        yield (
            f"{name} masks tokens, and algorithm.teacher compares whole distributions: where the student is unlike the "
            "teacher, it would learn to leave the mask; leave one of the two out"
        )
    if algorithm.beta and algorithm.kl.placement != "reward":
        yield (
            f"{name} masks tokens, and algorithm.kl.placement: {algorithm.kl.placement} takes the KL over these "
            "samples without their weights, so its gradient is biased; set kl.placement: reward or beta: 0"
        )
    if algorithm.kl.target is not None:
        yield (
            f"{name} masks tokens, so the KL of the samples is not that of the policy that algorithm.kl.target steers; "
            "leave one of the two out"
        )


def _algorithm(config: RunKeys) -> Iterator[str]:
    cut, algorithm = config.rollout.cut_by, config.algorithm
    weighted = next((reward for reward in config.rewards if reward.weight not in (0, 1)), None)
    if algorithm.advantage in estimators("of_success") and weighted is not None:
        yield (
            f"algorithm.advantage: {algorithm.advantage} needs scores 0 and 1, but the reward {weighted.column} "
            f"has weight {weighted.weight:g}; set weight 1 for the reward that decides, which must be 0 or 1, and "
            "weight 0 for the others"
        )
    if config.rollout.oversample > 1 and algorithm.advantage in estimators("batch_baseline"):
        yield (
            f"rollout.oversample: {config.rollout.oversample:g} leaves out groups of equal scores first, but with "
            f"algorithm.advantage: {algorithm.advantage}, whose baseline is the round's, these have a signal too; set "
            "rollout.oversample: 1, or use an estimator with the group's baseline, such as reinforce_pp_baseline"
        )
    if config.rollout.oversample > 1 and algorithm.multi_objective_aggregation == "normalize_then_sum":
        yield (
            f"rollout.oversample: {config.rollout.oversample:g} leaves out groups with equal sums of rewards first, "
            "but with algorithm.multi_objective_aggregation: normalize_then_sum these can teach; set it to 1"
        )
    if config.rollout.refill and not algorithm.filter_zero_variance:
        yield (
            f"rollout.refill: {config.rollout.refill} replaces the groups that algorithm.filter_zero_variance drops, "
            "which is false; set it to true, or use rollout.oversample"
        )
    if cut and algorithm.kl.target is not None:
        yield (
            f"rollout.{cut} cuts the sampling distribution, so the KL of the samples is not that of the policy that "
            "algorithm.kl.target steers; leave one of the two out"
        )
    compares_logps = {
        "old_logps: sampler": algorithm.old_logps == "sampler",
        f"mismatch.correction: {algorithm.mismatch.correction}": algorithm.mismatch.correction != "none",
    }
    for key, is_set in compares_logps.items():
        if cut and is_set:
            yield (
                f"algorithm.{key} cannot be used with rollout.{cut}: the sampler's log-probs are those of the cut "
                "distribution and the trainer's are not; leave one of the two out"
            )


def _optimizers(config: RunKeys) -> Iterator[str]:
    zero_stage, processes = config.deepspeed.zero_stage, config.deepspeed.processes
    split = processes > 1 and (zero_stage or config.model.dtype != "float32")
    optimizers = {"update.optimizer": config.update.optimizer}
    if config.warmstart.sft is not None:
        optimizers["warmstart.sft.optimizer"] = config.warmstart.sft.optimizer
    for key, name in optimizers.items():
        if name != "adamw" and zero_stage == 3:
            yield f"{key}: {name} cannot be used with deepspeed.zero_stage: 3; set 2 or less, or adamw"
        if name != "adamw" and config.deepspeed.offload.optimizer is not None:
            yield f"{key}: {name} cannot be used with deepspeed.offload; leave that out, or set adamw"
        if name in {"adafactor", "muon"} and split:
            yield (
                f"{key}: {name} needs whole matrices, and ZeRO, which 16-bit formats always use, splits them over "
                "processes; set deepspeed.processes: 1, or model.dtype: float32 with deepspeed.zero_stage: 0, or "
                "use adamw or adamw_8bit"
            )


def _torch_compile(config: RunKeys) -> Iterator[str]:
    refused = {
        "deepspeed.zero_stage: 3": config.deepspeed.zero_stage == 3,
        "model.quantization": config.model.quantization,
        "reproducible": config.reproducible,
    }
    for key in (key for key, value in refused.items() if value and config.update.torch_compile):
        yield f"update.torch_compile cannot be used with {key}; leave one of the two out"


def _offload(config: RunKeys) -> Iterator[str]:
    """Combinations of offload and number format. DeepSpeed's offload to disk would hold weights in bfloat16, whatever
    their format.
    """
    offload, dtype = config.deepspeed.offload, config.model.dtype
    if offload.parameters == "nvme" and dtype != "bfloat16":
        yield f"deepspeed.offload.parameters: nvme cannot be used with model.dtype: {dtype}; set bfloat16"
    in_bfloat16 = {  # in float16 the whole model, with its head, runs as one
        "sequence_parallel": config.deepspeed.sequence_parallel > 1,
        "gradient_checkpointing: offload": config.deepspeed.gradient_checkpointing == "offload",
        "offload: nvme": offload.on_disk,
    }
    for key in (key for key, is_set in in_bfloat16.items() if is_set and dtype == "float16"):
        yield f"deepspeed.{key} cannot be used with model.dtype: float16; set bfloat16"
    if offload.on_disk and config.update.lora is not None:
        yield (
            "deepspeed.offload: nvme cannot be used with update.lora, which has little state; use cpu, or leave it out"
        )


def _images(config: RunKeys) -> Iterator[str]:
    """Settings that cannot be used together with images in prompts."""
    if not config.dataset.shows_images:
        if config.model.train_vision:
            yield "model.train_vision: there are no images to train on; set dataset.image_column"
        return
    if config.model.train_vision and config.deepspeed.processes > 1:
        yield "model.train_vision cannot be used with several processes yet; set deepspeed.processes: 1"
    if config.model.train_vision and config.update.lora is not None:
        yield (
            "model.train_vision cannot be used with update.lora, whose adapter is one of the language model; leave one "
            "of the two out"
        )
    refused = {
        "algorithm.teacher": config.algorithm.teacher,
        "reward_model": config.reward_model,
        "rollout.tools": config.rollout.tools,
        "rollout.environment": config.rollout.environment,
        "rollout.router_replay": config.rollout.router_replay,
        "rollout.token_budget": config.rollout.token_budget,
        "warmstart.sft": config.warmstart.sft,
        "evaluation.harness": config.evaluation.harness,
        "update.torch_compile": config.update.torch_compile,
        "model.quantization": config.model.quantization,
        "deepspeed.zero_stage: 3": config.deepspeed.zero_stage == 3,
        "deepspeed.sequence_parallel": config.deepspeed.sequence_parallel > 1,
    }
    for key, value in refused.items():
        if value:
            yield f"{key} cannot be used with images yet (dataset.image_column); leave one of the two out"


def _quantization(config: RunKeys) -> Iterator[str]:
    rollouts = config.rollout.quantization
    if rollouts is not None and config.model.dtype == "float32":
        yield (
            f"rollout.quantization: {rollouts} cannot be used with model.dtype: float32, since vLLM's FP8 layers "
            "compute in 16 bits; set bfloat16"
        )
    name = config.model.quantization
    if name is None:
        return
    if config.update.lora is None:
        yield f"model.quantization: {name} needs update.lora, as 4-bit weights are not trained; set it"
    if config.deepspeed.zero_stage == 3:
        yield f"model.quantization: {name} cannot be used with deepspeed.zero_stage: 3; set 2 or less"
    if config.warmstart.sft is not None:
        yield (
            f"model.quantization: {name} cannot be used with warmstart.sft, which trains all weights; do that in "
            "a run without it, and name its policy in model.name_or_path"
        )
