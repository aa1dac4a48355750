"""Environment variables that Snakemake's jobs inherit."""

import getpass
import os
from unittest import mock

import pytest

from rloo_pipeline.runtime import environment


def test_a_user_that_the_system_does_not_know_has_a_name_for_snakemake_and_torch(monkeypatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    with mock.patch.dict(os.environ):
        for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
            os.environ.pop(name, None)
        with pytest.raises((KeyError, OSError)):
            getpass.getuser()
        environment.prepare_jobs()
        assert getpass.getuser() == str(2**31 - 7)
