"""Known programs that a sandbox must grade correctly before it grades others, so that a broken sandbox is an error and
not a score of 0.
"""

import functools
import importlib
from contextlib import suppress

from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code.sandbox.code_tests import Asserts, ScriptCase, UnusableTestsError
from rloo_pipeline.user_code.sandbox.command_line import Sandbox, SandboxLimits
from rloo_pipeline.user_code.sandbox.program_runs import RunSettings, passed_asserts, passed_scripts, run_program

MODULES = ("bz2", "ctypes", "decimal", "hashlib", "lzma", "sqlite3", "ssl", "uuid", "zlib", "zoneinfo")
"""Standard library modules that need system libraries."""
LEAST_SECONDS = 60.0
"""The self-test may take longer than a program, since a slow machine is not a broken sandbox."""
USES = """
import importlib, os
for name in {modules}:
    try:
        importlib.import_module(name)
    except Exception as error:
        print(f"cannot import {{name}} ({{str(error) or type(error).__name__}})")
for path in {paths}:
    try:
        os.listdir(path) if os.path.isdir(path) else open(path).close()
    except OSError as error:
        print(f"cannot read {{path}} ({{error}})")
"""
RIGHT, WRONG = "def f(x): return x + 1\nprint(f(1))", "def f(x): return x\nprint(f(1))"
TESTS, CASES = Asserts([("assert f(1) == 2", True)]), [ScriptCase("", "2")]


@functools.cache
def self_test(sandbox: Sandbox, limits: SandboxLimits) -> None:
    """Grades known programs under the limits of the reward, once per process.

    Raises:
        UserError: programs cannot import or read what they should, a right program fails, or a wrong one passes.
    """
    settings = RunSettings(sandbox, limits._replace(seconds=max(limits.seconds, LEAST_SECONDS)), False)
    right = wrong = False
    with suppress(UnusableTestsError):  # the sandbox does not start
        run = run_program(settings, USES.format(modules=_importable(), paths=sandbox.read_only))
        if run.printed:
            raise UserError(
                f"the sandbox ({sandbox.kind}) {run.printed.splitlines()[0]}: make the libraries of Python and the "
                "system, and the paths in 'read_only', readable for everybody, or raise 'memory_mb'"
            )
        wrong = passed_asserts(settings, WRONG, TESTS) == 1 or passed_scripts(settings, WRONG, CASES) == 1
        right = passed_asserts(settings, RIGHT, TESTS) == 1 and passed_scripts(settings, RIGHT, CASES) == 1
        right = right and run.status == 0
    if wrong or not right:
        raise UserError(
            f"the sandbox ({sandbox.kind}) {'passes a wrong' if wrong else 'fails a right'} program, so scores would "
            f"be wrong: raise the options 'memory_mb' ({limits.memory_mb}), 'file_mb' ({limits.file_mb}) or "
            f"'processes' ({limits.processes})"
        )


def _importable() -> list[str]:
    """The MODULES that this Python can import outside a sandbox."""
    importable = []
    for name in MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
            importable.append(name)
    return importable
