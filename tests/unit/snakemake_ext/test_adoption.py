"""Files of a copied run that `rloo adopt` accepts; tests/pipeline has whole runs."""

import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from helpers import mini

from rloo_pipeline.artifacts import assets, files, manifest, tables
from rloo_pipeline.config import Config
from rloo_pipeline.config.run_set import runs_of
from rloo_pipeline.errors import UserError
from rloo_pipeline.snakemake_ext import adoption, run_sources


def test_a_policy_that_was_lost_with_a_nodes_disk_is_left_to_the_next_call_and_a_damaged_one_is_refused(
    tmp_path,
) -> None:
    policy = tmp_path / "policies" / "00001"
    policy.mkdir(parents=True)
    weights = tmp_path / "node" / ".00001.tmp" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_text("weights")
    (policy / "model.safetensors").symlink_to(weights)
    manifest.write_manifest(policy, policy="00001")
    weights.unlink()
    adoption.check_files(tmp_path, Config(**mini()), set())
    weights.write_text("another")
    with pytest.raises(UserError, match=r"model\.safetensors was changed since it was written"):
        adoption.check_files(tmp_path, Config(**mini()), set())


def test_tables_that_no_job_of_the_run_makes_any_more_are_left_alone(tmp_path) -> None:
    """As the reference log-probs of earlier rollouts after `algorithm.beta` was set to 0."""
    rollouts, reference = (tmp_path / "rounds" / "00001" / kind / "000.parquet" for kind in ("rollouts", "reference"))
    tables.write(rollouts, [], tables.ROLLOUTS, "rollouts")
    tables.write(reference, [], tables.REFERENCE, "reference", rollouts="others")
    adoption.check_files(tmp_path, Config(**mini()), {rollouts})
    with pytest.raises(UserError, match=r"reference/000\.parquet"):
        adoption.check_files(tmp_path, Config(**mini()), {rollouts, reference})


@pytest.mark.parametrize("name", ["reward_model/model/model.safetensors", "judgements.parquet", "test/0/summary.json"])
def test_damage_is_found_in_all_that_a_run_makes(tmp_path, name) -> None:
    config, file = Config(**mini()), tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    made = {file.parent if file.suffix == ".safetensors" else file}
    if file.suffix == ".safetensors":
        file.write_bytes(b"weights")
        manifest.write_manifest(file.parent)
    elif file.suffix == ".parquet":
        tables.write(file, [], tables.TRAIN, "train")
    else:
        files.write_json(file, {"rows": 1})
    adoption.check_files(tmp_path, config, made)
    file.write_bytes(file.read_bytes()[1:] + b"x")
    with pytest.raises(UserError, match=name):
        adoption.check_files(tmp_path, config, made)
    adoption.check_files(tmp_path, config, set())  # left over from earlier keys


def test_what_an_earlier_training_of_the_run_left_is_not_adopted(tmp_path) -> None:
    """As after a change of the learning rate and a kill: later rounds and evaluations are those of the old policies."""
    rounds = tmp_path / "rounds"
    tables.write(rounds / "00001" / "train.parquet", [], tables.TRAIN, "train", policy="new 1")
    tables.write(rounds / "00002" / "train.parquet", [], tables.TRAIN, "train", policy="new 2")
    rollouts, summary = (
        rounds / "00002" / "rollouts" / "000.parquet",
        tmp_path / "evaluation" / "final" / "summary.json",
    )
    for digests in (("new 1", "new 2"), ("old 1", "new 2"), ("new 1", "old 2")):
        tables.write(rollouts, [], tables.ROLLOUTS, "rollouts", policy=digests[0])
        files.write_json(summary, {"policy": digests[1]})
        found = f"its policy is old {1 if 'old 1' in digests else 2}, but new . is expected here"
        with pytest.raises(UserError, match=found) if "old" in str(digests) else nullcontext():
            adoption.check_files(tmp_path, Config(**mini()), {rollouts, summary})


def test_a_model_that_was_copied_after_the_run_is_accepted_if_it_is_the_same(tmp_path) -> None:
    model, folder = tmp_path / "model", tmp_path / "assets"
    for path in (model, folder):
        path.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    places = {"model": {"path": str(model), "revision": None}, "train": {"path": str(tmp_path / "x"), "revision": None}}
    (tmp_path / "x").touch()
    assets.write(folder, places)
    (tmp_path / "x").unlink()
    later = (folder / assets.ASSETS).stat().st_mtime - 60
    os.utime(folder / assets.ASSETS, (later, later))
    assert run_sources.replaced(folder)
    adoption.accept_sources(folder)
    assert run_sources.replaced(folder) is None
    (model / "model.safetensors").write_bytes(b"another")
    with pytest.raises(UserError, match=r"model\.safetensors was changed"):
        adoption.accept_sources(folder)


def test_a_run_that_is_not_there_is_not_adopted(tmp_path) -> None:
    call: Any = SimpleNamespace(
        workflow=SimpleNamespace(executor_plugin=SimpleNamespace(name="touch")),
        runs=SimpleNamespace(by_folder={"results/mini": Config(**mini())}),
        run_folder=lambda run: tmp_path / run,
        outputs=list,
    )
    with pytest.raises(UserError, match=r"results/mini: no run to adopt; copy its folder there first"):
        adoption.check(call)


def test_a_copied_experiment_whose_shared_files_are_newer_is_not_made_again(tmp_path) -> None:
    """As by `cp -r` without .snakemake: its policies are older than the rollouts that they were trained on."""
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(mini()))
    runs = runs_of(
        {"experiment": "study", "base": "base.yaml", "arms": {"a": {}, "b": {"rounds": 3}}, "seeds": [0]},
        tmp_path / "study.yaml",
        "",
    )
    files.write_json(tmp_path / "study" / "a" / "0" / "summary.json", {})
    home = runs.homes["study/a/0"]["rollout"]
    reason = SimpleNamespace(forced=False, updated_input={f"{tmp_path}/{home}/rounds/00001"}, updated_input_run=())
    record = SimpleNamespace(endtime=0.0)
    call: Any = SimpleNamespace(
        workflow=SimpleNamespace(
            executor_plugin=SimpleNamespace(name="local"),
            dag=SimpleNamespace(reason=lambda job: reason, needrun_jobs=lambda: ["update"]),
            persistence=SimpleNamespace(_read_record=lambda file: record),
        ),
        runs=runs,
        run_folder=lambda run: tmp_path / run,
    )
    with pytest.raises(UserError, match=r"study/a/0 is finished, but \S+/shared/rollout-\S+ is newer"):
        adoption.refuse_copy(call)
    reason.updated_input = {f"{tmp_path}/study/b/0/rounds/00001"}
    adoption.refuse_copy(call)
    record.endtime = (tmp_path / "study" / "a" / "0" / "summary.json").stat().st_mtime
    reason.updated_input = {f"{tmp_path}/{home}/rounds/00001"}
    adoption.refuse_copy(call)
