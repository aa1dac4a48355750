"""DeepSpeed's AdamW for CPUs is compiled by one process at a time, for each host and environment by itself."""

import errno
import fcntl
import os
import socket
import sys

import pytest

from rloo_pipeline.errors import UserError
from rloo_pipeline.training.deepspeed_internals import cpu_adam


def test_a_baton_is_removed_only_by_the_holder_of_the_lock(tmp_path, monkeypatch) -> None:
    """The other processes of a host wait for the lock; where there are none, that of a living process must stay."""
    baton = tmp_path / "cpu_adam" / cpu_adam.BATON
    baton.parent.mkdir()
    baton.touch()

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", no_locks)
        with pytest.raises(UserError, match=r"has no locks .* set TORCH_EXTENSIONS_DIR"), cpu_adam._locked(tmp_path):
            pytest.fail("it was compiled without a lock")
    assert baton.exists()
    with cpu_adam._locked(tmp_path):
        assert not baton.exists()


@pytest.mark.parametrize(
    ("module", "name", "other"), [(socket, "gethostname", lambda: "another"), (sys, "prefix", "/")]
)
def test_neither_hosts_nor_environments_share_a_folder(tmp_path, monkeypatch, module, name, other) -> None:
    """A host may not see another one's locks, and compiles with its own headers."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    here = cpu_adam._folder()
    assert cpu_adam._folder() == here
    monkeypatch.setattr(module, name, other)
    assert cpu_adam._folder() not in (here, tmp_path)
