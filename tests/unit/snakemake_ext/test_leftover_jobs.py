"""Jobs that a killed controller left in SLURM's queue are cancelled before the next one submits them again."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import executable

from rloo_pipeline.snakemake_ext import leftover_jobs

CALL = SimpleNamespace(runs=SimpleNamespace(name="a"))
RECORD = Path(".snakemake/rloo-a.jobs")


@pytest.fixture
def warnings(tmp_path, monkeypatch) -> list[str]:
    """The warnings, in a folder in which an earlier controller called its jobs `old`, and this one calls them `new`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(leftover_jobs, "own_names", ["new"])
    told: list[str] = []
    monkeypatch.setattr(leftover_jobs, "logger", SimpleNamespace(warning=told.append))
    RECORD.parent.mkdir()
    RECORD.write_text(f"old {tmp_path}\n")
    executable(tmp_path, "scancel", 'echo "$*" >>cancelled')
    return told


def test_jobs_of_an_earlier_controller_are_cancelled_by_their_name(tmp_path, warnings) -> None:
    executable(
        tmp_path, "squeue", f'echo "$*" >>{tmp_path}/asked; case "$*" in *--name=old*) printf "%s\\n" 12 13 13;; esac'
    )
    leftover_jobs.cancel(CALL)
    assert Path("cancelled").read_text() == "12 13\n"
    assert "--states=PD,CF,R,S " in Path("asked").read_text(), "jobs that are ending are no leftovers"
    assert RECORD.read_text() == f"new {tmp_path}\n"
    [warning] = warnings
    assert "left in SLURM's queue (12, 13)" in warning


def test_jobs_of_the_folder_that_this_one_is_a_copy_of_stay(tmp_path, warnings) -> None:
    executable(tmp_path, "squeue", "echo 12")
    (tmp_path / "original").mkdir()
    for original in (tmp_path / "original", tmp_path / "removed"):
        RECORD.write_text(f"old {original}\n")
        leftover_jobs.cancel(CALL)
        assert not Path("cancelled").exists()
        assert RECORD.read_text() == f"new {tmp_path}\n"
        assert warnings == []


def test_jobs_of_a_folder_with_two_paths_are_cancelled(tmp_path, warnings) -> None:
    executable(tmp_path, "squeue", "echo 12")
    (tmp_path / "other path").symlink_to(tmp_path)
    RECORD.write_text(f"old {tmp_path / 'other path'}\n")
    leftover_jobs.cancel(CALL)
    assert Path("cancelled").read_text() == "12\n"


def test_nothing_is_cancelled_or_told_once_the_jobs_have_ended(tmp_path, warnings, monkeypatch) -> None:
    executable(tmp_path, "squeue", "true")
    monkeypatch.setattr(leftover_jobs, "own_names", [])  # this call submits none
    leftover_jobs.cancel(CALL)
    assert not Path("cancelled").exists()
    assert not RECORD.exists()
    assert warnings == []


def test_the_name_is_kept_until_slurm_has_cancelled_the_jobs(tmp_path, warnings, monkeypatch) -> None:
    executable(tmp_path, "squeue", "echo 12")
    executable(tmp_path, "scancel", "echo 'scancel: error: Access/permission denied' >&2; exit 1")
    leftover_jobs.cancel(CALL)
    assert RECORD.read_text() == f"old {tmp_path}\nnew {tmp_path}\n"
    [warning] = warnings
    assert "(scancel --name=old)" in warning
    assert "Access/permission denied" in warning

    monkeypatch.setenv("PATH", "")  # a machine without SLURM
    leftover_jobs.cancel(CALL)
    assert RECORD.read_text() == f"old {tmp_path}\nnew {tmp_path}\n"
