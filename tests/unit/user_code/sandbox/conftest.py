"""The sandbox of this machine, and ways to run a program in it."""

import subprocess

import pytest
from helpers import require_sandbox
from programs import IMAGE, LIMITS

from rloo_pipeline.rewards.code import code_reward
from rloo_pipeline.user_code.sandbox import command_line, sandbox
from rloo_pipeline.user_code.sandbox.inside import script
from rloo_pipeline.user_code.sandbox.inside.limits import READY


@pytest.fixture(scope="module")
def confinement():
    return require_sandbox(IMAGE)


@pytest.fixture
def run_confined(confinement):
    """Runs a program in the sandbox and returns its output."""

    def run(program, limits=LIMITS):
        pipe = subprocess.PIPE
        with sandbox.confined(script, confinement, limits, stdin=pipe, stdout=pipe) as process:
            output, _ = process.communicate(b"%d\n" % len(program.encode()) + program.encode(), timeout=limits.seconds)
        assert output.startswith(READY)
        return output[len(READY) :].decode()

    return run


@pytest.fixture
def run_without_limits(confinement):
    """Runs a program in the sandbox's namespaces alone, without the limits and the filter that are set inside."""

    def run(program):
        command = [*command_line.interpreter_argv(confinement, LIMITS), "-s", "-S", "-c", program]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=False, env=command_line.ENVIRONMENT
        ).stdout

    return run


@pytest.fixture
def reward(confinement):
    """The reward of one program."""

    def run(program, tests, **options):
        columns = {"entry_point": [options.pop("entry_point", None)]}
        [score] = code_reward([program], tests=[tests], image=IMAGE, **columns, **options)
        return score

    return run
