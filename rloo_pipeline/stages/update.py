"""update: a round's completions, scores and reference log-probs → the next policy, trainer state and metrics.

`training/batch.py` (rewards → advantages over the whole round) and `training/objective.py` (loss) apply the mathematics
in `algorithm/`; `training/round_training.py` is the loop of optimizer steps.
"""

from collections.abc import Sequence
from pathlib import Path

from rloo_pipeline.artifacts import files, lineage, tables
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


def update(
    config: Config,
    round_: int,
    policy: Policy,
    trainer: Path,
    rollouts: Sequence[Path],
    scores: Sequence[Path],
    output: Path,
    metrics: Path,
    events: Path,
    table: Path,
    sampler: Policy | None = None,
    reference: Sequence[Path] = (),
    teacher: Sequence[Path] = (),
    prompts: Path | None = None,
    checks: Path | None = None,
) -> None:
    """Trains policy `round_` from policy `round_ - 1`.

    Args:
        config: the stage's configuration.
        round_: number of the round, from 1.
        policy: the policy of the round before.
        trainer: folder of the run's trainer states, to be read and written.
        rollouts, scores: all shards of this table of the round, in order.
        output: folder for the next policy.
        metrics: JSON file for the metrics of the round.
        events: TensorBoard event file for the metrics.
        table: Parquet file for the values that the update used for each completion.
        sampler: the policy that sampled the rollouts (default: `policy`; with `rollout.lag` an older one).
        reference, teacher: all shards of the log-probs of this model, in order.
        prompts: folder that prompts wrote, in a run with images.
        checks: checks.json of the run, to prove that the sampler had the policy.

    Raises:
        UserError: an input is damaged, or tables, log-probs or trainer state belong to a different round or policy.
    """
    digest = policy.digest  # verifies its files before anything else reads them
    config, sampler = checkpointing.resolve(config, policy.dimensions), sampler or policy
    inputs = RoundFiles(rollouts, scores, reference, teacher, prompts).used(config)
    sampled = inputs.read(sampler.vocabulary, round=round_, policy=sampler.digest)
    proof = None if checks is None else RolloutProof(config, round_, sampler, checks, inputs)
    if proof and sampler != policy:
        proof.by_pass(sampled.rollouts)
    engine, state = retraining.trainer_after(config, round_ - 1, policy, trainer)
    trained = round_training.train(config, round_, engine, state, sampled, proof)
    measured = round_training.metrics_of(config, round_, engine, sampled, trained)
    if engine.rank.first:
        say(round_training.summary(measured, trained.seconds) + _share_of_peak(config, engine, trained))
    cards = lineage.cards_of([*inputs.rollouts[:1], *inputs.reference[:1], *inputs.teacher[:1]])
    cards |= reproducible.card(config.reproducible, "trainer")
    made_from = lineage.of_policy(config.seed, policy.manifest, digest, cards)
    on_nodes = config.node_folder is not None and not config.keeps(round_)
    policy_digest = engine.save_policy(output, on_nodes, **made_from)
    about = {"round": round_, "policy": policy_digest, "seed": config.seed}
    if engine.rank.first:
        more = {"run": config.run, "micro_batch_tokens": config.deepspeed.micro_batch_tokens}
        _write_table(trained, measured, table, about | more | lineage.of_metrics(measured, inputs.scores[0]))
        files.write_json(metrics, measured)
        write_events(events, round_, measured)
    retraining.keep(config, RoundTrainer(engine, trained.algorithm_state), output, trainer, about)


def restore(config: Config, policy: Policy, trainer: Path) -> None:
    """Rewrites the weights of a policy that a node's own disk has lost, and the trainer's state after its round.

    Args:
        config: the configuration of `update`.
        policy: the policy, without its weights.
        trainer: as for `update`.

    Raises:
        UserError: see `retraining.restore`.
    """
    config = checkpointing.resolve(config, Policy(policy.folder.with_name(f"{0:05d}")).dimensions)
    restored = retraining.restore(config, policy, trainer)
    about = {"round": int(policy.folder.name), "policy": policy.digest, "seed": config.seed}
    retraining.keep(config, restored, policy.folder, trainer, about)


def _share_of_peak(config: Config, engine: Engine, trained: TrainedRound) -> str:
    """A clause with the share of the cards' peak speed that the optimizer steps reached."""
    if not trained.steps:
        return ""
    prompts, completions = (tables.lengths(trained.rollouts[name]) for name in ("prompt_ids", "completion_ids"))
    masked = trained.batch.masked.tolist()
    passed = [0 if without else length for without, length in zip(masked, completions, strict=True)]
    return peak_share.of_update(config, engine.policy, prompts, passed, trained.seconds, engine.rank.world)


def _write_table(trained: TrainedRound, metrics: Metrics, file: Path, about: JSON) -> None:
    """Writes train.parquet."""
    known = metrics["ratio/mean"] is not None
    table = round_data.train_table(trained.rollouts, trained.batch, trained.record, ratio_known=known)
    tables.write(file, table, tables.TRAIN, "train", **about)
