"""The sandbox of this machine, and ways to run a program in it."""

import os
import subprocess

import pytest
from programs import IMAGE, LIMITS

from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.code import code_reward
from rloo_pipeline.sandbox import sandbox
from rloo_pipeline.sandbox.inside import script
from rloo_pipeline.sandbox.inside.limits import READY


@pytest.fixture(scope="module")
def found():
    """The sandbox of this machine. In .ci/run a machine without one is a failure."""
    try:
        return sandbox.find(image=IMAGE)
    except UserError as error:
        if os.environ.get("RLOO_REQUIRE_SANDBOX"):
            pytest.fail(str(error))
        pytest.skip(str(error).partition(": install ")[0])


@pytest.fixture
def says(found):
    """Runs a program in the sandbox and gives what it printed."""

    def run(program, limits=LIMITS):
        pipe = subprocess.PIPE
        with sandbox.confined(script, found, limits, stdin=pipe, stdout=pipe) as process:
            said, _ = process.communicate(b"%d\n" % len(program.encode()) + program.encode(), timeout=limits.seconds)
        assert said.startswith(READY)
        return said[len(READY) :].decode()

    return run


@pytest.fixture
def walls(found):
    """Runs a program behind the sandbox's walls alone: without the limits and the filter that it takes on inside."""

    def run(program):
        command = [*sandbox.words(found, LIMITS), "-s", "-S", "-c", program]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=False, env=sandbox.ENVIRONMENT
        ).stdout

    return run


@pytest.fixture
def reward(found):
    """The reward of one program."""

    def run(program, tests, **options):
        columns = {"entry_point": [options.pop("entry_point", None)]}
        [score] = code_reward([program], tests=[tests], image=IMAGE, **columns, **options)
        return score

    return run
