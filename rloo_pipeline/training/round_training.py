"""A round's optimizer steps, from its tables to what they made of the policy and saw on the way."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from rloo_pipeline.artifacts import tables
from rloo_pipeline.config import Algorithm, Config
from rloo_pipeline.runtime.progress import Counter, counting, say
from rloo_pipeline.seeds import derive, permutation
from rloo_pipeline.training import round_data
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.metrics import kl_of_completion
from rloo_pipeline.training.packing import Sequences
from rloo_pipeline.training.round_data import Tables

if TYPE_CHECKING:
    import pyarrow as pa

    from rloo_pipeline.training.batch import Batch, Carried
    from rloo_pipeline.training.objective import Record


class Trained(NamedTuple):
    """What a round came to, beside the policy in the engine."""

    rolled: pa.Table
    """The rollouts that were trained on, row by row as the rest."""
    batch: Batch
    record: Record
    steps: list[tuple[float, float]]
    """Loss and gradient norm of each optimizer step that was made."""
    left_out: int
    """Steps without any completion in the loss, which were not made."""
    carried: Carried
    """To the next round."""
    seconds: float
    """From the first pass to the last step."""


def train(config: Config, round_: int, engine: Engine, carried: Carried, sampled: Tables) -> Trained:
    """Takes the engine's policy through the optimizer steps of a round.

    Args:
        config: of the stage.
        round_: from 1; what the order of the groups and all that is random comes from.
        engine: has the policy of the round before.
        carried: from the round before.
        sampled: all that was sampled in this round.
    """
    import torch

    from rloo_pipeline.training.batch import make_batch

    found = sampled.take(round_data.chosen_rows(config, sampled))
    sequences = Sequences(found.rolled["prompt_ids"].to_pylist(), found.rolled["completion_ids"].to_pylist())
    # whatever was random on the way here: kept or loaded, the engine goes on alike
    torch.manual_seed(derive(config.seed, "update", round_))
    passes = config.algorithm.num_iterations + needs_old_pass(config.algorithm)
    began = time.monotonic()
    with counting("update", passes * len(sequences.prompts)) as counter:
        completions = round_data.completions_of(config, found)
        if needs_old_pass(config.algorithm):
            old = engine.logps(sequences, config.deepspeed.max_tokens_per_micro_batch, counter.advance)
            completions = completions._replace(old_logps=old)
        batch, carried = make_batch(config.algorithm, config.rollout, completions, carried)
        record, steps, left_out = _steps(config, round_, engine, sequences, batch, counter)
    if left_out:
        say(
            f"round {round_}: {left_out} of {left_out + len(steps)} optimizer steps left out, since all of their "
            "completions are masked or filtered"
        )
    seconds = time.monotonic() - began
    carried = _carry_on(config, carried, batch, record, sampled.rolled)
    return Trained(found.rolled, batch, record, steps, left_out, carried, seconds)


def _single_step(algorithm: Algorithm) -> bool:
    """Whether a round is one optimizer step: then that step's own log-probs are those of the policy that sampled."""
    return algorithm.num_iterations * algorithm.steps_per_generation == 1


def needs_old_pass(algorithm: Algorithm) -> bool:
    """Whether the trainer must compute log-probs before it steps: for a KL in the reward, or where later steps compare
    with them.
    """
    if algorithm.old_logps == "sampler":
        return False
    in_reward = algorithm.beta != 0 and algorithm.kl.placement != "loss"
    compared = algorithm.clip != "none" or algorithm.mismatch.correction != "none"
    return in_reward or (compared and not _single_step(algorithm))


def knows_ratio(algorithm: Algorithm) -> bool:
    """Whether the ratios that the steps saw are against the policy that sampled."""
    return algorithm.old_logps == "sampler" or needs_old_pass(algorithm) or _single_step(algorithm)


def _steps(
    config: Config, round_: int, engine: Engine, sequences: Sequences, batch: Batch, counter: Counter
) -> tuple[Record, list[tuple[float, float]], int]:
    """All optimizer steps of a round: what they saw, loss and gradient norm of each that was made, and how many were
    left out. A step without any completion in the loss would move weights by momentum and weight decay alone; it is not
    made, and counts in the learning rate's schedule as any other, so that the rate is a function of the round.
    """
    from rloo_pipeline.training.objective import Record, StepLoss

    algorithm, samples = config.algorithm, config.rollout.num_generations
    groups = len(sequences.prompts) // samples
    size = groups // algorithm.steps_per_generation
    record = Record.empty(len(sequences.prompts))
    steps: list[tuple[float, float]] = []
    left_out = 0
    for iteration in range(algorithm.num_iterations):
        order = permutation(groups, derive(config.seed, "steps", round_, iteration))
        record.forget_pass()
        for first in range(0, groups, size):
            rows = [group * samples + sample for group in order[first : first + size] for sample in range(samples)]
            loss_of = StepLoss(algorithm, batch, rows, config.rollout.max_completion_length, record, first=not steps)
            # a masked completion has no gradient, so it need not go through the model
            kept = [row for row in rows if not batch.masked[row]]
            counter.advance(len(rows) - len(kept))
            if not kept:
                engine.leave_out_step()
                left_out += 1
                continue
            loss = engine.step(sequences, kept, config.deepspeed.max_tokens_per_micro_batch, loss_of, counter.advance)
            steps.append((loss, engine.grad_norm))
    return Record(*(engine.sum_over_ranks(values) for values in record)), steps, left_out


def _carry_on(config: Config, carried: Carried, batch: Batch, record: Record, rolled: pa.Table) -> Carried:
    """What the next round gets: β steered by this round's KL, and the tokens sampled so far."""
    from rloo_pipeline.algorithm.kl import steered

    section, kl = config.algorithm.kl, kl_of_completion(batch, record)
    beta = carried.beta
    if section.target is not None and kl is not None:
        beta = steered(batch.beta, kl, section.target, section.gain)
    tokens = sum(sum(tables.lengths(rolled[name])) for name in ("prompt_ids", "completion_ids"))
    return carried._replace(beta=beta, num_tokens=carried.num_tokens + tokens)
