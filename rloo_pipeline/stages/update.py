"""update: a round's completions, scores and reference log-probs → the next policy, trainer state and metrics.

`training/batch.py` (rewards → advantages over the whole round) and `training/objective.py` (loss) apply the mathematics
in `algorithm/`; `training/round_training.py` is the loop of optimizer steps.
"""

from pathlib import Path
from typing import NamedTuple

from rloo_pipeline.artifacts import files, lineage, round_tables, tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.round_tables import RoundFiles
from rloo_pipeline.before_run import checkpointing, peak_share
from rloo_pipeline.config import JSON, Config
from rloo_pipeline.runtime import reproducible
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.trackers.events import write_events
from rloo_pipeline.training import retraining, round_data, round_training
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.metrics import Metrics
from rloo_pipeline.training.retraining import RoundTrainer
from rloo_pipeline.training.round_training import TrainedRound
from rloo_pipeline.training.sampler_proof import RolloutProof


class UpdateOutputs(NamedTuple):
    """Files and folders that an update writes."""

    policy: Path
    metrics: Path
    events: Path
    table: Path


def update(
    config: Config,
    round_: int,
    start: Policy,
    sampler: Policy,
    states: Path,
    inputs: RoundFiles,
    outputs: UpdateOutputs,
    checks: Path | None = None,
) -> None:
    """Trains policy `round_` from policy `round_ - 1`.

    Args:
        config: the stage's configuration.
        round_: round number, from 1.
        start: policy `round_ - 1`.
        sampler: the policy that sampled the rollouts, older than `start` with `rollout.lag`.
        states: folder of the run with its trainer states, which this stage reads and writes.
        inputs: the round's tables.
        outputs: files and folders to write.
        checks: checks.json of the run; if given, proves that the policy sampled the rollouts.

    Raises:
        UserError: an input is damaged, or tables, log-probs or trainer state belong to a different round or policy.
    """
    reproducible.use_torch(config.deepspeed.threads, config.reproducible)
    digest = start.digest  # verifies its files before anything else reads them
    config = checkpointing.resolve(config, start.dimensions)
    inputs = inputs.used(config)
    sampled = round_tables.read(inputs, round=round_, policy=sampler.digest, vocabulary=sampler.vocabulary)
    proof = None if checks is None else RolloutProof(config, round_, sampler, checks, inputs)
    if proof and sampler != start:
        proof.by_pass(sampled.rollouts)
    trainer = retraining.trainer_after(config, round_ - 1, start, states)
    engine = trainer.engine
    trained = round_training.train(config, round_, engine, trainer.algorithm_state, sampled, proof)
    metrics = round_training.metrics_of(config, round_, engine, sampled, trained)
    if engine.rank.first:
        say(round_training.summary(metrics, trained.seconds) + _share_of_peak(config, engine, trained))
    cards = lineage.cards_of([*inputs.rollouts[:1], *inputs.reference[:1], *inputs.teacher[:1]])
    cards |= reproducible.card(config.reproducible, "trainer")
    made_from = lineage.of_policy(config.seed, start.manifest, digest, cards)
    on_nodes = config.node_folder is not None and not config.keeps(round_)
    policy_digest = engine.save_policy(outputs.policy, on_nodes, **made_from)
    about = {"round": round_, "policy": policy_digest, "seed": config.seed}
    if engine.rank.first:
        more = {"run": config.run, "micro_batch_tokens": config.deepspeed.micro_batch_tokens}
        _write(trained, metrics, outputs, about | more | lineage.of_metrics(metrics, inputs.scores[0]))
        write_events(outputs.events, round_, metrics)
    retraining.keep(config, RoundTrainer(engine, trained.algorithm_state), outputs.policy, states, about)


def restore(config: Config, policy: Policy, states: Path) -> None:
    """Rewrites the weights of a policy that a node's own disk has lost, and the trainer's state after its round.

    Args:
        config: the configuration of `update`.
        policy: the policy, without its weights.
        states: as for `update`.

    Raises:
        UserError: see `retraining.restore`.
    """
    reproducible.use_torch(config.deepspeed.threads, config.reproducible)
    config = checkpointing.resolve(config, Policy(policy.folder.with_name(f"{0:05d}")).dimensions)
    trainer = retraining.restore(config, policy, states)
    about = {"round": int(policy.folder.name), "policy": policy.digest, "seed": config.seed}
    retraining.keep(config, trainer, policy.folder, states, about)


def _share_of_peak(config: Config, engine: Engine, trained: TrainedRound) -> str:
    """A clause with the share of the cards' peak speed that the optimizer steps reached."""
    if not trained.steps:
        return ""
    prompts, completions = (tables.lengths(trained.rollouts[name]) for name in ("prompt_ids", "completion_ids"))
    masked = trained.batch.masked.tolist()
    passed = [0 if without else length for without, length in zip(masked, completions, strict=True)]
    return peak_share.of_update(config, engine.policy, prompts, passed, trained.seconds, engine.rank.world)


def _write(trained: TrainedRound, metrics: Metrics, outputs: UpdateOutputs, about: JSON) -> None:
    """Writes train.parquet and metrics.json."""
    known = metrics["ratio/mean"] is not None
    table = round_data.train_table(trained.rollouts, trained.batch, trained.record, ratio_known=known)
    tables.write(outputs.table, table, tables.TRAIN, "train", **about)
    files.write_json(outputs.metrics, metrics)
