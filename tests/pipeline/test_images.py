"""A model of images learns colours, from the configuration to the page."""

import json

import pytest
import yaml
from helpers import ROOT, Project, merged

pytestmark = pytest.mark.slow

SHORT = {
    "rounds": 2,
    "dataset": {"train": {"options": {"size": 48}}, "eval": {"options": {"size": 16}}},
    "rollout": {"generation_batch_size": 64, "num_generations": 4},
    "algorithm": {"beta": 0.01, "steps_per_generation": 1},
    "checks": {"probe_prompts": 8},
}
"""Changes that make a run short, with a reference model."""


@pytest.mark.long
def test_a_model_of_images_learns_colours(tmp_path) -> None:
    project = Project(tmp_path / "project")
    config = yaml.safe_load((ROOT / "config" / "vision-demo.yaml").read_text())
    (project.folder / "vision.yaml").write_text(yaml.safe_dump(config))
    outcome = project.snakemake("--cores", "2", "--configfile", "vision.yaml")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    run = project.folder / "results" / config["run"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["warmstart"]["accuracy"] < 0.1
    assert summary["final"]["accuracy"] > 0.5, "without the image one in four is right"
    page = (run / "report.html").read_text()
    assert page.count('<img class="shown" src="data:image/webp;base64,') > 20


@pytest.mark.long
def test_sampler_and_trainer_agree_on_an_adapter_of_gemma(tmp_path) -> None:
    project = Project(tmp_path / "project")
    config = merged(yaml.safe_load((ROOT / "config" / "vision-demo.yaml").read_text()), SHORT)
    config = merged(config, {"model": {"build_options": {"model_type": "gemma3"}}, "update": {"lora": {"r": 8}}})
    (project.folder / "vision.yaml").write_text(yaml.safe_dump(config))
    outcome = project.snakemake("--cores", "1", "--configfile", "vision.yaml")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    rounds = project.folder / "results" / config["run"] / "rounds"
    for number in ("00001", "00002"):
        metrics = json.loads((rounds / number / "metrics.json").read_text())
        assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert abs(metrics["kl"]) > 1e-4, "the adapter is not nothing"
