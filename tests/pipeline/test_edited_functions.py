"""A run has one version of the user's functions."""

import shutil

import pytest
from helpers import Project

pytestmark = [pytest.mark.slow, pytest.mark.long]

DATA = {"generator": "own/rows.py:rows"}
ROWS = """
from own.words import WORD

def rows(split, size):
    return [{"prompt": f"{WORD} {split} {number}", "answer": "1"} for number in range(size)]
"""


def prompts(project: Project) -> str:
    """What the run's prompts are made of."""
    import pyarrow as pa

    [file] = (project.folder / "results" / "mini" / "prompts" / "train").glob("*.arrow")
    return pa.ipc.open_stream(file.read_bytes()).read_all()["prompt"][0].as_py()


def test_an_edited_function_is_noticed_and_kept_or_taken(tmp_path) -> None:
    project = Project(tmp_path / "project")
    own = project.folder / "own"
    own.mkdir()
    (own / "rows.py").write_text(ROWS)
    (own / "words.py").write_text("WORD = 'old'\n")
    changes = {"dataset": {"train": DATA, "eval": DATA}}

    def call(*arguments: str, **more: object) -> tuple[int, str]:
        outcome = project.snakemake("--cores", "1", *arguments, "--", "results/mini/prompts", **changes, **more)
        return outcome.returncode, outcome.stdout + outcome.stderr

    code, printed = call()
    assert code == 0, printed
    assert prompts(project).startswith("old")
    (own / "rows.py").write_text(f"# a comment\n{ROWS}")
    assert "Nothing to be done" in call()[1]
    (own / "words.py").write_text("WORD = 'new'\n")
    code, printed = call()
    assert code == 1
    assert "own/words.py: edited after the run began; with the edited file 2 finished jobs would run again" in printed
    code, printed = call("--rerun-triggers", "mtime")
    assert code == 1
    assert "was made before own/words.py was edited, and would stay, so the run would mix two versions" in printed
    code, printed = call(functions="keep")
    assert code == 0
    assert "Nothing to be done" in printed
    shutil.rmtree(project.folder / "results" / "mini" / "prompts")
    code, printed = call(functions="keep")
    assert code == 0, printed
    assert prompts(project).startswith("old")
    code, printed = call(functions="take")
    assert code == 0, printed
    assert prompts(project).startswith("new")
    assert "Nothing to be done" in call()[1]
