"""A damaged artifact is one sentence of the stage that reads it, which names the file and says what to do."""

import damage
import forks
import pytest
from helpers import Project

from rloo_pipeline.artifacts import model_files, tables

pytestmark = pytest.mark.slow
FAST = {
    ("prompts/train/data-00000-of-00001.arrow", "a sibling"),
    ("policies/00000/model.safetensors", "a bit flipped"),
    ("policies/00000/model.safetensors", "a sibling"),
    ("rounds/00001/rollouts/000.parquet", "a bit flipped"),
    ("rounds/00001/rollouts/000.parquet", "wrong shape"),
    ("rounds/00001/reference/000.parquet", "wrong shape"),
    ("rounds/00001/reference/000.parquet", "NaN"),
    ("rounds/00001/scores/000.parquet", "a sibling"),
    ("trainer/00002/state/mp_rank_00_model_states.pt", "a bit flipped"),
    ("rounds/00001/metrics.json", "a sibling"),
    ("evaluation/final/completions.parquet", "a sibling"),
}
"""Cells that run without `--long`: the kinds of files, and what a digest alone does not find."""
CELLS = [
    pytest.param(
        artifact, name, id=f"{artifact.file}-{name}", marks=[] if (artifact.file, name) in FAST else pytest.mark.long
    )
    for artifact in damage.ARTIFACTS
    for name in damage.DAMAGES
    if damage.applies(artifact, name)
]


@pytest.fixture(scope="module")
def project(finished, tmp_path_factory) -> Project:
    copy = Project(tmp_path_factory.mktemp("damage") / "project").take(finished)
    damage.prepare(copy)
    return copy


@pytest.mark.parametrize(("artifact", "name"), CELLS)
def test_damage_gives_a_one_line_error(project, artifact, name) -> None:
    stage, _ = damage.sentence(project, artifact, name)
    assert stage == artifact.reader[0]


def test_an_evaluation_that_an_earlier_training_left_is_not_reported(project) -> None:
    """As if round 2 had been trained again since."""
    table = project.folder / damage.RUN / "rounds" / "00002" / "train.parquet"
    before = table.read_bytes()
    trained = tables.read(table, "train")
    tables.save(table, trained.replace_schema_metadata({**tables.footer(trained), "policy": "another"}))
    outcome = forks.run(
        "rloo_pipeline", [*damage.REPORT, "--output", f"{damage.OUT}/out"], project.environment, project.folder
    )
    table.write_bytes(before)
    assert outcome.returncode == 1
    assert "evaluation/final/summary.json: its policy is " in outcome.stderr
    assert ", but another is expected here; delete " in outcome.stderr


@pytest.mark.long
def test_a_policy_with_nan_samples_nothing(project, tmp_path) -> None:
    """Even if its manifest is right, as after an update that made the weights so."""
    from rloo_pipeline.artifacts import policy

    copy = Project(tmp_path / "project").take(project)
    folder = copy.folder / damage.RUN / "policies" / "00000"
    damage.poison(folder / model_files.WEIGHTS, folder)
    policy.seal(folder, folder.name)
    outcome = forks.run(
        "rloo_pipeline", [*damage.ROLLOUT, "--output", f"{damage.OUT}/out"], copy.environment, copy.folder
    )
    assert outcome.returncode == 1
    assert "the policy's log-probs are not finite" in outcome.stderr
    assert "Traceback" not in outcome.stderr
