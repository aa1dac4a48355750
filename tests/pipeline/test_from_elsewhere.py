"""The workflow is used from a folder of one's own: with --directory, and as a module of another Snakefile."""

import fcntl
import json
import os
import socket
from pathlib import Path

import forks
import pytest
import yaml
from helpers import MINI, ROOT, mini

from rloo_pipeline.commands.init import init

pytestmark = pytest.mark.slow

PROMPTS = "results/mini/prompts"
MODULE = f"""
configfile: "mine.yaml"

module rloo:
    snakefile: "{ROOT}/workflow/Snakefile"
    config: config
    {{prefix}}

use rule * from rloo as rloo_*

rule mine:
    default_target: True
    input: rules.rloo_all.input
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def snakemake(folder: Path, *argv: str) -> str:
    """What Snakemake prints in a folder."""
    outcome = forks.run("snakemake", ["--cores", "1", "--workflow-profile", "none", *argv], ENVIRONMENT, folder)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout + outcome.stderr


def rules_planned(text: str) -> set[str]:
    """Names of the rules in the table of jobs of a dry run."""
    rows = text.partition("\njob ")[2].partition("\ntotal ")[0].splitlines()[2:]
    return {row.split()[0] for row in rows}


@pytest.fixture(scope="module")
def rules(tmp_path_factory) -> set[str]:
    """Rules that a run of this configuration needs, planned in the clone itself."""
    folder = tmp_path_factory.mktemp("plain")
    argv = ("--snakefile", str(ROOT / "Snakefile"), "--configfile", str(MINI))
    return rules_planned(snakemake(folder, "-n", "--quiet", "rules", *argv)) - {"default"}


def test_a_working_folder_of_ones_own(tmp_path) -> None:
    argv = ("--snakefile", str(ROOT / "Snakefile"), "--directory", str(tmp_path), "--configfile", str(MINI))
    snakemake(ROOT, *argv, "--", PROMPTS)
    assert (tmp_path / PROMPTS / "train").is_dir()
    assert yaml.safe_load((tmp_path / "results" / "mini" / "config.yaml").read_text())["run"] == "mini"


@pytest.mark.parametrize("prefix", ["", pytest.param("study", marks=pytest.mark.long)])
def test_a_module_of_another_workflow(tmp_path, prefix, rules) -> None:
    """Without a prefix it is only planned: the project of a wheel, in test_wheel.py, runs as such a module."""
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mini()))
    line = f'prefix: "{prefix}"' if prefix else ""
    (tmp_path / "Snakefile").write_text(MODULE.format(prefix=line))
    planned = rules_planned(snakemake(tmp_path, "-n", "--quiet", "rules"))
    assert planned == {f"rloo_{rule}" for rule in rules - {"all"}} | {"mine"}
    assert not (tmp_path / prefix / "results").exists(), "a dry run writes nothing"
    if not prefix:
        return
    snakemake(tmp_path, "--", str(Path(prefix) / PROMPTS))
    assert (tmp_path / prefix / PROMPTS / "train").is_dir()
    assert yaml.safe_load((tmp_path / prefix / "results" / "mini" / "config.yaml").read_text())["run"] == "mini"


def test_a_second_process_is_refused_although_its_snakefile_calls_no_hooks(tmp_path) -> None:
    """One that has Snakemake's own lock, since the first has not taken it yet."""
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mini()))
    (tmp_path / "Snakefile").write_text(MODULE.format(prefix=""))
    lock = tmp_path / ".snakemake" / "rloo-mini.lock"
    lock.parent.mkdir()
    lock.write_text(f"{socket.gethostname()} process {os.getpid()}")
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        argv = ["--cores", "1", "--workflow-profile", "none", "--", PROMPTS]
        outcome = forks.run("snakemake", argv, ENVIRONMENT, tmp_path)
    assert outcome.returncode == 1
    assert f"process {os.getpid()} is at work on it, or suspended; end it first" in outcome.stdout + outcome.stderr
    assert not (tmp_path / PROMPTS).exists()


def test_the_page_of_an_experiment_is_made_below_the_prefix(tmp_path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(mini()))
    arms = {"plain": {}, "free": {"algorithm.beta": 0}}
    content = {"experiment": "beta", "base": "base.yaml", "arms": arms, "seeds": [0]}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "Snakefile").write_text(MODULE.format(prefix='prefix: "study"'))
    assert "rloo experiment study/results/beta --log=study/results/beta/" in snakemake(tmp_path, "-n", "-p")


def test_what_a_new_project_lacks_gives_a_one_line_error(tmp_path, tiny_model, monkeypatch) -> None:
    """Also in a workflow that uses this one as a module, whose hooks Snakemake does not call."""
    monkeypatch.chdir(tmp_path)
    rows = "".join(json.dumps({"question": f"{n}+{n}", "answer": str(2 * n)}) + "\n" for n in range(9))
    Path("rows.jsonl").write_text(rows)
    init(Path("project"), model=str(tiny_model), data="rows.jsonl")
    Path("project/data/eval.jsonl").unlink()
    outcome = forks.run("snakemake", ["--cores", "1"], ENVIRONMENT, Path("project").absolute())
    assert outcome.returncode == 1
    *_, last = outcome.stderr.splitlines()
    assert last.startswith("Error: data/eval.jsonl: no such dataset file"), outcome.stderr
