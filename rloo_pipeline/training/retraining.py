"""Brings a trainer to where a round left it: from the memory of a warm worker, or else from the newest trainer state on
disk and the tables of later rounds.

The trainer after round r is a function of the state after round s and the tables of rounds s + 1 to r. On CPUs a replay
gives the same bytes. On GPUs, or if keys that only affect speed have changed in between, it differs by rounding.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rloo_pipeline.artifacts import files, lineage, manifest, node_files, round_tables, tables
from rloo_pipeline.artifacts.model_files import policy_folder
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.round_tables import RoundFiles
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.seeds import derive
from rloo_pipeline.training import round_training, trainer_state
from rloo_pipeline.training.batch import AlgorithmState
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.plain_model import StoredTensors
from rloo_pipeline.training.settings import TrainerSettings
from rloo_pipeline.training.trainer_state import TrainerState
from rloo_pipeline.workers import engine_cache

ROUNDING = 0.5
"""Largest distance of a replayed policy from the one on disk, relative to the length of the replayed updates.

Rounding that moves an element of the gradient across 0 reverses its whole step in Adam. A wrong state or wrong tables
give about 1 or more.
"""


class RoundTrainer(NamedTuple):
    """A trainer after a round."""

    engine: Engine
    algorithm_state: AlgorithmState


def trainer_after(config: Config, round_: int, start: Policy, states: Path) -> RoundTrainer:
    """The trainer after a round, as this process has kept it, or else from the files of the run.

    Args:
        config: the stage's configuration.
        round_: number of the round; 0 for a new trainer.
        start: the policy after that round.
        states: folder with the run's trainer states.

    Raises:
        UserError: a state or a table is damaged or missing, or they do not reproduce the policy.
    """
    key = _key(config, round_, start.digest, _table(states, round_))
    kept: RoundTrainer | None = engine_cache.take("trainer", key) if round_ else None
    if kept is not None:
        kept.engine.enter_gpu()
        kept.engine.policy = start
        return kept
    trainer, before = _replayed(config, round_, start, states, newest=round_)
    engine = trainer.engine
    engine.policy = start
    if before != start:
        with _saved(engine, states) as replayed:
            if engine.rank.first:
                _compare(replayed, before.folder, engine.policy.folder)
    elif engine.rank.first:
        trainer_state.remove_older(states / f"{round_:05d}", config.rollout.lag if config.node_folder else 0)
    return trainer


def keep(config: Config, trainer: RoundTrainer, policy: Path, states: Path, about: dict[str, Any]) -> None:
    """Keeps the trainer if this process is a worker, which writes its state later; otherwise writes it now and closes
    it.

    After the last round the state is always written at once; the report removes the one before it.

    Args:
        config: the stage's configuration.
        trainer: the trainer after a round.
        policy: the round's policy.
        states: folder with the run's trainer states.
        about: facts for the state's manifest, at least the round and the policy's digest.
    """
    engine, round_ = trainer.engine, about["round"]
    about = about | {"table": engine.from_first(_table(states, round_))}  # only the first rank has written it
    state = TrainerState(engine, trainer.algorithm_state.to_json(), policy, **about)
    lag = config.rollout.lag if config.node_folder else 0
    target = states / f"{round_:05d}"
    key = _key(config, round_, about["policy"], about["table"])
    kept = engine.can_wait and engine_cache.keep("trainer", key, trainer)
    if kept and round_ < config.rounds:
        engine_cache.write_later(partial(state.write, lag=lag), target)
        return
    state.write(target, max(lag, 1))  # this round may have to run again
    if not kept:
        engine.close()


def restore(config: Config, policy: Policy, states: Path) -> RoundTrainer:
    """Recreates the trainer after the round that trained a policy, and rewrites the policy's weights that a node lost.

    The arguments are the same as for `trainer_after`.

    Raises:
        UserError: see `trainer_after`; or the weights would differ from the lost ones.
    """
    round_ = int(policy.folder.name)  # the round's own state, if it exists, has lost or damaged weights
    trainer, _ = _replayed(config, round_, policy, states, newest=round_ - 1)
    with _saved(trainer.engine, states) as replayed:
        if trainer.engine.rank.first:
            written, now = (manifest.read_manifest(folder).digests for folder in (policy.folder, replayed))
            names = {file.name for file in node_files.links(policy.folder)}
            if any(written[name] != now.get(name) for name in names) or not node_files.fill(policy.folder, replayed):
                raise UserError(
                    f"{policy}: its weights were on a node's own disk and are lost, and training its rounds again "
                    "gives different ones: set keys that only affect speed to what they were, or delete the folder and "
                    "run again, which repeats all rounds since the last policy that was kept"
                )
    trainer.engine.barrier()
    trainer.engine.policy = policy
    return trainer


def _replayed(config: Config, round_: int, start: Policy, states: Path, newest: int) -> tuple[RoundTrainer, Policy]:
    """The trainer after a round, and the policy that it was loaded with.

    The arguments are the same as for `trainer_after`, and the newest round whose state may be used.
    """
    number, state = _newest(newest, states)
    before = start
    if number < round_:
        folder = state / trainer_state.POLICY if state else start.folder.with_name(f"{0:05d}")
        before = Policy(folder, start.trust_remote_code)
    settings = TrainerSettings.from_config(config)
    if state is not None:
        digest = start.digest if number == round_ else _digest_of(states.parent, number)
        trainer_state.verify(state, settings, round=number, policy=digest)
    engine = Engine(before, settings, derive(config.seed, "update", number + 1))
    carried = AlgorithmState()
    if state is not None:
        carried = AlgorithmState.from_json(trainer_state.load(engine, state))
    for again in range(number + 1, round_ + 1):
        say(f"round {again} is trained again, since the last trainer ended before it wrote a state of it")
        carried = _train(config, again, engine, carried, states.parent)
    return RoundTrainer(engine, carried), before


def _key(config: Config, round_: int, policy: str, table: str | None) -> tuple[object, ...]:
    """Key of a kept trainer, with the digests of the policy and of train.parquet that its update wrote."""
    return TrainerSettings.from_config(config), config.model, round_, policy, table


def _table(states: Path, round_: int) -> str | None:
    """Digest of train.parquet of a round."""
    return lineage.facts_of_round(states.parent, round_).get(tables.DIGEST)


def _newest(round_: int, states: Path) -> tuple[int, Path | None]:
    """The newest state of a round up to this one, and the number of its round; 0 if there is none."""
    for folder in trainer_state.of_rounds(states):
        facts, number = lineage.facts_of(folder), int(folder.name)
        table = lineage.facts_of_round(states.parent, number)
        expected = {"policy": table.get("policy"), "table": table.get(tables.DIGEST)}
        if number <= round_ and all(facts.get(key, value) == value for key, value in expected.items() if value):
            return number, folder
    return 0, None


def _digest_of(run: Path, number: int) -> str:
    """Digest of a policy, whose folder may have been removed."""
    if number == 0:
        return Policy(policy_folder(run, 0)).digest
    return lineage.facts_of_round(run, number).get("policy", "")


def _train(config: Config, round_: int, engine: Engine, carried: AlgorithmState, run: Path) -> AlgorithmState:
    """Trains a round from the tables in its folder, whose number of shards may differ from today's."""
    folder = lineage.round_folder(run, round_)
    kinds = [sorted(folder.glob(f"{kind}/*.parquet")) for kind in ("rollouts", "scores", "reference", "teacher")]
    if not kinds[0]:
        raise UserError(f"{folder / 'rollouts'}: no tables, and no trainer state is as recent; start a new run")
    if config.rollout.refill:
        for paths in filter(None, kinds):
            paths.append(folder / round_tables.REFILL / f"{paths[0].parent.name}.parquet")
    rollouts, scores, reference, teacher = kinds
    inputs = RoundFiles(rollouts, scores, reference, teacher, run / "prompts").used(config)
    sampler = _digest_of(run, config.rollout.policy_of(round_))
    sampled = inputs.read(engine.policy.vocabulary, round=round_, policy=sampler)
    trained = round_training.train(config, round_, engine, carried, sampled)
    written = tables.read(folder / lineage.TRAIN, "train", ["prompt_id", "sample"])
    if not trained.rollouts.select(["prompt_id", "sample"]).equals(written):
        raise UserError(f"{folder}: its tables do not have the completions of {lineage.TRAIN}; delete it and run again")
    return trained.algorithm_state


@contextmanager
def _saved(engine: Engine, states: Path) -> Iterator[Path]:
    """Writes the engine's policy to a folder that exists during the block."""
    replayed = states / ".replayed.policy.tmp"
    try:
        engine.save_policy(replayed)
        yield replayed
    finally:
        if engine.rank.first:
            shutil.rmtree(replayed, ignore_errors=True)
            files.remove_temporary(states, replayed.name)


def _compare(replayed: Path, before: Path, start: Path) -> None:
    """Compares a replayed policy with the original; the replay began from `before`."""
    if _same(replayed, start):
        return
    length, distance = (_distance(start, other) for other in (before, replayed))
    if distance > ROUNDING * length:
        raise UserError(
            f"{start}: training its rounds again from their tables gives a different policy, at a distance of "
            f"{distance:.3g} from this one ({length:.3g} from {before}); delete it and run again"
        )
    share = distance / length if length else 0.0
    say(f"the replayed policy differs from {start} by rounding: {share:.2g} of the updates' length")


def _same(one: Path, other: Path) -> bool:
    """True if two policies have identical weight files."""
    digests = [{file.name: manifest.digest(file) for file in folder.glob("*.safetensors")} for folder in (one, other)]
    return digests[0] == digests[1]


def _distance(one: Path, other: Path) -> float:
    """Euclidean distance of two policies; weights that only one has, such as a new adapter's, are 0 in the other."""
    first, second = (StoredTensors(sorted(folder.glob("*.safetensors"))) for folder in (one, other))
    squares = 0.0
    for name in first.files:
        weights = first.read(name).double()
        if name in second.files:
            weights -= second.read(name)
        squares += float(weights.square().sum())
    return float(squares**0.5)
