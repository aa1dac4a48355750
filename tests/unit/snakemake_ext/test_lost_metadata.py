"""A file without Snakemake's record stays only if the configuration still describes it."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml
from helpers import mini
from snakemake.jobs import Reason
from snakemake.settings.enums import RerunTrigger

from rloo_pipeline.artifacts import assets, lineage, tables
from rloo_pipeline.config import Config
from rloo_pipeline.config.run_set import RunSet, runs_of
from rloo_pipeline.snakemake_ext import lost_metadata, run_folders
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall


def planned(*stages: str, triggers: set[RerunTrigger] | None = None, **reason: bool) -> Any:
    """Snakemake's workflow with a job of each of these stages, none of which is to run."""
    jobs = [
        SimpleNamespace(
            rule=SimpleNamespace(shellcmd=f"rloo {stage} --output {{output}}"),
            wildcards=SimpleNamespace(),
            output=[f"results/mini/{stage}"],
        )
        for stage in stages
    ]
    why = Reason()
    why.no_metadata = reason.get("no_metadata", True)
    dag = SimpleNamespace(
        jobs=jobs, needrun=lambda _: reason.get("needrun", False), needrun_jobs=list, reason=lambda _: why
    )
    return SimpleNamespace(dag=dag, rerun_triggers=triggers or RerunTrigger.all())


@pytest.fixture
def kept(tmp_path):
    """What is said of a plan where the run before had the configuration `mini`, with changes now."""
    run_folders.write_config(tmp_path / "mini", Config(**mini()))

    def sentence(workflow: Any, **changes: Any) -> str | None:
        call = object.__new__(SnakemakeCall)
        call.workflow, call.results, call.planned = workflow, tmp_path, True
        call.runs, call.functions = RunSet({"mini": Config(**mini(**changes))}), SimpleNamespace(kept=lambda _: None)
        return lost_metadata.kept(call)

    return sentence


def test_a_round_of_another_configuration_is_refused_where_snakemake_has_no_record_of_it(kept) -> None:
    said = kept(planned("prompts", "update"), algorithm={"beta": 0.5}, rounds=20)
    assert said is not None
    assert said.startswith("results/mini/update was made with another value of algorithm.beta")
    assert "put .snakemake back, give the run another name, add --forcerun results/mini/update to make it" in said
    assert "or make all files of the run again with --forceall" in said
    assert "rollout.lag" in (kept(planned("rollout"), rollout={"lag": 1}) or "")


def test_the_file_to_make_again_is_the_first_that_a_run_makes_of_those_that_stay(kept) -> None:
    said = kept(planned("report", "checks", "probe"), rollout={"max_completion_length": 47})
    assert "add --forcerun results/mini/probe to make it and all that follows again" in (said or "")


def test_tables_that_a_call_with_another_configuration_did_not_reach_are_refused(kept, tmp_path, monkeypatch) -> None:
    """It was killed after it had written its configuration."""
    monkeypatch.chdir(tmp_path)
    table = Path("results/mini/update.parquet")
    workflow = planned("update")
    workflow.dag.jobs[0].output.append(str(table))
    for beta in (0.5, 0.05):
        facts = lineage.decided(Config(**mini(algorithm={"beta": beta})), "update")
        tables.write(table, [], tables.TRAIN, "train", **facts)
        said = kept(workflow)
        assert said is None if beta == 0.05 else "update.parquet was made with algorithm.beta 0.5, but this" in said
        assert said is None if beta == 0.05 else f"add --forcerun {table} to make it and all that follows again" in said
    assert kept(planned("update", needrun=True)) is None


@pytest.mark.parametrize(
    ("workflow", "changes"),
    [
        (planned("update"), {"rounds": 20}),
        (planned("prompts", "rollout"), {"algorithm": {"beta": 0.5}}),
        (planned("update", no_metadata=False), {"algorithm": {"beta": 0.5}}),
        (planned("update", needrun=True), {"algorithm": {"beta": 0.5}}),
        (planned("update", triggers={RerunTrigger.MTIME}), {"algorithm": {"beta": 0.5}}),
    ],
    ids=["more rounds", "decides others", "recorded", "made again", "by --rerun-triggers"],
)
def test_files_that_the_configuration_describes_stay(kept, workflow, changes) -> None:
    assert kept(workflow, **changes) is None


def test_a_run_of_local_files_whose_assets_are_missing_does_not_go_on(kept, tmp_path, monkeypatch) -> None:
    """Without them, a data file that was replaced by one with an older time would go unnoticed."""
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").touch()
    dataset = {"train": {"generator": None, "options": {}, "path": "train.jsonl"}}
    workflow = planned("stage-assets", "prompts", no_metadata=False)
    staged, prompts = workflow.dag.jobs
    workflow.dag.depending = MagicMock(__getitem__=lambda _, job: [prompts])
    assert kept(workflow, dataset=dataset) is None, "nothing is made yet"
    Path(prompts.output[0]).mkdir(parents=True)
    said = kept(workflow, dataset=dataset)
    assert said is not None
    assert "stage-assets is missing. It records which files the run began with, so train.jsonl cannot be" in said
    assert "add --forcerun results/mini/stage-assets" in said
    assert kept(workflow) is None, "generators cannot change"
    Path(staged.output[0]).mkdir()
    assert kept(workflow, dataset=dataset) is None


def test_a_replaced_model_of_an_experiment_is_told_with_the_folder_that_its_runs_share(tmp_path, monkeypatch) -> None:
    """The assets of a run are a link to that folder, which no job makes."""
    monkeypatch.chdir(tmp_path)
    model = Path("model")
    model.mkdir()
    (model / "config.json").touch()
    source = {"model": {"name_or_path": str(model), "build": None, "build_options": {}}}
    Path("base.yaml").write_text(yaml.safe_dump(mini(**source)))
    arms = {"experiment": "study", "base": "base.yaml", "vary": {"algorithm.preset": ["rloo", "grpo"]}, "seeds": [0]}
    runs = runs_of(arms, Path("study.yaml"), "study.yaml")
    call = object.__new__(SnakemakeCall)
    call.workflow, call.results, call.runs = planned(), Path("results"), runs
    call.functions = SimpleNamespace(kept=lambda _: None)
    (folder,) = call.assets()
    folder.mkdir(parents=True)
    assets.write(folder, {"model": {"path": str(model), "revision": None}})
    for run in runs.by_folder:
        call.run_folder(run).mkdir(parents=True, exist_ok=True)
        if not (link := call.run_folder(run) / "assets").exists():
            link.symlink_to(folder.absolute())
    assert lost_metadata.kept(call) is None
    os.utime(model / "config.json", (2e9, 2e9))
    assert f"add --forcerun {folder} to begin again" in (lost_metadata.kept(call) or "")
    call.workflow.dag.needrun_jobs = lambda: [SimpleNamespace(output=[str(folder)])]
    assert lost_metadata.kept(call) is None


def test_a_run_without_a_configuration_of_before_is_new(kept, tmp_path) -> None:
    (tmp_path / "mini" / "config.yaml").unlink()
    assert kept(planned("update"), algorithm={"beta": 0.5}) is None


@pytest.mark.parametrize("content", [b"\xff\x00", b"[1]", b"null", b'{"rule": "a"}'])
def test_a_damaged_record_counts_as_missing(tmp_path, content) -> None:
    path = tmp_path / "record"
    path.write_bytes(content)
    persistence = SimpleNamespace(
        _io_read=lambda subject, id: json.loads(path.read_text()), _record_path=lambda subject, id: path
    )
    lost_metadata.ignore_damaged_records(persistence)
    assert persistence._io_read("metadata", "a") == ({"rule": "a"} if content.startswith(b"{") else {})
