"""A run in Python: read as it lies, by a notebook too, and started from there."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from helpers import ROOT, Project, mini
from nbclient import NotebookClient
from synthetic_runs import PROMPTS, ROUNDS, configuration, finish_run, train_again

import rloo_pipeline
from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.commands import launch
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging import run_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finish_run(tmp_path_factory.mktemp("results") / "synthetic", configuration())


def test_metrics_are_a_frame_with_a_row_a_round(folder: Path) -> None:
    run = rloo_pipeline.open_run(folder)
    assert list(run.metrics().index) == run.rounds == list(range(1, ROUNDS + 1))
    assert run.metrics()["reward"].isna().sum() == 2, "null is not 0"
    assert run.config.rounds == ROUNDS
    assert run.summary["gain"] > 0
    assert run.evaluation("final")["distance"]["kl/sequence_mean"] == 3.25


def test_rounds_of_an_earlier_training_are_not_finished(folder: Path, tmp_path: Path) -> None:
    run = rloo_pipeline.open_run(shutil.copytree(folder, tmp_path / "again"))
    train_again(run.folder, 5)
    assert run.rounds == list(run.metrics().index) == [1, 2, 3, 4, 5]
    assert "rounds done: 5 of" in repr(run)
    write_json(run.folder / "prompts" / "counts.json", {})
    os.utime(run.folder / "prompts" / "counts.json", (2e9, 2e9))
    with pytest.raises(UserError, match="reward: round 1 is older than its inputs, so"):
        run.plot("reward")


def test_held_out_accuracy_is_a_metric_and_a_curve(folder: Path) -> None:
    run = rloo_pipeline.open_run(folder)
    accuracies = run_files.read(folder).accuracies()
    assert run.metrics()["eval/accuracy"].dropna().to_dict() == {n: value for n, value in accuracies.items() if n}
    figure = run.plot("reward", "eval/accuracy")
    assert [trace.name for trace in figure.data] == ["reward", "eval/accuracy"]
    assert dict(zip(figure.data[1].x, figure.data[1].y, strict=True)) == accuracies, "with policy 0"
    assert len(run.plot().data) == 3
    with pytest.raises(UserError, match="rewart: no such metric; did you mean 'reward'"):
        run.plot("rewart")


def test_the_program_in_notebooks_draws_three_figures_of_a_run(folder: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RLOO_RUN", str(folder))
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(ROOT / "notebooks" / "three_figures.py"))
    assert sorted(file.stem for file in tmp_path.glob("*.html")) == ["curves", "lengths", "rewards"]
    assert all(names[file.stem].data for file in tmp_path.glob("*.html"))


def test_the_public_names_are_those_that_are_offered() -> None:
    assert dir(rloo_pipeline) == ["Run", "__version__", "open_run", "run"]
    assert all(getattr(rloo_pipeline, name) for name in dir(rloo_pipeline))


def test_the_path_of_a_configuration_starts_in_the_folder_of_the_project(tmp_path, monkeypatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(launch, "_run_child", lambda argv, *_: seen.extend(argv) or 0)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mini()))
    rloo_pipeline.run("mine.yaml", folder=tmp_path, dry_run=True)
    assert str(tmp_path / "mine.yaml") in seen


def test_an_interrupted_call_shows_how_the_run_ends(tmp_path, monkeypatch) -> None:
    lines: list[str] = []

    def show(line: str, **_: object) -> None:
        lines.append(line)
        if len(lines) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(launch, "print", show, raising=False)
    ends = "signal.signal(signal.SIGTERM, lambda *_: sys.exit('Stopped'))"
    program = f"import signal, sys; {ends}; print('begins', flush=True); signal.pause()"
    with pytest.raises(KeyboardInterrupt):
        launch._run_child([sys.executable, "-c", program], tmp_path, "")
    assert lines == ["begins\n", "Stopped\n"]


def test_rollouts_come_with_their_scores_and_advantages(folder: Path) -> None:
    run = rloo_pipeline.open_run(str(folder))
    rows = run.rollouts(1)
    assert len(rows) == len(run.scores(1)) == PROMPTS * 4
    assert all(row["advantage"] == row["reward"] - 0.5 for row in rows)
    assert {row["reward"] == 1.0 for row in rows if "yes" in row["completion"]} == {True}


def test_completions_come_with_the_text_of_their_prompts_and_scores_under_names_of_their_own(folder: Path) -> None:
    run = rloo_pipeline.open_run(folder)
    for rows in (run.rollouts(1), run.completions("final")):
        assert rows["prompt"][:] == [f"user: {key[1:]}+<b>{key[1:]}</b>" for key in rows["prompt_id"]]
        assert rows["scores/answer"][:] == rows["reward"][:]
    for rows in (run.rollouts(1), run.completions("final"), run.scores(1)):
        assert [name for name in rows.column_names if name.startswith("scores/")] == ["scores/answer", "scores/worked"]
        assert not {"answer", "worked"} & set(rows.column_names)


def test_a_missing_part_is_an_error(folder: Path, tmp_path: Path) -> None:
    run = rloo_pipeline.open_run(folder)
    with pytest.raises(UserError, match="0 of 1 shards"):
        run.rollouts(2)
    with pytest.raises(UserError, match="evaluations: final, warmstart"):
        run.evaluation("middle")
    with pytest.raises(UserError, match="prompts/dev: the run has no such prompts"):
        run.prompts("dev")
    with pytest.raises(UserError, match="not the folder of a run"):
        rloo_pipeline.open_run(tmp_path)
    with pytest.raises(UserError, match="no such configuration file"):
        rloo_pipeline.run(tmp_path / "config.yaml", folder=tmp_path)


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = (
        "import sys, rloo_pipeline; print(sorted({'torch', 'pandas', 'datasets', 'snakemake'} & set(sys.modules)))"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert outcome.stdout.strip() == "[]"


def test_a_dry_run_from_python_says_in_words_what_would_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    project = Project(tmp_path / "project")
    run = rloo_pipeline.run(project.configure(), changes={"rounds": 3}, folder=project.folder, dry_run=True)
    assert run is None
    out = capfd.readouterr().out
    assert " jobs would run:\n  output missing: " in out
    assert "rollout ×6" in out
    assert len(out) < 2000
    with pytest.raises(UserError, match="the run failed"):
        rloo_pipeline.run(project.configure(), changes={"rounds": 0}, folder=project.folder, dry_run=True)
    assert "rounds: Input should be greater than or equal to 1" in capfd.readouterr().out


def test_the_example_notebook_reads_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLOO_RUN", str(folder))
    notebook = nbformat.read(ROOT / "notebooks" / "read_a_run.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without results"
    NotebookClient(notebook, timeout=800, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("application/vnd.plotly.v1+json" in output.get("data", {}) for output in shown)
    assert "groups have different rewards" in "".join(output.get("text", "") for output in shown)
