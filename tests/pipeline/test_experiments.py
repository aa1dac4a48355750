"""An experiment is one DAG: what its arms share is made once, and a failed arm leaves the others alone."""

import json
import re
import shutil

import pytest
import yaml
from helpers import Project, mini, printed

import rloo_pipeline
from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.files import read_artifact
from rloo_pipeline.commands.plan import plan
from rloo_pipeline.config.run_set import read_runs

SMALL = {
    "rounds": 1,
    "algorithm": {"beta": 0},
    "rollout": {"shards": 1},
    "evaluation": {"greedy": False},
}


def write(project: Project, base: dict, **keys) -> None:
    """Writes an experiment `study` where the project's configuration is."""
    project.folder.joinpath("config/base.yaml").write_text(yaml.safe_dump(base))
    content = {"experiment": "study", "base": "base.yaml", **keys}
    project.folder.joinpath("config/test.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    project.configure = lambda **_: None


def planned(project: Project) -> dict[str, int]:
    """Jobs by rule in a dry run."""
    outcome = project.snakemake("--dry-run", "--quiet", "rules")
    table = (outcome.stdout + outcome.stderr).partition("\njob ")[2].partition("\ntotal ")[0].splitlines()[2:]
    return {row.split()[0]: int(row.split()[1]) for row in table}


@pytest.fixture
def project(tmp_path) -> Project:
    return Project(tmp_path / "project")


def test_what_arms_share_is_made_once(project) -> None:
    write(project, mini(), vary={"algorithm.preset": ["rloo", "grpo"]}, seeds=[0, 1])
    jobs = planned(project)
    assert [jobs[name] for name in ("stage_assets", "prompts", "warmstart", "probe", "checks")] == [2] * 5
    assert jobs["rollout"] == jobs["score"] == jobs["reference"] == 2 * 2 + 4 * 2, (
        "round 1 for each seed, round 2 for each run"
    )
    assert (jobs["update"], jobs["update_last"], jobs["evaluate"], jobs["report"]) == (4, 4, 2 + 4, 4)
    assert not (project.folder / "results").exists()


def test_replaced_weights_of_a_local_model_are_refused_until_the_shared_assets_are_made_again(
    project, tiny_model, tmp_path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    source = {"name_or_path": str(model), "build": None, "build_options": {}}
    write(project, mini(model=source), vary={"algorithm.preset": ["rloo", "grpo"]}, seeds=[0])
    (home,) = {homes["assets"] for homes in read_runs(project.folder / "config/test.yaml").homes.values()}
    folder = f"results/{home}/assets"
    assert project.snakemake("--cores", "1", "--", folder).returncode == 0
    (model / "model.safetensors").touch()
    outcome = project.snakemake("--cores", "1", "--", folder)
    assert outcome.returncode == 1
    assert f"add --forcerun {folder} to begin again" in outcome.stdout + outcome.stderr
    outcome = project.snakemake("--cores", "1", "--forcerun", folder, "--", folder)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert project.snakemake("--cores", "1", "--", folder).returncode == 0


def test_arms_that_choose_other_prompts_share_the_pass_rates_of_policy_0(project) -> None:
    arms = {
        "all": {},
        "some": {"dataset.select.pass_rate": [0.1, 0.9]},
        "few": {"dataset.select.pass_rate": [0.3, 0.7]},
        "online": {"dataset.select": {"pass_rate": [0.3, 0.7], "weights": "online"}},
    }
    write(project, mini(correct={"reward": "answer"}), arms=arms, seeds=[0, 1])
    jobs = planned(project)
    assert [jobs[name] for name in ("prompts", "warmstart", "probe", "checks")] == [2] * 4
    assert jobs["difficulty"] == 2 * 2, "for each seed two shards"
    assert jobs["evaluate"] == 2 + 8, "the held-out prompts are the same"
    assert jobs["rollout"] == 2 * (4 * 2 + 4 * 2), "round 1 is no longer shared"
    assert jobs["pass_rates"] == 2, "of round 1 of each run of one arm"


def test_arms_may_differ_in_their_rounds(project) -> None:
    write(project, mini(), arms={"short": {}, "long": {"rounds": 5, "keep_every": 2}}, seeds=[0])
    jobs = planned(project)
    assert (jobs["update"], jobs["update_transient"], jobs["update_last"]) == (1 + 2, 2, 2)


def test_only_what_is_chosen_is_evaluated_on_the_test_rows(project) -> None:
    dev = {"generator": "rloo_pipeline.demo.arithmetic:problems", "options": {"split": "dev", "size": 50}}
    arms = {"a": {}, "b": {"update.learning_rate": 1e-5}}
    ranks = {"processes": 8, "nodes": 2, "zero_stage": 3}  # the proof runs on them, too
    write(project, mini(dataset={"dev": dev}, deepspeed=ranks), arms=arms, seeds=[0, 1, 2], select={"by": "dev.pass@1"})
    jobs = planned(project)
    assert (jobs["select"], jobs["evaluate_chosen"], jobs["prove_chosen"], jobs["evaluate"]) == (1, 3, 3, 3 + 6)
    text = printed(plan, read_runs(project.folder / "config" / "test.yaml"), None)
    assert re.search(rf"^all +{sum(jobs.values()) - jobs['default']} ", text, re.MULTILINE), text


@pytest.mark.slow
@pytest.mark.long
def test_a_failed_arm_leaves_the_others_alone_and_another_seed_runs_only_that(project) -> None:
    reward = project.folder / "broken.py"
    reward.write_text("def broken(completions):\n    raise KeyError('no such thing')\n")
    broken = [{"function": "broken.py:broken", "name": "answer"}]
    arms = {"good": {}, "bad": {"rewards": broken}, "slow": {"update.learning_rate": 1e-5}}
    write(project, mini(**SMALL), arms=arms, seeds=[0])
    outcome = project.snakemake("--cores", "2", plain=False)
    assert outcome.returncode == 1
    output = outcome.stdout + outcome.stderr
    assert "failed: score, run study/bad/0, round 1, shard 0" in output, "not the folder of shared files"
    assert "reward 'answer' (broken.py:broken) raised KeyError: 'no such thing'" in output
    folder = project.folder / "results" / "study"
    assert {run for run in arms if (folder / run / "0" / "summary.json").exists()} == {"good", "slow"}
    assert "rloo run results/study/good/0/config.yaml" in (folder / "good/0/report.html").read_text(encoding="utf-8")
    good, slow = (rloo_pipeline.open_run(folder / arm / "0") for arm in ("good", "slow"))
    assert good.prompts().num_rows == slow.prompts().num_rows == 200
    assert good.rollouts(1)["completion"] == slow.rollouts(1)["completion"]
    assert (good.folder / "rounds/00001/rollouts").resolve() == (slow.folder / "rounds/00001/rollouts").resolve()
    assert good.metrics()["learning_rate"][1] != slow.metrics()["learning_rate"][1]

    write(project, mini(**SMALL), arms={name: arms[name] for name in ("good", "slow")}, seeds=[0, 3])
    outcome = project.snakemake("--dry-run", "--logger-rloo-plain")
    output = outcome.stdout + outcome.stderr
    runs = set(re.findall(r"wildcards: run=study/((?:good|slow)/\d+)", output))
    assert runs == {"good/3", "slow/3"}, "nothing of seed 0 runs again"

    for names in (("good", "slow"), ("slow", "good")):
        write(project, mini(**SMALL), arms={name: arms[name] for name in names}, seeds=[0])
        outcome = project.snakemake("--cores", "1")
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
        assert json.loads((folder / "experiment.json").read_text())["baseline"] == names[0]


@pytest.mark.slow
@pytest.mark.long
def test_the_chosen_policy_is_evaluated_on_the_test_rows_and_its_completions_are_proven(project) -> None:
    dev = {"generator": "rloo_pipeline.demo.arithmetic:problems", "options": {"split": "dev", "size": 50}}
    arms = {"a": {}, "b": {"update.learning_rate": 1e-5}}
    write(project, mini(**SMALL, dataset={"dev": dev}), arms=arms, seeds=[0], select={"by": "dev.pass@1"})
    outcome = project.snakemake("--cores", "1")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    folder = project.folder / "results" / "study"
    [chosen] = read_artifact(folder / "selection.json")["chosen"]
    summary = read_artifact(folder / "test" / "0" / "summary.json", policy=chosen["policy"])
    assert read_artifact(folder / "test" / "0" / "proof.json", policy=chosen["policy"])["tokens"] > 0
    table = tables.read(folder / "test" / "0" / "completions.parquet", "completions", policy=chosen["policy"], seed=0)
    assert len(table) == summary["prompts"] * summary["num_generations"]
    assert not list((folder / ".fence").iterdir()), "whoever writes the test holds the token of the experiment's folder"
