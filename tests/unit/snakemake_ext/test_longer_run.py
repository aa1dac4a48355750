"""When a call with fewer rounds would overwrite the evaluation of a finished run."""

import json
from pathlib import Path

import pytest

from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.snakemake_ext.longer_run import overwritten


@pytest.fixture
def run(tmp_path) -> Path:
    """A finished run of five rounds."""
    (tmp_path / "evaluation" / "final").mkdir(parents=True)
    (tmp_path / "summary.json").write_text(json.dumps({"rounds": 5}))
    return tmp_path


def test_fewer_rounds_would_overwrite_it(run) -> None:
    assert "has finished 5 rounds" in (overwritten(run, 4) or "")
    assert overwritten(run, 5) is None
    assert overwritten(run, 6) is None


def test_not_where_its_evaluation_was_removed(run) -> None:
    (run / "evaluation" / "final").rmdir()
    assert overwritten(run, 4) is None


def test_not_where_a_gate_ended_the_run_or_it_never_finished(run) -> None:
    write_json(run / "stopped.json", {"round": 4})
    assert overwritten(run, 4) is None
    assert overwritten(run, 3) is not None
    (run / "summary.json").unlink()
    assert overwritten(run, 3) is None
