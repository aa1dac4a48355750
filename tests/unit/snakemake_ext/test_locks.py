"""Locks of a killed run are cleared, those of a living one are not."""

import errno
import fcntl
import os
import pwd
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rloo_pipeline.cluster import slurm
from rloo_pipeline.errors import UserError
from rloo_pipeline.snakemake_ext import locks

HOLD = "import sys, time; from pathlib import Path; from rloo_pipeline.snakemake_ext.locks import hold; "
HOLD += "print(hold(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[4])).alone, flush=True); time.sleep(int(sys.argv[3]))"


def process(folder: Path, run: str, seconds: int, results: str = "results") -> tuple[subprocess.Popen, bool]:
    """A process that takes a run's lock and lives for a while, and whether it got it."""
    command = [sys.executable, "-c", HOLD, folder, run, str(seconds), results]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return started, started.stdout.readline() == "True\n"


def test_marks_stay_while_their_run_lives_and_go_when_it_was_killed(tmp_path) -> None:
    """The dead run's own marks go while another run lives; a mark of both, such as its inputs, stays until both end."""
    (living, _), (killed, _) = (process(tmp_path, run, 600) for run in ("b", "a"))
    marks = {name: tmp_path / ".snakemake" / "locks" / f"{name}.output.lock" for name in ("a", "b", "ab")}
    marks["a"].parent.mkdir()
    for name, mark in marks.items():
        mark.write_text("".join(f"results/{run}/policy\n" for run in name) + "train.jsonl\n")
    assert not process(tmp_path, "a", 0)[1]
    assert all(mark.exists() for mark in marks.values())
    for run, left in ((killed, ["b", "ab"]), (living, [])):
        run.kill()
        run.wait()
        next_one, acquired = process(tmp_path, "a", 0)
        assert acquired
        next_one.wait()
        assert [name for name, mark in marks.items() if mark.exists()] == left


def test_a_colleague_can_take_the_lock_in_a_folder_that_the_group_writes(tmp_path) -> None:
    before = os.umask(0o002)
    try:
        locks.hold(tmp_path, "a")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / ".snakemake" / "rloo-a.lock").stat().st_mode) == 0o664


def test_a_folder_in_which_nothing_can_be_written_is_named(tmp_path) -> None:
    (tmp_path / ".snakemake").touch()
    with pytest.raises(UserError, match=rf"^{tmp_path}: a run needs a folder in which it can write"):
        locks.hold(tmp_path, "a")


def test_a_folder_that_would_add_lines_to_a_script_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="misread the line break in its name"):
        locks.hold(tmp_path / "a\n#SBATCH --account=other", "a")


@pytest.mark.parametrize(("job", "cleared"), [("7", True), ("8", False)])
def test_marks_of_an_earlier_time_of_the_same_slurm_job_are_cleared(tmp_path, monkeypatch, job, cleared) -> None:
    """After a node has died, say, and the job went back into the queue."""
    mark = tmp_path / ".snakemake" / "locks" / "0.output.lock"
    mark.parent.mkdir(parents=True)
    mark.touch()
    (tmp_path / ".snakemake" / "rloo-a.lock").write_text("elsewhere process 1 of SLURM job 7")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("PATH", "")  # no SLURM that could be asked about another job
    assert locks.hold(tmp_path, "a").alone == cleared
    assert mark.exists() != cleared


@pytest.mark.parametrize("marked", [True, False], ids=["", "after another run has removed the marks"])
def test_a_run_of_another_host_is_left_to_a_person(tmp_path, marked) -> None:
    mark = tmp_path / ".snakemake" / "locks" / "0.output.lock"
    mark.parent.mkdir(parents=True)
    if marked:
        mark.touch()
    own = tmp_path / ".snakemake" / "rloo-a.lock"
    own.write_text("elsewhere process 1")
    lock = locks.hold(tmp_path, "a")
    assert not lock.alone
    assert "results/a: locked by a process that may be alive (elsewhere process 1)" in lock.message
    assert f"delete {own}" in lock.message
    assert mark.exists() == marked
    assert own.read_text() == "elsewhere process 1"
    own.unlink()
    assert locks.hold(tmp_path, "a").alone
    assert not mark.exists()


def test_a_process_that_ends_leaves_the_name_of_a_later_one(tmp_path) -> None:
    own = tmp_path / "rloo-a.lock"
    for owner, left in (("here process 1", ""), ("elsewhere process 2", "elsewhere process 2")):
        own.write_text(owner)
        with own.open("r+") as file:
            locks._leave(file.fileno(), "here process 1")
        assert own.read_text() == left


def test_a_run_that_another_process_works_on_is_left_to_it_and_to_what_it_starts(tmp_path, monkeypatch) -> None:
    """Also where Snakemake's markers were removed, by --unlock, while it was suspended."""
    monkeypatch.setenv(locks.OWNER, "")
    living, acquired = process(tmp_path, "a", 600)
    assert acquired
    lock = locks.hold(tmp_path, "a")
    assert not lock.alone
    assert f"results/a: {socket.gethostname()} process {living.pid} is at work on it" in lock.message
    monkeypatch.setenv(locks.OWNER, (tmp_path / ".snakemake" / "rloo-a.lock").read_text())
    assert locks.hold(tmp_path, "a") == locks.Hold(True), "the owner's own second call"
    living.kill()
    living.wait()


@pytest.mark.parametrize("results", ["results", "study/results"])
def test_a_run_that_is_linked_into_two_working_folders_has_one_process_at_a_time(tmp_path, results) -> None:
    """Each would remove what the other's failed jobs leave, and wait for files that the other made."""
    (tmp_path / "shared" / "a").mkdir(parents=True)
    for name in ("one", "two", "three"):
        (tmp_path / name / results).parent.mkdir(parents=True)
        (tmp_path / name / results).symlink_to(tmp_path / "shared")
    living, acquired = process(tmp_path / "one", "a", 600, results)
    assert acquired
    lock = locks.hold(tmp_path / "two", "a", Path(results))
    assert (lock.alone, lock.message.partition(";")[0]) == (
        False,
        f"{results}/a: a process in another working folder is at work on it",
    )
    living.kill()
    living.wait()
    assert process(tmp_path / "three", "a", 0, results)[1]


def test_a_run_may_be_alive_while_any_working_folder_holds_it(tmp_path) -> None:
    (tmp_path / "shared" / "a").mkdir(parents=True)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results").symlink_to(tmp_path / "shared")
    run = tmp_path / "one" / "results" / "a"
    assert locks.may_be_alive(run), "nothing is known of it here"
    process(tmp_path / "one", "a", 0)[0].wait()
    assert not locks.may_be_alive(run)
    living, acquired = process(tmp_path / "two", "a", 600)
    assert acquired
    assert locks.may_be_alive(run)
    living.kill()
    living.wait()
    assert not locks.may_be_alive(run)


def test_slurm_is_asked_at_most_once_a_minute_whether_a_run_on_another_host_is_alive(tmp_path, monkeypatch) -> None:
    """Where locks of other hosts cannot be seen. A process of the same job may be alive there, too."""
    asked = []
    monkeypatch.setattr(slurm, "job", lambda number: asked.append(number) or (number == "7" or None))
    monkeypatch.setattr(slurm.time, "monotonic", lambda: 600.0)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    slurm._was_queued.cache_clear()
    (tmp_path / ".snakemake").mkdir()
    for run, job in (("a", 7), ("b", 8)):
        (tmp_path / ".snakemake" / f"rloo-{run}.lock").write_text(f"elsewhere process 1 of SLURM job {job}")
    for _ in range(3):
        assert locks.may_be_alive(tmp_path / "results" / "a")
        assert not locks.may_be_alive(tmp_path / "results" / "b")
    slurm._was_queued.cache_clear()
    assert asked == ["7", "8"]


@pytest.mark.parametrize("run", ["a", "b"])
def test_without_locks_in_the_file_system_the_marks_of_a_living_process_stay(tmp_path, monkeypatch, run) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setenv(locks.OWNER, "")
    mark = tmp_path / ".snakemake" / "locks" / "0.output.lock"
    mark.parent.mkdir(parents=True)
    mark.touch()
    with subprocess.Popen(["sleep", "600"]) as living:
        owner = f"{socket.gethostname()} process {living.pid}"
        (tmp_path / ".snakemake" / "rloo-a.lock").write_text(owner)
        lock = locks.hold(tmp_path, run)
        assert lock.alone == (run == "b")
        assert (owner in lock.message) == (run == "a")
        assert mark.exists()
        living.kill()
    assert locks.hold(tmp_path, "a").alone
    assert mark.exists() == (run == "b"), "of run b this process is the owner, and lives"


def test_a_lock_of_a_user_without_a_name_is_refused_in_one_sentence(tmp_path, monkeypatch) -> None:
    """As of a colleague who has left, or of another container."""
    own = tmp_path / ".snakemake" / "rloo-a.lock"
    own.parent.mkdir()
    own.touch()
    monkeypatch.setattr(locks.os, "open", denied)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(UserError, match=f"started by user {os.getuid()}, but you cannot"):
        locks.hold(tmp_path, "a")


def denied(*_: object) -> int:
    raise PermissionError(errno.EACCES, "Permission denied")
