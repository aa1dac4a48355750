"""Programs that are run against tests, in a sandbox.

The program is the last fence of Python in what follows the thinking, or all of that where there is no fence. There are
two kinds of tests, row by row in one column:

- `[{"input": "3 4\\n", "output": "7\\n"}, …]`: the program is run as a script once for each, and what it printed is
  compared line by line, blanks at the ends of lines and empty lines around all left aside. It must also end with exit
  status 0.
- asserts on the program's functions, as MBPP and HumanEval have them: a list of strings, each of them a test, or one
  string, of which each statement that asserts is a test. A function `check(candidate)` (HumanEval) is called with the
  function that the column `entry_point` names.

How a program is kept from faking success: expected outputs never enter its process. For scripts, the comparison is made
here. For asserts, the tests run in a second process with a sandbox of its own. Where they call a function of the
program, the arguments go to the program's process as plain data, and what it returns comes back as plain data, to be
compared by a Python that the program cannot touch. What passed is reported through a pipe that the program's process
does not have.

Covered, since it changes nothing but the program's own process: leaving early with status 0; printing what a harness
would print; patching builtins, unittest or this harness; an `__eq__` that is always true; atexit, threads or tracing
left behind; reading frames, memory or files in search of the expected values; writing to every open descriptor; killing
processes; redefining `abs` or `math` for the tests.

Not covered:

- Expected outputs that stand in the prompt (MBPP shows its asserts): a program can look its answer up in a table. Keep
  some tests out of the prompt.
- Tests that let the program decide: `assert f(x)` where anything true will do; two objects of the program's own classes
  compared with each other; a helper that the tests take from the program, unless it is a builtin or a module of Python;
  an expected value that is worked out from a list after the program had it in hand.
- What the pipe does not carry. A value of the tests' own classes as an argument: the row is None, as the table
  says. Order and arithmetic on objects of the program's own classes, and `isinstance` with such a class: these tests
  fail. A named tuple comes back as a tuple. A list, dict or set that a function changed in place is changed for the
  tests too.

What a run costs before the program does anything, in CPU time on one core of an AMD EPYC: a script 39 ms under
bubblewrap, 125 ms under Apptainer, 34 ms unconfined; all asserts of a row, which need two processes, 99, 271 and 90 ms.

`sandbox.py` says what the sandbox covers. With `allow_unconfined: true` and no sandbox, a program has the rights of
whoever runs the pipeline, and nothing of this holds against one that looks for the other process.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial as bind
from typing import IO, Any, NamedTuple

from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.code_tests import Asserts, Case, UnusableError, read_tests
from rloo_pipeline.sandbox import sandbox
from rloo_pipeline.sandbox.inside import examiner, script, wire
from rloo_pipeline.sandbox.inside import program as served
from rloo_pipeline.sandbox.inside.limits import READY
from rloo_pipeline.scoring.calls import unscored
from rloo_pipeline.scoring.scoring import text_of

FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
PYTHON = ("python", "python3", "py")
OUTPUT_LIMIT = 1 << 20
"""Bytes that a program may print; more than 4 times the expected output where that is long."""


class Settings(NamedTuple):
    """How programs are run and counted."""

    sandbox: sandbox.Sandbox
    limits: sandbox.Limits
    partial: bool


def code_reward(
    completions: list[Any],
    tests_column: str = "tests",
    entry_point_column: str = "entry_point",
    timeout: float = 10.0,
    memory_mb: int = 512,
    file_mb: int = 16,
    processes: int = 8,
    partial: bool = False,
    workers: int = 1,
    read_only: Sequence[str] = (),
    image: str = "",
    allow_unconfined: bool = False,
    **columns: Any,
) -> list[float | None]:
    """1 where a completion's program passes all tests of its row, else 0; None where the row has no tests that can be
    run. All runs of a row must fit into the reward's own `timeout` in the configuration.

    Args:
        completions: in either of TRL's forms.
        tests_column: the column with the tests.
        entry_point_column: the column with the name of the function for `check`, where tests define one.
        timeout: seconds for a run of the program, of wall and of CPU: all asserts of a row together, or one input.
        memory_mb: of each process.
        file_mb: the largest file, and all of /tmp.
        processes: processes and threads at a time.
        partial: the share of tests passed, instead of all or nothing.
        workers: rows at a time.
        read_only: further paths that programs may read; folders are put on Python's path.
        image: an image with a python3, for Apptainer.
        allow_unconfined: run programs with your rights where no sandbox works.
        columns: every column of the dataset.

    Raises:
        UserError: there is no sandbox, no such column, or a row's tests have neither form.
    """
    if tests_column not in columns:
        raise UserError(f"code_reward finds no column '{tests_column}': name the one with the tests in 'tests_column'")
    found = sandbox.find(tuple(read_only), image, allow_unconfined)
    settings = Settings(found, sandbox.Limits(timeout, memory_mb, file_mb, processes), partial)
    entries = columns.get(entry_point_column) or [None] * len(completions)
    rows = list(zip(completions, columns[tests_column], entries, range(len(completions)), strict=True))
    with ThreadPoolExecutor(workers) as pool:
        outcomes = list(pool.map(bind(_row, settings), rows))
    for place, outcome in enumerate(outcomes):
        if isinstance(outcome, UnusableError):
            unscored(place, f"cannot run the tests: {outcome}")
    return [None if isinstance(outcome, UnusableError) else outcome for outcome in outcomes]


def _row(settings: Settings, row: tuple[Any, Any, str | None, int]) -> float | UnusableError | None:
    completion, given, entry, number = row
    try:
        tests = read_tests(given, entry, f"row {number}")
        if tests is None:
            return None
        program = program_of(text_of(completion))
        if program is None:
            return 0.0
        passed = _asserts(settings, program, tests) if isinstance(tests, Asserts) else _cases(settings, program, tests)
    except UnusableError as reason:
        return reason
    share = passed / (tests.tests if isinstance(tests, Asserts) else len(tests))
    return share if settings.partial else float(share == 1)


def program_of(text: str) -> str | None:
    """The program in a completion; None where its thinking never ended."""
    thinking, _, said = text.rpartition("</think>")
    if not thinking and "<think>" in said:
        return None
    fences = [(match[1].lower(), match[2]) for match in FENCE.finditer(said)]
    named = [body for tag, body in fences if tag in PYTHON]
    plain = [body for tag, body in fences if not tag]
    return (named or plain or [said])[-1]


def _cases(settings: Settings, program: str, cases: list[Case]) -> int:
    """How many cases pass; where only all count, up to the first that does not."""
    passed = 0
    for case in cases:
        right = _case(settings, program, case)
        passed += right
        if not right and not settings.partial:
            break
    return passed


def _case(settings: Settings, program: str, case: Case) -> bool:
    """Whether the program, run as a script, prints what is expected and ends well."""
    deadline = time.monotonic() + settings.limits.seconds
    text = program.encode(errors="replace")
    given = b"%d\n%b%b" % (len(text), text, case.input.encode(errors="replace"))
    with Pipe() as to_program, Pipe() as printed:
        how = (settings.sandbox, settings.limits)
        with sandbox.confined(script, *how, stdin=to_program.reader, stdout=printed.writer) as process:
            to_program.reader.close()
            printed.writer.close()
            if not _ready(printed.reader, deadline):
                return False
            feeder = _feed(to_program.writer, given)
            said, whole = _read(printed.reader, deadline, max(OUTPUT_LIMIT, 4 * len(case.output)))
            ended_well = whole and _status(process, deadline) == 0
        feeder.join()
    return ended_well and _lines(said.decode(errors="replace")) == _lines(case.output)


def _asserts(settings: Settings, program: str, tests: Asserts) -> int:
    """How many tests pass; where only all count, up to the first that does not.

    The examiner's standard input is first the program and the tests, from here, and then what the program's process
    says, once it is asked: so both need no descriptors but the first three, which every sandbox passes on.

    Raises:
        UnusableError: the tests need what the sandbox does not have.
    """
    deadline = time.monotonic() + settings.limits.seconds
    given = json.dumps({"program": program, "units": tests.units, "all": settings.partial}).encode() + b"\n"
    how = (settings.sandbox, settings.limits, (wire,))
    with Pipe() as to_examiner, Pipe() as to_program, Pipe() as report:
        with (
            sandbox.confined(examiner, *how, to_examiner.reader, to_program.writer, report.writer),
            sandbox.confined(served, *how, to_program.reader, to_examiner.writer),
        ):
            for end in (to_examiner.reader, to_program.reader, to_program.writer, report.writer):
                end.close()
            if not _ready(report.reader, deadline):
                return 0
            feeder = _feed(to_examiner.writer, given)
            lines, _ = _read(report.reader, deadline, OUTPUT_LIMIT)
        feeder.join()
    passed = 0
    for line in lines.splitlines():
        said = json.loads(line) if line.startswith(b"{") and line.endswith(b"}") else {}
        if "unsupported" in said:
            raise UnusableError(said["unsupported"])
        passed += bool(said.get("passed"))
    return passed


class Pipe:
    """A pipe whose ends are closed at the latest when the block ends."""

    def __enter__(self) -> Pipe:
        reader, writer = os.pipe()
        self.reader, self.writer = os.fdopen(reader, "rb", 0), os.fdopen(writer, "wb", 0)
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()
        self.writer.close()


def _ready(reader: IO[bytes], deadline: float) -> bool:
    """Whether the other side has come up before the deadline."""
    waiting = select.poll()
    waiting.register(reader, select.POLLIN)
    return bool(waiting.poll(max(0.0, deadline - time.monotonic()) * 1000)) and os.read(reader.fileno(), 1) == READY


def _feed(writer: IO[bytes], data: bytes) -> threading.Thread:
    """Writes beside the reading of what comes back, and closes; ends by itself when the reader is dead."""

    def write() -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(writer.fileno(), left) :]
            writer.close()
        except OSError:  # nobody reads it any more
            pass

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


def _read(reader: IO[bytes], deadline: float, most: int) -> tuple[bytes, bool]:
    """What comes until the end, the deadline, or `most` bytes; and whether it was the end."""
    said = bytearray()
    waiting = select.poll()
    waiting.register(reader, select.POLLIN)
    while len(said) <= most:
        if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return bytes(said), False
        part = os.read(reader.fileno(), 1 << 16)
        if not part:
            return bytes(said), True
        said += part
    return bytes(said), False


def _status(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
