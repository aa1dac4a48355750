"""Jobs of several nodes compile into one folder: one at a time, and what a killed one leaves is removed."""

import errno
import fcntl
import os
import pwd
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import snakemake.api  # noqa: F401 - its modules cannot be imported in another order
from snakemake.exceptions import CliException
from snakemake_interface_logger_plugins.tests import MockOutputSettings

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import caches, scratch
from rloo_pipeline.snakemake_ext.logger import LogHandler, LogHandlerSettings

COMPILES = """
import sys, time
from pathlib import Path
from rloo_pipeline.runtime import caches

folder, key = Path(sys.argv[1]), sys.argv[2]
with caches.compiling(folder, key):
    if not (folder / key).exists():
        (folder / key).write_text("half")
        print("compiles", flush=True)
        sys.stdin.readline()
        (folder / key).write_text("half and half")
    print((folder / key).read_text(), flush=True)
"""


def job(folder: Path, key: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMPILES, str(folder), key]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def test_without_a_home_folder_to_write_to_snakemake_has_one_for_temporary_files(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(scratch, "user_folder", lambda: tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    assert Path(caches.for_snakemake()["XDG_CACHE_HOME"]) == tmp_path / f"rloo-{os.getuid()}"
    assert (tmp_path / f"rloo-{os.getuid()}").is_dir()


def test_a_full_quota_of_the_home_folder_is_one_sentence(tmp_path, monkeypatch) -> None:
    """Snakemake would end with a traceback, and another folder would lack the models that are in this one."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(caches.tempfile, "TemporaryFile", full)
    with pytest.raises(UserError, match=f"^no space left in {tmp_path}: free some disk or quota"):
        caches.for_snakemake()
    monkeypatch.setattr(sys, "argv", ["/usr/bin/snakemake", "--version"])
    with pytest.raises(CliException, match=f"^no space left in {tmp_path}"):
        LogHandler(MockOutputSettings(), LogHandlerSettings())


def test_the_second_of_two_jobs_waits_and_reads_what_the_first_has_compiled(tmp_path) -> None:
    first = job(tmp_path / "cache", "model")
    assert first.stdout.readline() == "compiles\n"
    second, lines = job(tmp_path / "cache", "model"), []
    reader = threading.Thread(target=lambda: lines.append(second.stdout.read()))
    reader.start()
    reader.join(1)
    assert not lines, "it waits"
    assert first.communicate("go\n")[0] == "half and half\n"
    reader.join()
    assert lines == ["half and half\n"]
    with job(tmp_path / "cache", "another model") as third:
        assert third.stdout.readline() == "compiles\n"
        with caches.compiling(tmp_path / "cache", "model"):  # which is complete, so this waits for no one
            third.communicate("go\n")


def test_what_a_killed_job_has_half_written_is_removed_and_all_else_stays(tmp_path) -> None:
    (tmp_path / "earlier" / "deep").mkdir(parents=True)
    (tmp_path / "earlier" / "whole").touch()
    killed = job(tmp_path, "model")
    assert killed.stdout.readline() == "compiles\n"
    (tmp_path / "earlier" / "new").mkdir()
    for part in ("half", "deep/half", "new/half"):
        (tmp_path / "earlier" / part).touch()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert job(tmp_path, "model").communicate("go\n")[0] == "compiles\nhalf and half\n"
    left = {str(path.relative_to(tmp_path)) for path in (tmp_path / "earlier").rglob("*")}
    assert left == {"earlier/deep", "earlier/whole"}


def test_a_job_that_is_killed_when_it_has_compiled_leaves_nothing_to_remove(tmp_path, monkeypatch) -> None:
    def killed(path: Path) -> None:
        path.write_text("")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "touch", killed)
        with pytest.raises(KeyboardInterrupt), caches.compiling(tmp_path, "model"):
            (tmp_path / "whole").write_text("")
    with caches.compiling(tmp_path, "another model"):
        assert (tmp_path / "whole").exists()


def test_an_engine_that_does_not_start_leaves_nothing_that_counts_as_compiled(tmp_path) -> None:
    with pytest.raises(FileNotFoundError), caches.compiling(tmp_path, "model"):
        (tmp_path / "model").write_text((tmp_path / "weights").read_text())
    assert job(tmp_path, "model").communicate("go\n")[0] == "compiles\nhalf and half\n"


def test_without_locks_two_jobs_compile_and_neither_removes_what_the_other_writes(tmp_path, monkeypatch) -> None:
    def no_locks(*_: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with caches.compiling(tmp_path, "model"):
        (tmp_path / "half").touch()
        with caches.compiling(tmp_path, "model"):
            assert (tmp_path / "half").exists()


def test_a_lock_that_cannot_be_opened_keeps_nobody_from_compiling(tmp_path) -> None:
    (tmp_path / ".rloo-lock").mkdir()  # as that of another user, with whom the folder is shared
    (tmp_path / ".rloo-before").write_text("[]")
    (tmp_path / "half").touch()
    with caches.compiling(tmp_path, "model"):
        assert (tmp_path / "half").exists()


def test_inductor_writes_aside_and_renames(tmp_path) -> None:
    """So does Triton (`FileCacheManager.put`), which is not installed for CPUs."""
    from torch._inductor.codecache import write_atomic

    file = tmp_path / "kernel"
    file.write_text("old")
    with file.open() as reader:
        write_atomic(str(file), "new")
        assert reader.read() == "old", "who has it open reads it to its end"
    assert [entry.read_text() for entry in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("chosen", ["", None])
def test_without_a_home_caches_are_in_the_temporary_folder_and_never_in_the_working_folder(monkeypatch, chosen) -> None:
    """An empty XDG_CACHE_HOME counts as none."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if chosen is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", chosen)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a user that a container does not know
    with pytest.raises(RuntimeError):
        Path.home()
    assert caches.cache_folder() == scratch.user_folder() / f"rloo-{os.getuid()}"
