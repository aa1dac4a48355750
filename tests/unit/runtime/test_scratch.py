"""Temporary files of a stage or a Snakemake process are removed, by the next one after a kill."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers import has_ended, wait_until

from rloo_pipeline.runtime import scratch

USE = "import os, sys, time; from rloo_pipeline.runtime import scratch; scratch.use(); "
SHOW = "print(os.environ['TMPDIR'], flush=True); "


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def start(code: str) -> tuple[subprocess.Popen, Path]:
    """A process with a folder for temporary files, and the folder."""
    process = subprocess.Popen([sys.executable, "-c", USE + SHOW + code], stdout=subprocess.PIPE, text=True)
    return process, Path(process.stdout.readline().strip())


def folders(top: Path) -> list[Path]:
    """The folders in `top`, without the locks beside them."""
    return [path for path in top.iterdir() if path.is_dir()]


def test_the_folder_ends_with_its_process(folder) -> None:
    process, own = start("open(os.environ['TMPDIR'] + '/vllm_dist_1', 'w')")
    assert process.wait() == 0
    assert own.parent == folder
    assert list(folder.iterdir()) == []


def test_the_next_process_removes_what_a_killed_one_left_and_nothing_else(folder) -> None:
    (folder / "snakemakeforeign").mkdir()
    living, folder_of_living = start("time.sleep(600)")
    killed, folder_of_killed = start(
        "open(os.environ['TMPDIR'] + '/vllm_dist_1', 'w'); print(flush=True); time.sleep(600)"
    )
    killed.stdout.readline()
    killed.kill()
    killed.wait()
    assert {*folders(folder)} == {folder_of_living, folder_of_killed, folder / "snakemakeforeign"}
    assert start("")[0].wait() == 0
    assert {*folders(folder)} == {folder_of_living, folder / "snakemakeforeign"}
    living.kill()
    living.wait()


def test_the_process_of_an_engine_keeps_the_folder_of_its_killed_stage_while_it_imports_vllm(folder) -> None:
    begun = folder / "begun"
    imports = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(600)"
    spawned = (
        "import multiprocessing, time\n"
        "class Arguments:\n"
        f"    __reduce__ = lambda self: (exec, ({imports!r},))\n"
        "from rloo_pipeline.rollout import engine_process\n"
        "process = multiprocessing.get_context('spawn').Process(target=engine_process.run, args=(Arguments(),))\n"
        "process.start()\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    stage, own = start(f"exec({spawned!r})")
    engine = psutil.Process(int(stage.stdout.readline()))
    wait_until(begun.exists)
    stage.kill()
    stage.wait()
    scratch.remove_abandoned(folder)
    assert own.exists()
    engine.kill()
    wait_until(lambda: has_ended(engine.pid))
    scratch.remove_abandoned(folder)
    assert folders(folder) == []


def test_a_stage_uses_the_folder_of_its_snakemake(folder) -> None:
    process, own = start(f"import subprocess; subprocess.run([sys.executable, '-c', {USE + SHOW!r}])")
    assert process.stdout.read().strip() == str(own)
    assert process.wait() == 0


def test_a_claimed_folder_is_removed_after_a_kill_and_tmpdir_stays_as_it_was(folder) -> None:
    """Jobs that Snakemake submits get its environment, and other machines do not have the folder."""
    own = folder / "snakemakeown"
    own.mkdir()
    code = f"import pathlib; scratch.claim(pathlib.Path({str(own)!r})); {SHOW}time.sleep(600)"
    command = [sys.executable, "-c", USE.replace("scratch.use(); ", code)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert Path(process.stdout.readline().strip()) == folder
    assert start("")[0].wait() == 0
    assert own.exists()
    process.kill()
    process.wait()
    assert start("")[0].wait() == 0
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_removed_yet_is_removed_later(folder, monkeypatch) -> None:
    """A process that outlives the owner for a moment writes into the folder while others remove it."""
    killed, folder_of_killed = start("time.sleep(600)")
    killed.kill()
    killed.wait()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors: (path / "late").write_text(""))
        scratch.remove_abandoned(folder)
    assert folder_of_killed.exists()
    scratch.remove_abandoned(folder)
    assert list(folder.iterdir()) == []


def test_a_folder_stays_while_a_stage_outlives_its_owner(folder) -> None:
    """The stage would make the folder anew, and nobody would remove that."""
    stage = USE + "print(flush=True); time.sleep(600)"
    code = f"import subprocess; one = subprocess.Popen([sys.executable, '-c', {stage!r}], stdout=subprocess.PIPE); "
    owner, own = start(code + "one.stdout.readline(); print(one.pid, flush=True); time.sleep(600)")
    outliving = psutil.Process(int(owner.stdout.readline()))
    owner.kill()
    owner.wait()
    scratch.remove_abandoned(folder)
    assert own.exists()
    outliving.kill()
    outliving.wait()
    scratch.remove_abandoned(folder)
    assert list(folder.iterdir()) == []


def test_a_folder_that_an_import_makes_anew_when_its_owner_has_ended_is_removed(folder) -> None:
    """A worker may be importing torch, which makes `torchinductor_USER` in TMPDIR, when Snakemake ends."""
    worker = USE + "print(flush=True); sys.stdin.readline(); os.makedirs(os.environ['TMPDIR'] + '/torchinductor'); "
    worker += "print(scratch.user_folder()); scratch.leave()"
    pipes = "stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True"
    code = f"import subprocess; one = subprocess.Popen([sys.executable, '-c', {worker!r}], {pipes}); "
    code += "one.stdout.readline(); scratch.remove(); print(one.communicate('go')[0])"
    owner, _ = start(code)
    assert owner.communicate()[0].split() == [str(folder)], "not the folder that goes"
    assert list(folder.iterdir()) == []


def test_a_folder_of_another_host_stays(folder) -> None:
    """In a TMPDIR that several nodes share, a lock is perhaps seen only on the node that has taken it."""
    process, own = start("time.sleep(600)")
    process.kill()
    process.wait()
    lock = folder / f"{scratch.LOCK}{own.name}"
    here = lock.read_text()
    lock.write_text("another")
    scratch.remove_abandoned(folder)
    assert own.exists()
    lock.write_text(here)
    scratch.remove_abandoned(folder)
    assert list(folder.iterdir()) == []


def test_without_locks_in_the_file_system_only_the_process_itself_removes_its_folder(folder, monkeypatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(scratch.tempfile, "tempdir", str(folder))
    monkeypatch.setattr(scratch, "_locks", [])
    monkeypatch.setattr(scratch, "_own", [])
    monkeypatch.setattr(fcntl, "flock", no_locks)
    own = folder / "own"
    own.mkdir()
    scratch.claim(own)
    scratch.remove_abandoned(folder)
    assert own.exists()
    scratch.remove()
    assert list(folder.iterdir()) == []
