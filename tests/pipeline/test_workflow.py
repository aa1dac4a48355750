"""The workflow as Snakemake sees it: lint, DAG, sizes, and errors before anything runs."""

import re
import shutil

import pytest
import yaml
from helpers import ROOT, Project, merged

PICTURE = {
    ("stage_assets", "prompts"),
    ("prompts", "warmstart"),
    ("warmstart", "probe"),
    ("probe", "checks"),
    ("warmstart", "rollout"),
    ("checks", "update"),
    ("update", "gate"),
    ("gate", "rollout"),
    ("rollout", "score"),
    ("rollout", "reference"),
    ("score", "update"),
    ("reference", "update"),
    ("update_last", "evaluate"),
    ("evaluate", "report"),
    ("evaluate", "distance"),
    ("distance", "report"),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    return Project(tmp_path_factory.mktemp("workflow") / "project")


def test_lint_finds_nothing(project) -> None:
    outcome = project.snakemake("--lint")
    assert outcome.returncode == 0, outcome.stderr
    assert "Congratulations, your workflow is in a good condition!" in outcome.stderr


def test_the_rule_graph_has_the_expected_arrows(project) -> None:
    graph = project.snakemake("--rulegraph").stdout
    names = dict(re.findall(r'(\d+)\[label = "(\w+)"', graph))
    arrows = {(names[a], names[b]) for a, b in re.findall(r"(\d+) -> (\d+)", graph)}
    assert arrows >= PICTURE


def test_without_beta_the_reference_is_not_run(project) -> None:
    assert any("reference" in file for file in project.planned())
    assert not any("reference" in file for file in project.planned(algorithm={"beta": 0}))


def test_kept_policies_are_evaluated_as_often_as_asked(project) -> None:
    planned = project.planned(rounds=6, evaluation={"every": 2})
    names = {file.split("/")[1] for file in planned if file.startswith("evaluation/")}
    assert names == {"warmstart", "00002", "00004", "final"}
    outcome = project.snakemake("--dry-run", keep_every=2, evaluation={"every": 3})
    assert "evaluation.every (3) is not a multiple of keep_every (2)" in outcome.stdout + outcome.stderr


def test_each_node_of_an_update_gets_as_many_tasks(project) -> None:
    """Of `--nodes=2 --ntasks=8` alone, SLURM may make 7 tasks and 1."""
    outcome = project.snakemake("--dry-run", deepspeed={"processes": 8, "nodes": 2})
    asked = re.findall(r"resources: .*\bnodes=2, (.*), tasks_per_gpu=0", outcome.stdout + outcome.stderr)
    assert {*asked} == {"tasks_per_node=4, tasks=0, cpus_per_task=1"}


def test_a_limit_of_time_or_memory_holds_for_each_slurm_job_and_not_for_all_together(project) -> None:
    """A partition may allow ten minutes, which Snakemake would otherwise let concurrent jobs share."""
    shown = 'print(*map(workflow.resource_scopes.is_local, ["runtime", "mem_mb"]))'
    (project.folder / "scopes").write_text(f"{(project.folder / 'Snakefile').read_text()}\n{shown}\n")
    limits = ("--resources", "runtime=10", "mem_mb=5000")
    outcome = project.snakemake("--dry-run", "--snakefile", "scopes", *limits)
    assert outcome.returncode == 0, outcome.stderr
    assert "True True\n" in outcome.stdout
    output = outcome.stdout + outcome.stderr
    assert set(re.findall(r" runtime=(\d+)", output)) == {"10"}
    assert set(re.findall(r" mem_mb=(\d+)", output)) == {"4000", "5000"}


def test_a_reward_function_that_needs_a_gpu_has_jobs_of_its_own(project) -> None:
    rewards = [
        {"function": "rloo_pipeline.rewards.answer:exact_answer_reward", "name": "answer"},
        {"function": "rloo_pipeline.rewards.model:reward_model", "gpus": 2, "options": {"model": "x"}, "batch": "all"},
    ]
    changes = {"rewards": rewards}
    parts = {file for file in project.planned(**changes) if "/scores/parts/" in file}
    assert {f"rounds/00001/scores/parts/reward_model/{shard:03d}.parquet" for shard in range(2)} <= parts
    assert all("reward_model" in file for file in parts)
    outcome = project.snakemake("--dry-run", **changes)
    output = outcome.stdout + outcome.stderr
    assert "gres=gpu:2" in output
    assert "rloo score --only reward_model" in output


def test_only_kept_policies_outlive_the_run(project) -> None:
    outcome = project.snakemake("--dry-run", rounds=5, keep_every=2, algorithm={"beta": 0})
    removed = set(re.findall(r"Would remove temporary output results/mini/(\S+)", outcome.stdout + outcome.stderr))
    assert removed == {"policies/00001", "policies/00003"}


def test_with_a_lag_the_last_policies_stay_for_a_longer_run(project) -> None:
    outcome = project.snakemake("--dry-run", rounds=6, keep_every=3, algorithm={"beta": 0}, rollout={"lag": 1})
    removed = set(re.findall(r"Would remove temporary output results/mini/(\S+)", outcome.stdout + outcome.stderr))
    assert {name for name in removed if "policies" in name} == {f"policies/{number:05d}" for number in (1, 2, 4)}


def test_with_a_lag_rollouts_wait_for_an_older_policy_and_updates_for_the_gate_in_between(project) -> None:
    outcome = project.snakemake("--dry-run", rounds=4, rollout={"lag": 2, "shards": 1})
    jobs = re.findall(
        r"^rule (\w+):\n    input: (.*)\n    output: results/mini/([^\s,]+)", outcome.stdout, re.MULTILINE
    )
    needed = {output: set(re.findall(r"(policies/\d+|rounds/\d+/diagnosis.json)", files)) for _, files, output in jobs}
    first_rounds = [needed[f"rounds/{number:05d}/rollouts/000.parquet"] for number in (1, 2, 3)]
    assert first_rounds == [{"policies/00000"}] * 3
    assert needed["rounds/00004/rollouts/000.parquet"] == {"policies/00001", "rounds/00001/diagnosis.json"}
    assert "rounds/00003/diagnosis.json" in needed["policies/00004"]


REFILL = {"rollout": {"lag": 1, "refill": 2}, "algorithm": {"filter_zero_variance": True}}


def test_a_refill_is_one_job_a_round_between_scores_and_update(project) -> None:
    """Whatever its number is: with a lag it samples from the older policy, too."""
    outcome = project.snakemake("--dry-run", rounds=4, **REFILL)
    policies_and_rounds = re.findall(r"rloo refill .* --policy results/mini/(\S+) --round (\d+) ", outcome.stdout)
    assert sorted(policies_and_rounds, key=lambda pair: pair[1]) == [
        (f"policies/{policy:05d}", f"{number:05d}") for policy, number in ((0, 1), (0, 2), (1, 3), (2, 4))
    ]
    [third] = re.findall(r"rloo update --round 00003 .*", outcome.stdout)
    for kind in ("rollouts", "scores", "reference"):
        folder = "results/mini/rounds/00003"
        files = [f"{folder}/{kind}/00{shard}.parquet" for shard in range(2)] + [f"{folder}/refill/{kind}.parquet"]
        assert f"--{kind} {' '.join(files)} " in third


def test_a_dry_run_writes_nothing(project) -> None:
    """Nor does it overwrite a finished run's configuration with another one."""
    path = project.folder / "results" / "mini" / "config.yaml"
    assert not path.exists(), "nor did any of the tests above"
    path.parent.mkdir(parents=True)
    path.write_text("as it was\n")
    assert project.snakemake("--dry-run", rounds=7).returncode == 0
    assert path.read_text() == "as it was\n"
    assert [file.name for file in path.parent.iterdir()] == ["config.yaml"]
    shutil.rmtree(project.folder / "results")


def test_a_dry_run_of_many_rounds_is_planned(project) -> None:
    """500 rounds are beyond Python's default recursion limit; 1,000 are in the README's table."""
    planned = project.planned(rounds=500, algorithm={"beta": 0})
    assert "policies/00500" in planned
    assert "rounds/00500/rollouts/001.parquet" in planned


def test_a_reward_function_that_is_not_there_stops_before_anything_runs(project) -> None:
    changes = {"rewards": [{"function": "no_such.module:f"}]}
    outcome = project.snakemake("--cores", "1", **changes)
    output = outcome.stdout + outcome.stderr
    assert outcome.returncode == 1
    assert "Traceback" not in output
    assert "WorkflowError" in output
    assert "'no_such.module:f': no module" in output


def test_without_the_option_for_images_no_image_is_needed(project) -> None:
    assert project.planned("--", "results/mini/assets", container={"image": "images/none.sif"}) == {"assets"}


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "config").glob("*.yaml")))
def test_the_shipped_configurations_are_valid(name) -> None:
    """A file without rounds is an overlay for any other configuration, or an experiment."""
    from rloo_pipeline.config.loading import validate
    from rloo_pipeline.config.run_set import read_runs

    config = yaml.safe_load((ROOT / "config" / name).read_text())
    if "base" in config:
        assert len(read_runs(ROOT / "config" / name).configs) == 15
        return
    if "rounds" not in config:
        config = merged(yaml.safe_load((ROOT / "config" / "config.yaml").read_text()), config)
    assert validate(config, name).rounds >= 1


@pytest.mark.slow
def test_with_a_lag_the_earlier_of_two_rounds_comes_first(tmp_path, monkeypatch) -> None:
    """On one core: rounds 1 to 3 can all be sampled from policy 0, and the first update waits for round 1 alone."""
    project = Project(tmp_path / "project")
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "bench"))
    import whole

    project.environment |= whole.empty_rloo(tmp_path / "bin")
    stub = tmp_path / "bin" / "rloo"
    stub.write_text(stub.read_text().replace("stage=$1", 'echo "$@" >>called.txt\nstage=$1', 1))
    changes = {"rounds": 5, "rollout": {"lag": 2, "shards": 3}, "workers": "never", "algorithm": {"beta": 0}}
    outcome = project.snakemake("--cores", "1", "--", "results/mini/policies/00005", **changes)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    called = (project.folder / "called.txt").read_text()
    order = re.findall(r"^(rollout|update) .*--round 0000(\d)", called, re.MULTILINE)
    assert order == [pair for number in "12345" for pair in [("rollout", number)] * 3 + [("update", number)]]
