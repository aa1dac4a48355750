"""The end of a process is seen, with the kernel's help or without."""

import errno
import fcntl
import os
import resource
import select
import subprocess
import threading

import pytest

from rloo_pipeline.runtime import process_end


@pytest.mark.parametrize(
    "error", [None, OSError(errno.ENOSYS, "Function not implemented"), AttributeError("pidfd_open")]
)
def test_a_file_can_be_read_after_the_end_of_a_process_and_not_before(monkeypatch, error) -> None:
    """Linux before 5.3 has none of its own, as on RHEL 8."""

    def unknown(_: int) -> int:
        raise error

    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    if error:
        monkeypatch.setattr(os, "pidfd_open", unknown)
    with subprocess.Popen(["sleep", "600"]) as process:
        file = process_end.readable_after(process.pid)
        assert select.select([file], [], [], 0.3)[0] == []
        process.kill()  # it stays a zombie until its parent asks
        assert select.select([file], [], [], 60)[0] == [file]
        os.close(file)
    with subprocess.Popen(["sleep", "600"]) as process:
        os.close(process_end.readable_after(process.pid))
        process.kill()
    for thread in threading.enumerate():
        if "_watch" in thread.name:
            thread.join()
    assert failed == [], "closing a file that nobody reads is not an error"


def test_the_end_of_a_process_is_seen_where_many_files_are_open(monkeypatch) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    handles = list[int]()

    def far(pid: int) -> int:
        file = readable_after(pid)
        handles.append(fcntl.fcntl(file, fcntl.F_DUPFD, 2000))
        os.close(file)
        return handles[-1]

    readable_after = process_end.readable_after
    monkeypatch.setattr(process_end, "readable_after", far)
    with subprocess.Popen(["true"]) as process:
        process_end.wait(process.pid, 300)
        assert process.poll() == 0
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert handles[0] >= 2000
