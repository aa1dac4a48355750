"""Rewards programs that pass tests, which run in a sandbox.

The program is the last Python code block after the thinking, or all text after it if there is no code block. Tests are
in a column of the dataset, and each row has one of two kinds:

- `[{"input": "3 4\\n", "output": "7\\n"}, …]`: the program runs as a script once per test. Its output is compared line
  by line; blanks at line ends, and white space at the beginning and end of the output, are ignored. The exit status
  must be 0.
- asserts on the program's functions, as in MBPP and HumanEval: a list of strings, each of which is a test, or a single
  string in which each asserting statement is a test. A function `check(candidate)` (HumanEval) is called with the
  function that the column `entry_point` names. If the only name that tests use is a builtin, as in `assert sum(10, 15)
  == 6`, it is taken to be the program's function.

How programs are kept from faking success: expected outputs never enter the program's process. For scripts, this process
compares outputs. For asserts, the tests run in a second process with its own sandbox. When they call a function of the
program, the arguments go to the program's process as plain data and the result comes back as plain data, to be compared
by a Python process that the program cannot change. Passed tests are reported through a pipe that the program's process
does not have.

Covered, because it affects only the program's own process: exiting early with status 0; printing what a test harness
would print; patching builtins, unittest or this harness; an `__eq__` that is always true; leftover atexit handlers,
threads or tracing; searching frames, memory or files for expected values; writing to every open file descriptor;
killing processes; redefining `abs` or `math` for the tests.

Not covered:

- Expected outputs in the prompt (MBPP shows its asserts): a program can look up answers in a table. Keep some tests out
  of the prompt.
- Tests that let the program decide: `assert f(x)`, which any true value passes; comparisons between two objects of the
  program's own classes; `x in` such an object; a helper that the tests take from the program, unless it is a builtin or
  a standard module; an expected value computed from a list that the program has already had; `np.allclose` and `(… ==
  …).all()`, which are true for an empty array (`np.testing.assert_allclose` compares shapes).
- Values that the pipe cannot carry. If an argument is an `async def` or of a class that the tests define, the row gets
  None, with a reason in the column `error`. If a function of the tests returns such a value to the program, the program
  gets a TypeError. Tests fail if they use order or arithmetic on objects of the program's classes, `isinstance` with
  such a class, or a context manager of the program that suppresses an exception. A named tuple comes back as a tuple. A
  list, dict, set or deque that a function changes in place is changed for the tests too. Coroutines run one after
  another.

Start-up takes CPU time, measured on one core of an AMD EPYC: for a script 39 ms under bubblewrap, 125 ms under
Apptainer, 34 ms unconfined; for all asserts of a row, which need two processes, 99, 271 and 90 ms.

`user_code/sandbox` lists what the sandbox covers. With `allow_unconfined: true` and no sandbox, a program has the
rights of the user who runs the pipeline, and none of this holds against a program that looks for the other process.
"""

import re
from collections.abc import Sequence
from typing import Any

from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code.completion_text import THINK_END, THINK_START, text_of
from rloo_pipeline.user_code.reward_call import unscored
from rloo_pipeline.user_code.sandbox import sandbox
from rloo_pipeline.user_code.sandbox.code_tests import Asserts, UnusableTestsError, read_tests
from rloo_pipeline.user_code.sandbox.command_line import SandboxLimits
from rloo_pipeline.user_code.sandbox.program_runs import RunSettings, passed_asserts, passed_scripts
from rloo_pipeline.user_code.sandbox.self_test import self_test

FENCE = re.compile(r"^[ \t]*```[ \t]*+([\w+-]*+)[^\n]*+\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
PYTHON = ("python", "python3", "py")


def code_reward(
    completions: list[Any],
    tests_column: str = "tests",
    entry_point_column: str = "entry_point",
    timeout: float = 10.0,
    row_timeout: float = 40.0,
    memory_mb: int = 512,
    file_mb: int = 16,
    processes: int = 8,
    partial: bool = False,
    read_only: Sequence[str] = (),
    image: str = "",
    allow_unconfined: bool = False,
    **columns: Any,
) -> list[float | None]:
    """1 if a completion's program passes all tests of its row, otherwise 0; None if the row has no usable tests.

    A program that takes too long fails. `row_timeout` plus `timeout` must stay below the reward's `timeout` in the
    configuration, since a row that exceeds that gets no score.

    Args:
        completions: strings, or lists of messages, of which the last one counts.
        tests_column: name of the column with the tests.
        entry_point_column: name of the column with the function to pass to `check`, if the tests define `check`.
        timeout: seconds of wall-clock time and of CPU time per run of the program (all asserts of a row, or one input).
        row_timeout: seconds for all runs of a row. Remaining inputs count as failed.
        memory_mb: memory limit of each process, in MiB.
        file_mb: limit on the size of a file, and on the total size of /tmp, in MiB. /tmp may have 256 files per MiB.
        processes: maximum number of concurrent processes and threads.
        partial: return the share of passed tests instead of 0 or 1.
        read_only: more paths that programs may read; folders are added to Python's path.
        image: Apptainer image with a python3.
        allow_unconfined: run programs with the user's rights if no sandbox works.
        columns: every column of the dataset.

    Raises:
        UserError: a sandbox or column is missing, the sandbox fails its self-test, or tests have neither form.
    """
    if tests_column not in columns:
        raise UserError(f"code_reward finds no column '{tests_column}': name the one with the tests in 'tests_column'")
    confinement = sandbox.find(tuple(read_only), image, allow_unconfined)
    limits = SandboxLimits(timeout, memory_mb, file_mb, processes)
    self_test(confinement, limits)
    settings = RunSettings(confinement, limits, partial, row_timeout)
    entry_points = columns.get(entry_point_column) or [None] * len(completions)
    scores = list[float | None]()
    for row in zip(completions, columns[tests_column], entry_points, strict=True):
        try:
            scores.append(_score(settings, *row))
        except UnusableTestsError as reason:
            unscored(len(scores), f"cannot run the tests: {reason}")
            scores.append(None)
    return scores


def _score(settings: RunSettings, completion: Any, column_value: Any, entry_point: str | None) -> float | None:
    tests = read_tests(column_value, entry_point)
    if tests is None:
        return None
    program = program_of(text_of(completion))
    if program is None:
        return 0.0
    if isinstance(tests, Asserts):
        share = passed_asserts(settings, program, tests) / tests.num_tests
    else:
        share = passed_scripts(settings, program, tests) / len(tests)
    return share if settings.partial else float(share == 1)


def program_of(text: str) -> str | None:
    """The program in a completion; None if the thinking does not end."""
    thinking, _, reply = text.rpartition(THINK_END)
    if not thinking and THINK_START in reply:
        return None
    fences = [(match[1].lower(), match[2]) for match in FENCE.finditer(reply)]
    python = [body for tag, body in fences if tag in PYTHON]
    untagged = [body for tag, body in fences if not tag]
    return (python or untagged or [reply])[-1]
