"""A damaged trainer state ends an update before an engine is made, and a policy is restored without it."""

import re
from types import SimpleNamespace

import pytest
import torch
from helpers import mini
from safetensors.torch import save_file

from rloo_pipeline.artifacts import lineage, manifest, tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.round_tables import RoundFiles
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.training import retraining, trainer_state
from rloo_pipeline.training.batch import AlgorithmState


@pytest.mark.parametrize(
    ("about", "content", "message"),
    [
        ({}, "changed", "was changed since it was written"),
        ({"world": 8}, "values!", "trainer state with deepspeed.processes 8, but this run has 1"),
    ],
)
def test_a_state_is_verified_before_an_engine_is_made(tmp_path, monkeypatch, about, content, message) -> None:
    def engine(*_) -> None:
        raise AssertionError("an engine was made")

    monkeypatch.setattr(retraining, "Engine", engine)
    config, start, state = Config(**mini()), Policy(tmp_path / "policies" / "00001"), tmp_path / "trainer" / "00001"
    for folder in (start.folder, state):
        folder.mkdir(parents=True)
    manifest.write_manifest(start.folder, policy="00001")
    (state / "values").write_text("values!")
    facts = {"round": 1, "policy": start.digest, "world": 1, "zero_stage": 0} | about
    manifest.write_manifest(state, **facts)
    (state / "values").write_text(content)
    with pytest.raises(UserError, match=message):
        retraining.trainer_after(config, 1, start, state.parent)


def test_a_lost_policy_is_restored_from_an_earlier_state_than_its_own(tmp_path, monkeypatch) -> None:
    """Its own state had no weights either, or damaged ones."""
    start, state = Policy(tmp_path / "policies" / "00001"), tmp_path / "trainer" / "00001"
    for folder in (start.folder, state):
        folder.mkdir(parents=True)
    (start.folder / "model.safetensors").symlink_to(tmp_path / ".00001.tmp" / "lost")
    manifest.write_manifest(state, round=1)

    def engine(before: Policy, *_) -> None:
        raise RuntimeError(f"from {before.folder.name}")

    monkeypatch.setattr(retraining, "Engine", engine)
    with pytest.raises(RuntimeError, match="from 00000"):
        retraining.restore(Config(**mini()), start, state.parent)


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ([3.0, 4.0], ""),
        ([3.0, 1.6], "differs from .*start by rounding: 0.48 of the updates' length"),
        ([3.0, 6.6], "at a distance of 2.6 from this one"),
        ([0.0, 0.0], r"at a distance of 5 from this one \(5 from .*before\); delete it and run again"),
    ],
)
def test_a_replay_that_ends_elsewhere_than_the_policy_is_refused(tmp_path, monkeypatch, weights, told) -> None:
    """The update was 5 long: a new adapter's second matrix, which the policy before it lacks, has moved from 0."""
    files = {
        "before": {"a": [0.0]},
        "start": {"a": [3.0], "b": [4.0]},
        "replayed": dict(zip("ab", weights, strict=True)),
    }
    for name, tensors in files.items():
        (tmp_path / name).mkdir()
        values = {key: torch.tensor(value).reshape(1) for key, value in tensors.items()}
        save_file(values, tmp_path / name / "adapter_model.safetensors")
    folders = [tmp_path / name for name in ("replayed", "before", "start")]
    if "at a distance" in told:
        with pytest.raises(UserError, match=f"gives a different policy, {told}"):
            retraining._compare(*folders)
        return
    said = list[str]()
    monkeypatch.setattr(retraining, "say", said.append)
    retraining._compare(*folders)
    assert [bool(re.search(told, line)) for line in said] == [True] * bool(told)


def test_a_round_is_trained_again_from_all_its_tables_only_if_it_takes_the_completions_of_before(
    tmp_path, monkeypatch
) -> None:
    config = Config(**mini(rollout={"shards": 3, "refill": 1}, algorithm={"filter_zero_variance": True}))
    engine = SimpleNamespace(policy=SimpleNamespace(vocabulary=8))
    with pytest.raises(UserError, match="00002/rollouts: no tables, and no trainer state is as recent"):
        retraining._train(config, 2, engine, AlgorithmState(), tmp_path)
    folder, read = lineage.round_folder(tmp_path, 2), list[RoundFiles]()
    for name in ("rollouts/001", "rollouts/000", "scores/000", "scores/001"):
        (folder / f"{name}.parquet").parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.parquet").touch()
    rows = [
        {"prompt_id": "a", "sample": sample, "advantage": 0.0, "clipped": False, "masked": False} for sample in (0, 1)
    ]
    tables.write(folder / lineage.TRAIN, rows, tables.TRAIN, "train")
    monkeypatch.setattr(RoundFiles, "read", lambda files, *_, **__: read.append(files))
    trained = SimpleNamespace(
        rollouts=tables.read(folder / lineage.TRAIN, "train"), algorithm_state=AlgorithmState(0.5)
    )
    monkeypatch.setattr(retraining.round_training, "train", lambda *_: trained)
    assert retraining._train(config, 2, engine, AlgorithmState(), tmp_path).beta == 0.5
    files = [[str(file.relative_to(folder)) for file in files] for files in read[0][:2]]
    assert files == [
        [f"{kind}/000.parquet", f"{kind}/001.parquet", f"refill/{kind}.parquet"] for kind in ("rollouts", "scores")
    ]
    trained.rollouts = trained.rollouts.slice(1)
    with pytest.raises(UserError, match=r"00002: its tables do not have the completions of train\.parquet"):
        retraining._train(config, 2, engine, AlgorithmState(), tmp_path)


@pytest.mark.parametrize(("lag", "kept"), [(0, [6]), (1, [4, 6]), (2, [4, 6]), (3, [2, 4, 6])])
def test_with_a_lag_states_stay_from_which_older_policies_can_be_made_again(tmp_path, lag, kept) -> None:
    """States of every second round; the one of round 8 is of a longer run that was taken back."""
    states = {number: tmp_path / f"{number:05d}" for number in (2, 4, 6, 8)}
    for folder in states.values():
        folder.mkdir()
    trainer_state._remove_others(states[6], lag)
    assert [number for number, folder in states.items() if folder.exists()] == kept
