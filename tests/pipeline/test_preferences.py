"""Preferences to a reward model to a round of RLOO with it: what runs again, and the same bytes after a kill."""

import json

import pytest
from helpers import Project, mini, rloo

from rloo_pipeline.artifacts.lineage import facts_of
from rloo_pipeline.artifacts.manifest import digest

pytestmark = pytest.mark.slow

PREFERENCES = {
    "rounds": 1,
    "rollout": {"shards": 1},
    "evaluation": {"greedy": False},
    "reward_model": {
        "train": {
            "generator": "rloo_pipeline.demo.arithmetic:preferences",
            "options": {"split": "train", "size": 300, "worked_share": 0.0},
        },
        "batch_size": 32,
        "learning_rate": 0.003,
    },
    "rewards": [{"function": "rloo_pipeline.rewards.model:reward_model", "batch": "all"}, *mini()["rewards"]],
    "correct": {"reward": "answer"},
    "checks": {"accept": ["pair_accuracy"]},
    "judge": {"function": "judges.py:longer"},
}
JUDGE = """
def longer(completions, other_completions, **_):
    pairs = zip(completions, other_completions)
    return [(len(one) > len(other)) + (len(one) == len(other)) / 2 for one, other in pairs]
"""
KILLED_AT_ONCE = (
    "reward_model",
    "warmstart",
    "rounds",
    "policies/00001",
    "trainer",
    "tensorboard",
    "evaluation",
    "judgements.parquet",
)
"""Files that a run lacks after a kill while the reward model trained."""
ROUND = "results/mini/policies/00001", "results/mini/rounds/00001/held_out.json"
"""Targets that make all files of the round and its policy."""


@pytest.mark.parametrize("deciding", ["answer", "reward_model"])
def test_difficulty_waits_for_the_reward_model_only_if_it_decides(tmp_path, deciding) -> None:
    select = {"dataset": {"select": {"weights": "static", "num_generations": 2}}, "correct": {"reward": deciding}}
    target = "results/mini/warmstart/difficulty/000.parquet"
    planned = Project(tmp_path / "project").planned("--", target, **PREFERENCES | select | {"judge": None})
    assert "warmstart/difficulty/000.parquet" in planned
    assert ("reward_model/checks.json" in planned) == (deciding == "reward_model")


@pytest.mark.long
def test_a_run_scores_with_the_reward_model_that_it_trains_and_goes_on_to_the_same_bytes(tmp_path) -> None:
    project = Project(tmp_path / "project")
    (project.folder / "judges.py").write_text(JUDGE)
    outcome = project.snakemake("--cores", "1", **PREFERENCES)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    run = project.folder / "results" / "mini"
    checks = {check["name"]: check for check in json.loads((run / "warmstart/checks.json").read_text())["checks"]}
    measured = json.loads((run / "reward_model/checks.json").read_text())
    assert checks["pair_accuracy"]["value"] == measured["accuracy"]["ci95"][0]
    summary = json.loads((run / "summary.json").read_text())
    assert 0 <= summary["win_rates"]["reward_model"]["value"] <= 1
    models = json.loads(facts_of(run / "rounds/00001/scores/000.parquet")["reward_models"])
    assert models == {"reward_model": digest(run / "reward_model/model/manifest.json")}
    assert 0 <= summary["judged"]["rate"]["value"] <= 1
    assert summary["judged"]["same_in_both_orders"] == 1
    page = (run / "report.html").read_text()
    assert "win rate against the warm start, judged by longer" in page
    assert "pair_accuracy" in page
    assert "win rate against the warm start by reward_model" in page
    assert project.planned(**PREFERENCES) == set()
    before = {pattern: project.files(pattern) for pattern in ("reward_model/**/*", "policies/**/*", "rounds/**/*")}
    again = Project(tmp_path / "again").take(project, *KILLED_AT_ONCE, "summary.json", "report.html")
    (again.folder / "judges.py").write_text(JUDGE)
    outcome = again.snakemake("--cores", "1", "--", *ROUND, **PREFERENCES)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert {pattern: again.files(pattern) for pattern in before} == before
    rewards = tmp_path / "rewards.yaml"
    rewards.write_text(json.dumps({"rewards": PREFERENCES["rewards"][:1]}))
    (again.folder / "results/mini/reward_model/model/model.safetensors").write_bytes(b"others")
    refused = rloo("rescore", again.folder / "results/mini", "--rewards", rewards, "--out", tmp_path / "rescored")
    assert refused.returncode == 1
    assert "model.safetensors" in refused.stdout + refused.stderr
    changed = PREFERENCES | {"reward_model": PREFERENCES["reward_model"] | {"learning_rate": 0.001}}
    planned = project.planned(**changed)
    assert {"reward_model/checks.json", "rounds/00001/scores/000.parquet", "warmstart/checks.json"} <= planned
    assert not planned & {"policies/00000", "rounds/00001/rollouts/000.parquet", "prompts"}
