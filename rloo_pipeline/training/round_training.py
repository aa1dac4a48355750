"""The optimizer steps of one round: tables in, trained policy (in the engine) and statistics out."""

import time
from functools import partial
from typing import NamedTuple

import pyarrow as pa
import torch

from rloo_pipeline.algorithm.kl import adapt_beta
from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.round_tables import RoundTables
from rloo_pipeline.config import KL, Algorithm, Config
from rloo_pipeline.runtime.progress import Counter, counting, say
from rloo_pipeline.seeds import derive, permutation, shard_range
from rloo_pipeline.training import metrics, round_data
from rloo_pipeline.training.batch import AlgorithmState, Batch, RoundTensors, make_batch, with_choices
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.metrics import Metrics
from rloo_pipeline.training.objective import Record, StepLoss
from rloo_pipeline.training.packing import Sequences
from rloo_pipeline.training.sampler_proof import RolloutProof
from rloo_pipeline.training.selection import chosen_rows, teaching_groups


class TrainedRound(NamedTuple):
    """Result of a round's training. The policy itself stays in the engine."""

    rollouts: pa.Table
    """The rollouts trained on, one row per completion of `batch` and `record`."""
    batch: Batch
    record: Record
    steps: list[tuple[float, float]]
    """Loss and gradient norm of each optimizer step taken."""
    skipped_steps: int
    """Optimizer steps not taken because none of their completions is in the loss."""
    algorithm_state: AlgorithmState
    """State for the next round."""
    experts: Metrics
    """Metrics of how evenly a mixture uses its experts; empty for other models."""
    seconds: float
    """Wall time from the first forward pass to the last step."""


def train(
    config: Config,
    round_: int,
    engine: Engine,
    state: AlgorithmState,
    sampled: RoundTables,
    proof: RolloutProof | None = None,
) -> TrainedRound:
    """Runs the optimizer steps of a round on the engine's policy.

    Args:
        config: configuration of the run.
        round_: round number, from 1; seeds the order of groups and dropout.
        engine: engine that holds the previous round's policy.
        state: algorithm state after the previous round.
        sampled: tables of all completions sampled in this round.
        proof: checks that the right policy sampled the rollouts; None if that is done.

    Raises:
        UserError: another policy sampled the rollouts.
    """
    if not len(sampled.rollouts):
        return _without_steps(config.algorithm, engine, state, sampled.rollouts)
    tables_used = sampled.take(chosen_rows(config, sampled))
    rollouts = tables_used.rollouts
    sequences = round_data.sequences_of(rollouts, sampled.prompts, engine.policy)
    if config.rollout.router_replay:
        sequences = sequences._replace(experts=round_data.experts_of(rollouts))
    top_k, vocabulary = config.algorithm.teacher_top_k, engine.policy.vocabulary
    # A cached engine and a freshly loaded one have drawn different random numbers so far; reseeding makes them agree.
    engine.seed_dropout(derive(config.seed, "update", round_))
    engine.experts.reset()
    passes = config.algorithm.num_iterations + config.algorithm.needs_old_pass
    start = time.monotonic()
    with counting("update", passes * len(sequences.prompts)) as counter:
        completions = round_data.completions_of(config.algorithm, tables_used, config.rollout.cut_by, vocabulary)
        if config.algorithm.needs_old_pass:
            with_entropies = config.algorithm.top_entropy_quantile < 1
            old_logps, *entropies = engine.outputs(sequences, counter.advance, entropies=with_entropies)
            completions = completions._replace(old_logps=old_logps, entropies=next(iter(entropies), None))
        if proof is not None and not proof.is_done:
            _prove(engine, proof, completions, rollouts)
        batch, state = make_batch(config.algorithm, config.rollout, completions, state)
        batch = with_choices(config.algorithm, batch, derive(config.seed, "clip_cov", round_))
        if top_k and tables_used.teacher is not None:
            candidates = round_data.candidates_of(tables_used.teacher, top_k, vocabulary)
            sequences = sequences._replace(candidates=candidates)
        record, steps, skipped = _steps(config, round_, engine, sequences, batch, counter, proof, rollouts)
    if skipped:
        say(
            f"round {round_}: skipped {skipped} of {skipped + len(steps)} optimizer steps, because all of their "
            "completions are masked or filtered"
        )
    seconds = time.monotonic() - start
    state = _next_state(config.algorithm.kl, state, batch, record, sampled.rollouts)
    experts = engine.experts.metrics(partial(engine.sum_over_ranks, of_tokens=True))
    return TrainedRound(rollouts, batch, record, steps, skipped, state, experts, seconds)


def _without_steps(algorithm: Algorithm, engine: Engine, state: AlgorithmState, rollouts: pa.Table) -> TrainedRound:
    """The result of a round in which no group has finished (`rollout.token_budget`): the policy stays as it is."""
    none = torch.zeros(0)
    for _ in range(skipped := algorithm.num_iterations * algorithm.steps_per_generation):
        engine.skip_step()
    completions = RoundTensors(none.double(), torch.zeros(0, 0, dtype=torch.bool), none.bool(), None)
    beta = algorithm.beta if state.beta is None else state.beta
    batch = Batch(completions, none.double(), None, none, none.bool(), none.bool(), beta)
    return TrainedRound(rollouts, batch, Record.empty(0), [], skipped, state, {}, 0.0)


def _prove(engine: Engine, proof: RolloutProof, completions: RoundTensors, rollouts: pa.Table) -> None:
    """Proves the rollouts before the first step, unless that step's own log-probs will do it."""
    old, sampling = completions.old_logps, completions.sampling_logps
    if sampling is None or proof.masked or engine.settings.uses_dropout:
        proof.by_pass(rollouts, engine)
    elif old is not None and old is not sampling:
        absolute = ((old - sampling).double().abs() * completions.mask).sum(-1)
        proof.by_sums(absolute, completions.mask.sum(-1), rollouts)


def _steps(
    config: Config,
    round_: int,
    engine: Engine,
    sequences: Sequences,
    batch: Batch,
    counter: Counter,
    proof: RolloutProof | None,
    rollouts: pa.Table,
) -> tuple[Record, list[tuple[float, float]], int]:
    """Takes all optimizer steps of a round.

    A step without any completion in the loss would change the weights by momentum and weight decay alone. It is
    skipped, but still advances the learning rate, so that the rate is a function of the round.

    Returns:
        Statistics per completion, (loss, gradient norm) of each step taken, and the number of skipped steps.
    """
    algorithm, samples = config.algorithm, config.rollout.num_generations
    groups = len(sequences.prompts) // samples
    record = Record.empty(len(sequences.prompts), engine.device)
    steps: list[tuple[float, float]] = []
    skipped = 0

    def prove() -> None:
        if proof is not None and not proof.is_done:
            tokens = batch.completions.mask.sum(-1) * (engine.sum_over_ranks(record.has_gap) > 0)
            proof.by_sums(engine.sum_over_ranks(record.gap[:, 0]), tokens, rollouts)

    for iteration in range(algorithm.num_iterations):
        order = permutation(groups, derive(config.seed, "steps", round_, iteration))
        record.reset_pass()
        for step in range(algorithm.steps_per_generation):
            share = shard_range(groups, algorithm.steps_per_generation, step)
            rows = [order[place] * samples + sample for place in share for sample in range(samples)]
            loss_of = StepLoss(algorithm, batch, rows, config.rollout.max_completion_length, record, first=not steps)
            # a masked completion has no gradient, so it need not go through the model
            unmasked = [row for row in rows if not batch.masked[row]]
            counter.advance(len(rows) - len(unmasked))
            if not unmasked:
                engine.skip_step()
                skipped += 1
                continue
            loss = engine.step(sequences, unmasked, loss_of, counter.advance, prove)
            steps.append((loss, engine.grad_norm))
    return Record(*(engine.sum_over_ranks(values) for values in record)), steps, skipped


def _next_state(section: KL, state: AlgorithmState, batch: Batch, record: Record, rollouts: pa.Table) -> AlgorithmState:
    """The state with β adapted to this round's KL and this round's tokens counted."""
    beta, kl = state.beta, metrics.kl_metrics(batch, record)["kl/sequence_mean"]
    if section.target is not None and kl is not None:
        beta = adapt_beta(batch.beta, kl, section.target, section.gain)
    tokens = sum(sum(tables.lengths(rollouts[name])) for name in ("prompt_ids", "completion_ids"))
    return state._replace(beta=beta, num_tokens=state.num_tokens + tokens)


def metrics_of(config: Config, round_: int, engine: Engine, sampled: RoundTables, trained: TrainedRound) -> Metrics:
    """The metrics of a round.

    Args:
        config: the stage's configuration.
        round_: number of the round, from 1.
        engine: the trainer after the round.
        sampled: all completions of the round.
        trained: result of the training.
    """
    algorithm, samples = config.algorithm, config.rollout.num_generations
    found = metrics.sample_metrics(sampled.rollouts, sampled.scores, samples)
    # otherwise they are 1 by construction
    measures_ratio = algorithm.old_logps == "sampler" or algorithm.needs_old_pass or algorithm.is_one_step
    found |= metrics.update_metrics(trained.batch, trained.record, algorithm, measures_ratio)
    if config.rollout.masked_by:
        found |= {f"sampling/{name}": None for name in metrics.OF_ENGINES}
    teaching = teaching_groups(algorithm, samples, sampled)
    found |= metrics.group_metrics(teaching, sampled, len(trained.rollouts) // samples)
    found["sampling/staleness"] = metrics.staleness(sampled.rollouts, round_)
    found |= trained.experts | _step_metrics(engine, trained)
    return found | {"round": round_, "num_tokens": trained.algorithm_state.num_tokens}


def summary(found: Metrics, seconds: float) -> str:
    """Log line for a round that was trained in `seconds`."""
    reward, norm = ("–" if found[key] is None else f"{found[key]:.3g}" for key in ("reward", "grad_norm"))
    left_out = found["steps_left_out"]
    skipped = f" ({left_out} of this round left out, without a completion to train on)" if left_out else ""
    return (
        f"round {found['round']}: reward {reward}, grad norm {norm}, {found['step']} optimizer steps so far{skipped}, "
        f"trained in {seconds:.2f} s"
    )


def _step_metrics(engine: Engine, trained: TrainedRound) -> Metrics:
    """Loss and gradient norm as means over the round's optimizer steps; null if there was no step."""
    steps = trained.steps
    return {
        "step": engine.step_count,
        "steps_left_out": trained.skipped_steps,
        "loss": sum(loss for loss, _ in steps) / len(steps) if steps else None,
        "grad_norm": sum(norm for _, norm in steps) / len(steps) if steps else None,
        "learning_rate": engine.settings.learning_rate.at_step(engine.step_count - 1),
    }
