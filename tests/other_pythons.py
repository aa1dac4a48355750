"""Virtual environments beside that of the tests, with libraries whose pins are not ours: `make environments`."""

import os
from pathlib import Path

import pytest
from helpers import ROOT
from skipped_tests import ENVIRONMENTS


def python_of(library: str) -> Path:
    """The Python that has this library; skips the test if it is not there."""
    python = ROOT / "build" / "environments" / library / "bin" / "python"
    if not python.exists():
        assert "RLOO_REQUIRE_ENVIRONMENTS" not in os.environ
        pytest.skip(ENVIRONMENTS)
    return python
