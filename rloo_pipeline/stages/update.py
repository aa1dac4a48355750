"""update: a round's completions, scores and reference log-probs → the next policy, trainer state and metrics.

The whole algorithm is in `algorithm/`; here it is fed. Rewards less β·KL give advantages over the whole round; then,
for each of num_iterations passes, the round's groups are shuffled by seed and cut into steps_per_generation optimizer
steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rloo_pipeline import files, references, tables
from rloo_pipeline.config import Algorithm, Config, estimator
from rloo_pipeline.progress import Counter, counting, say
from rloo_pipeline.seeds import derive, permutation
from rloo_pipeline.stages.metrics import round_metrics
from rloo_pipeline.training import policy
from rloo_pipeline.training.engine import Engine, Sequences, Settings
from rloo_pipeline.training.schedule import Schedule

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor


class Inputs(NamedTuple):
    """Files of one round, shards in order."""

    rollouts: Sequence[Path]
    scores: Sequence[Path]
    reference: Sequence[Path]


class Outputs(NamedTuple):
    """What an update writes."""

    policy: Path
    trainer: Path
    metrics: Path
    table: Path


class Batch(NamedTuple):
    """A round as tensors, one row a completion."""

    rewards: Tensor
    """[completions] float64, after clipping; NaN where unscorable or masked."""
    kl: Tensor | None
    """[completions], summed over the sequence."""
    advantages: Tensor
    """[completions] float32."""
    masked: Tensor
    """[completions] bool: truncated completions that take no part."""
    old_logps: Tensor | None
    """[completions, longest]; None where the first step's own log-probs are the old ones."""


class Record(NamedTuple):
    """What the steps saw of each completion, on this rank; the last pass stays."""

    ratio: Tensor
    clipped: Tensor
    entropy: Tensor


def update(config: Config, round_: int, start: Path, trainer: Path | None, inputs: Inputs, outputs: Outputs) -> None:
    """Makes policy `round_` from policy `round_ - 1` in `start` and the trainer state in `trainer` (None in round 1).

    Raises:
        UserError: an input is damaged, tables do not belong together, or the state is not of this policy.
    """
    import torch

    torch.set_num_threads(config.deepspeed.threads)
    rolled = tables.read_all(inputs.rollouts, "rollouts")
    scored = tables.read_all(inputs.scores, "scores")
    tables.check_aligned(rolled, scored, str(inputs.scores[0].parent))
    sequences = Sequences(rolled["prompt_ids"].to_pylist(), rolled["completion_ids"].to_pylist())
    engine = Engine(start, settings_of(config), derive(config.seed, "update", round_))
    if trainer is not None:
        engine.load_state(trainer, round=round_ - 1, policy=policy.digest(start))
    passes = config.algorithm.num_iterations + _needs_old_pass(config.algorithm)
    with counting("update", passes * len(sequences.prompts)) as counter:
        reference = _reference_logps(inputs.reference, rolled) if config.uses_reference else None
        old = _old_logps(config, engine, sequences, rolled, counter)
        batch = make_batch(config.algorithm, config.rollout.num_generations, rolled, scored, old, reference)
        record, norms = _train(config, round_, engine, sequences, batch, counter)
    engine.save_policy(outputs.policy)
    engine.save_state(outputs.trainer, round=round_, policy=policy.digest(outputs.policy))
    record = Record(*(engine.sum_over_ranks(values) for values in record))
    if engine.rank.first:
        _write(config, round_, engine, rolled, scored, batch, record, norms, outputs)
    engine.close()


def settings_of(config: Config) -> Settings:
    """The engine's settings from the configuration; the horizon of the learning rate is counted in optimizer steps."""
    section = config.update
    steps = config.algorithm.num_iterations * config.algorithm.steps_per_generation
    horizon = (section.lr_horizon_rounds or 0) * steps
    return Settings(
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
        temperature=config.rollout.temperature,
        schedule=Schedule(
            section.learning_rate, section.lr_scheduler_type, section.warmup_steps, horizon, section.min_lr_ratio
        ),
        adam_betas=section.adam_betas,
        adam_epsilon=section.adam_epsilon,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        zero_stage=config.deepspeed.zero_stage,
        gradient_checkpointing=config.deepspeed.gradient_checkpointing,
        lora=section.lora,
    )


def _needs_old_pass(algorithm: Algorithm) -> bool:
    """Whether the trainer must compute log-probs before it steps: on a round's only step they are that step's own."""
    one_step = algorithm.num_iterations * algorithm.steps_per_generation == 1
    return algorithm.old_logps == "trainer" and not (one_step and algorithm.beta == 0)


def _old_logps(
    config: Config, engine: Engine, sequences: Sequences, rolled: pa.Table, counter: Counter
) -> Tensor | None:
    """log π_old of each completion token, [completions, longest]."""
    if config.algorithm.old_logps == "sampler":
        return _padded(rolled["sampling_logps"].to_pylist())
    if _needs_old_pass(config.algorithm):
        return engine.logps(sequences, config.deepspeed.max_tokens_per_micro_batch, counter.advance)
    return None


def _reference_logps(shards: Sequence[Path], rolled: pa.Table) -> Tensor:
    """log π_ref of each completion token, [completions, longest]."""
    table = tables.read_all(shards, "reference")
    tables.check_aligned(rolled, table, str(shards[0].parent))
    return _padded(table["reference_logps"].to_pylist())


def _padded(rows: list[list[float]]) -> Tensor:
    """Lists of different lengths as [rows, longest] float32, 0 behind the end."""
    import torch

    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float32) for row in rows], batch_first=True)


def make_batch(
    algorithm: Algorithm, samples: int, rolled: pa.Table, scored: pa.Table, old: Tensor | None, reference: Tensor | None
) -> Batch:
    """Rewards, KL and advantages of a round.

    A truncated completion that is masked leaves the loss, its denominator and the baseline of its siblings: its reward
    becomes NaN.
    """
    import torch

    from rloo_pipeline.algorithm import advantages, kl

    rewards = torch.tensor([torch.nan if r is None else r for r in scored["reward"].to_pylist()], dtype=torch.float64)
    truncated = torch.tensor([reason != "stop" for reason in rolled["finish_reason"].to_pylist()])
    masked = truncated & algorithm.mask_truncated_completions
    if algorithm.reward_clip_range is not None:
        rewards = rewards.clamp(*algorithm.reward_clip_range)
    rewards = rewards.masked_fill(masked, torch.nan)
    penalised, divergence = rewards, None
    if reference is not None and old is not None:
        divergence = kl.sequence_k1(old, reference, torch.ones_like(old, dtype=torch.bool))
        penalised = rewards - algorithm.beta * divergence.double()
    grouped = penalised.view(-1, samples)
    found = references.load(estimator(algorithm.advantage))(grouped)
    if algorithm.normalize_advantages:
        found = advantages.normalize(found, ~grouped.isnan())
    return Batch(rewards, divergence, found.flatten().float(), masked, old)


def _train(
    config: Config, round_: int, engine: Engine, sequences: Sequences, batch: Batch, counter: Counter
) -> tuple[Record, list[float]]:
    """All optimizer steps of a round; what they saw, and the gradient norm of each."""
    import torch

    algorithm, samples = config.algorithm, config.rollout.num_generations
    groups = len(sequences.prompts) // samples
    record = Record(*(torch.zeros(len(sequences.prompts)) for _ in range(3)))
    norms = []
    for iteration in range(algorithm.num_iterations):
        order = permutation(groups, derive(config.seed, "steps", round_, iteration))
        size = groups // algorithm.steps_per_generation
        for values in record:
            values.zero_()
        for first in range(0, groups, size):
            rows = [group * samples + sample for group in order[first : first + size] for sample in range(samples)]
            loss = StepLoss(algorithm, batch, rows, record)
            engine.step(sequences, rows, config.deepspeed.max_tokens_per_micro_batch, loss, counter.advance)
            norms.append(engine.grad_norm)
    return record, norms


class StepLoss:
    """The loss of a micro-batch as its share of an optimizer step's mean over completions."""

    def __init__(self, algorithm: Algorithm, batch: Batch, rows: Sequence[int], record: Record) -> None:
        self.algorithm, self.batch, self.record = algorithm, batch, record
        self.denominator = max(1, int((~batch.masked[list(rows)]).sum()))

    def __call__(self, rows: Sequence[int], logps: Tensor, mask: Tensor, entropy: Tensor) -> Tensor:
        """A micro-batch's part of the loss; what the clip did to each completion goes into the record."""
        from rloo_pipeline.algorithm.loss import clipped_surrogate

        algorithm, batch, chosen = self.algorithm, self.batch, list(rows)
        old = logps.detach() if batch.old_logps is None else batch.old_logps[chosen, : logps.shape[1]].to(logps.device)
        high = algorithm.epsilon if algorithm.epsilon_high is None else algorithm.epsilon_high
        advantages = batch.advantages[chosen].to(logps.device)
        made = clipped_surrogate(
            logps, old, advantages, mask, algorithm.importance_sampling_level, algorithm.epsilon, high
        )
        self.record.ratio[chosen] = made.ratio.cpu()
        self.record.clipped[chosen] = made.clipped.cpu()
        self.record.entropy[chosen] = (entropy.sum(-1) / mask.sum(-1).clamp(min=1)).cpu()
        kept = ~batch.masked[chosen].to(logps.device)
        return (made.loss * kept).sum() / self.denominator


def _write(
    config: Config,
    round_: int,
    engine: Engine,
    rolled: pa.Table,
    scored: pa.Table,
    batch: Batch,
    record: Record,
    norms: list[float],
    outputs: Outputs,
) -> None:
    """train.parquet and metrics.json."""
    import pyarrow as pa
    import torch

    rewards = [None if value != value else value for value in batch.rewards.tolist()]
    columns = {
        "prompt_id": rolled["prompt_id"],
        "sample": rolled["sample"],
        "reward": rewards,
        "kl": batch.kl.float().tolist() if batch.kl is not None else pa.nulls(len(rewards), pa.float32()),
        "advantage": batch.advantages.tolist(),
        "ratio": record.ratio.tolist(),
        "clipped": (record.clipped > 0).tolist(),
        "masked": batch.masked.tolist(),
    }
    made = pa.table(columns, schema=tables.TRAIN)
    tables.write(
        outputs.table,
        made,
        tables.TRAIN,
        "train",
        run=config.run,
        round=round_,
        seed=config.seed,
        policy=policy.digest(outputs.policy),
    )
    metrics = round_metrics(rolled, scored, made, config.rollout.num_generations) | {
        "round": round_,
        "step": engine.step_count,
        "entropy": float(record.entropy.mean()),
        "clip_ratio/region_mean": float(record.clipped.mean()),
        "ratio/mean": float(record.ratio.mean()),
        "grad_norm": float(torch.tensor(norms).mean()),
        "learning_rate": engine.settings.schedule.rate(engine.step_count - 1),
    }
    files.write_json(outputs.metrics, metrics)
    say(
        f"round {round_}: reward {metrics['reward']}, grad norm {metrics['grad_norm']:.3g}, "
        f"{engine.step_count} optimizer steps so far"
    )
