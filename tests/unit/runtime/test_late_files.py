"""Files that another node has just written, on a file system that shows them when their folder is opened."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from helpers import ROOT

from rloo_pipeline.artifacts import lineage, manifest
from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.judging.run_files import held_out_of, metrics_of, metrics_until, read_held_out
from rloo_pipeline.runtime import caches, late_files


@pytest.fixture
def late(monkeypatch, tmp_path) -> Callable[[], None]:
    """Makes files missing until their folder is opened, as NFS does after a node has looked for them too early."""
    seen, os_open, exists, is_dir = {tmp_path.parent}, os.open, Path.exists, Path.is_dir

    def open_folder(path, *arguments, **options):
        seen.add(Path(path))
        return os_open(path, *arguments, **options)

    def hide() -> None:
        monkeypatch.setattr(os, "open", open_folder)
        monkeypatch.setattr(Path, "exists", lambda path: path.parent in seen and exists(path))
        monkeypatch.setattr(Path, "is_dir", lambda path: path.parent in seen and is_dir(path))

    return hide


def test_a_late_file_exists_and_a_missing_one_does_not(tmp_path, late) -> None:
    (tmp_path / "late").touch()
    late()
    assert not (tmp_path / "late").exists()
    assert late_files.exists(tmp_path / "late")
    for missing in ("missing", "missing/file", "late/file"):
        assert not late_files.exists(tmp_path / missing)


def test_late_metrics_and_measurements_are_read(tmp_path, late) -> None:
    for number in (1, 2):
        write_json(metrics_of(tmp_path, number), {"round": number})
    for number in (3, 4):
        write_json(held_out_of(tmp_path, number), {"round": number, "accuracy": 0.5})
    late()
    assert [metrics["round"] for metrics in metrics_until(tmp_path, 4)] == [1, 2]
    assert [measured["round"] for measured in read_held_out(tmp_path, range(1, 5))] == [3, 4]


def test_a_late_folder_is_not_taken_for_one_without_facts(tmp_path, late) -> None:
    (tmp_path / "folder").mkdir()
    manifest.write_manifest(tmp_path / "folder", seed=5)
    late()
    assert lineage.facts_of(tmp_path / "folder")["seed"] == "5"
    assert lineage.facts_of(tmp_path / "missing") == {}


def test_a_job_that_waited_for_another_node_finds_what_that_has_compiled(tmp_path, late) -> None:
    with caches.compiling(tmp_path, "model"):
        (tmp_path / "whole").touch()
    late()
    with caches.compiling(tmp_path, "model"):
        assert not (tmp_path / ".rloo-before").is_file(), "the block would count as one that compiles"


def test_both_profiles_for_several_nodes_wait_for_late_files() -> None:
    files = [ROOT / "profiles" / name / "profile.v9+.yaml" for name in ("slurm", "allocation")]
    assert [yaml.safe_load(file.read_text())["latency-wait"] for file in files] == [60, 60]
