"""The sandbox of this machine."""

import pytest
from helpers import require_sandbox

from rloo_pipeline.user_code.sandbox.command_line import Sandbox


@pytest.fixture(scope="module")
def machine_sandbox() -> Sandbox:
    return require_sandbox()
