"""Where DeepSpeed compiles its operations: by one process at a time, and on each host by itself."""

import errno
import fcntl
import os
import socket

import pytest

from rloo_pipeline.errors import UserError
from rloo_pipeline.training import compiled_operations


def test_a_baton_is_removed_only_by_the_holder_of_the_lock(tmp_path, monkeypatch) -> None:
    """The other processes of a host wait for the lock; where there are none, that of a living process must stay."""
    baton = tmp_path / "cpu_adam" / compiled_operations.BATON
    baton.parent.mkdir()
    baton.touch()

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", no_locks)
        with pytest.raises(UserError, match=r"has no locks .* set TORCH_EXTENSIONS_DIR"), compiled_operations._locked(tmp_path):
            pytest.fail("it was compiled without a lock")
    assert baton.exists()
    with compiled_operations._locked(tmp_path):
        assert not baton.exists()


def test_hosts_do_not_share_a_folder_whose_locks_they_may_not_see(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    here = compiled_operations._folder()
    assert compiled_operations._folder() == here
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert compiled_operations._folder() not in (here, tmp_path)
