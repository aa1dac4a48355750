"""Checks across the sections of a run's configuration."""

from collections.abc import Iterator
from operator import attrgetter

from rloo_pipeline.config import lag, rewards
from rloo_pipeline.config.algorithm import estimators
from rloo_pipeline.config.run_keys import RunKeys

ENVIRONMENT_REWARD = "rloo_pipeline.rewards.from_environment:environment_reward"
"""The reward function that returns the reward which the environment gave an episode."""


def problems(config: RunKeys) -> Iterator[str]:
    """A sentence for each pair of keys in different sections that conflict, and for each key that needs another."""
    yield from _reward_names(config)
    yield from _counts(config)
    yield from _selection(config)
    yield from lag.problems(config.rollout, config.algorithm)
    yield from _generation(config)
    yield from _algorithm(config)
    yield from rewards.problems(config.reward_model, config.rewards)
    yield from _optimizers(config)
    if config.model.train_vision and not config.dataset.shows_images:
        yield "model.train_vision: there are no images to train on; set dataset.image_column"
    if config.model.quantization is not None and config.update.lora is None:
        yield "model.quantization needs update.lora, as 4-bit weights are not trained; set it"


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
    for other in ("teacher", "kl.target"):  # these need samples of the whole distribution
        if attrgetter(other)(algorithm) is not None:
            yield f"{name} masks tokens, so it cannot be used with algorithm.{other}; leave one of the two out"
    if algorithm.beta and algorithm.kl.placement != "reward":
        yield (
            f"{name} masks tokens, and algorithm.kl.placement: {algorithm.kl.placement} takes the KL over these "
            "samples without their weights, so its gradient is biased; set kl.placement: reward or beta: 0"
        )


def _algorithm(config: RunKeys) -> Iterator[str]:
    algorithm = config.algorithm
    weighted = next((reward for reward in config.rewards if reward.weight not in (0, 1)), None)
    if algorithm.advantage in estimators("of_success") and weighted is not None:
        yield (
            f"algorithm.advantage: {algorithm.advantage} needs scores 0 and 1, but the reward {weighted.column} "
            f"has weight {weighted.weight:g}; set weight 1 for the reward that decides, which must be 0 or 1, and "
            "weight 0 for the others"
        )
    if algorithm.teacher is None and all(reward.weight == 0 for reward in config.rewards):
        yield "rewards: all have weight 0, so nothing trains; give one a weight, or set algorithm.teacher"
    if config.rollout.oversample > 1 and algorithm.advantage in estimators("batch_baseline"):
        yield (
            f"rollout.oversample: {config.rollout.oversample:g} leaves out groups of equal scores first, but with "
            f"algorithm.advantage: {algorithm.advantage}, whose baseline is the round's, these have a signal too; set "
            "rollout.oversample: 1, or use an estimator with the group's baseline, such as reinforce_pp_baseline"
        )


def _optimizers(config: RunKeys) -> Iterator[str]:
    if config.deepspeed.processes == 1 or (not config.deepspeed.zero_stage and config.model.dtype == "float32"):
        return
    optimizers = {"update.optimizer": config.update.optimizer}
    if config.warmstart.sft is not None:
        optimizers["warmstart.sft.optimizer"] = config.warmstart.sft.optimizer
    for key, name in optimizers.items():
        if name in {"adafactor", "muon"}:
            yield (
                f"{key}: {name} needs whole matrices, and ZeRO, which 16-bit formats always use, splits them over "
                "processes; set deepspeed.processes: 1, or model.dtype: float32 with deepspeed.zero_stage: 0, or "
                "use adamw or adamw_8bit"
            )
