"""A model of images learns colours, from the configuration to the page."""

import json
import re

import pytest
import yaml
from helpers import ROOT, Project, merged

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_a_model_of_images_learns_colours(tmp_path) -> None:
    project = Project(tmp_path / "project")
    config = yaml.safe_load((ROOT / "config" / "vision-demo.yaml").read_text())
    (project.folder / "vision.yaml").write_text(yaml.safe_dump(config | {"rounds": 12}))
    outcome = project.snakemake("--cores", "1", "--configfile", "vision.yaml")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    run = project.folder / "results" / config["run"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["warmstart"]["accuracy"] < 0.1
    assert summary["final"]["accuracy"] > 0.5, "without the image one in four is right"
    page = (run / "report.html").read_text()
    assert page.count('<img class="shown" src="data:image/webp;base64,') > 20


def test_the_reference_of_an_adapter_is_policy_0_with_the_images_of_the_prompts(tmp_path) -> None:
    project = Project(tmp_path / "project")
    config = yaml.safe_load((ROOT / "config" / "vision-demo.yaml").read_text())
    changes = {"rounds": 2, "algorithm": {"beta": 0.01}, "update": {"lora": {"r": 8}}}
    (project.folder / "vision.yaml").write_text(yaml.safe_dump(merged(config, changes)))
    planned = project.snakemake("--dry-run", "--configfile", "vision.yaml").stdout
    folder = f"results/{config['run']}"
    for number in ("00001", "00002"):
        [command] = re.findall(rf"rloo reference .*--output {folder}/rounds/{number}/reference/000.parquet", planned)
        assert f" --policy {folder}/policies/00000 " in command
        assert f" --prompts {folder}/prompts " in command
