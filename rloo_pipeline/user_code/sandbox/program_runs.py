"""Runs a program in a sandbox against the tests of its row and counts how many pass.

`rewards/code.py` explains the protocol and its limits.
"""

import json
import math
import os
import select
import subprocess
import threading
import time
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple

from rloo_pipeline.user_code.sandbox import sandbox
from rloo_pipeline.user_code.sandbox.code_tests import Asserts, ScriptCase, UnusableTestsError
from rloo_pipeline.user_code.sandbox.command_line import Sandbox, SandboxLimits
from rloo_pipeline.user_code.sandbox.inside import examiner, program, remote_program, script, wire
from rloo_pipeline.user_code.sandbox.inside.limits import READY

OUTPUT_LIMIT = 1 << 20
"""Maximum number of bytes that a program may print, or 4 times the expected output if that is more."""


class RunSettings(NamedTuple):
    """Sandbox and limits for running programs."""

    confinement: Sandbox
    limits: SandboxLimits
    partial: bool
    """Run all tests, even after one has failed."""
    row_seconds: float = math.inf
    """Time limit for all runs of a row. Cases that remain after it count as failed."""


class ProgramRun(NamedTuple):
    """The outcome of running a program."""

    printed: str
    status: int | None
    """Exit status; None if it did not end in time or printed too much."""
    flooded: bool
    """True if it printed too much."""


def passed_scripts(settings: RunSettings, text: str, cases: list[ScriptCase]) -> int:
    """Counts the cases that a program passes as a script. Stops at the first failure unless `partial` is set, and when
    the row's time is up.
    """
    passed, end = 0, time.monotonic() + settings.row_seconds
    for case in cases:
        if (left := end - time.monotonic()) <= 0:
            break
        run = run_program(settings, text, case.input, max(OUTPUT_LIMIT, 4 * len(case.output)), seconds=left)
        passes = run.status == 0 and _lines(run.printed) == _lines(case.output)
        passed += passes
        if not passes and not settings.partial:
            break
    return passed


def run_program(
    settings: RunSettings,
    text: str,
    stdin_text: str = "",
    most: int = OUTPUT_LIMIT,
    with_errors: bool = False,
    seconds: float = math.inf,
) -> ProgramRun:
    """Runs a program as a script.

    Args:
        settings: sandbox and limits.
        text: the program.
        stdin_text: text for its standard input.
        most: maximum number of bytes that it may print.
        with_errors: treat its standard error as output.
        seconds: time limit of this run, if it is below the settings' limit.

    Raises:
        UnusableTestsError: the sandbox does not start.
    """
    deadline = time.monotonic() + settings.limits.seconds
    code = text.encode(errors="replace")
    stdin = b"%d\n%b%b" % (len(code), code, stdin_text.encode(errors="replace"))
    (of_program, to_program), (output, printer) = Pipe(False), Pipe(False)
    with of_program, to_program, output, printer:
        errors = printer.fileno() if with_errors else subprocess.DEVNULL
        with sandbox.confined(
            script, settings.confinement, settings.limits, (), of_program.fileno(), printer.fileno(), errors
        ) as process:
            of_program.close()
            printer.close()
            _wait_for_start(output, deadline)
            deadline = min(deadline, time.monotonic() + seconds)
            feeder = _feed(to_program, stdin)
            printed, complete = _read(output, deadline, most)
            status = None
            if complete:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(max(0.0, deadline - time.monotonic()))
        feeder.join()
    return ProgramRun(printed.decode(errors="replace"), status, len(printed) > most)


def passed_asserts(settings: RunSettings, text: str, tests: Asserts) -> int:
    """Counts the asserts that a program passes. Stops at the first failure unless `partial` is set.

    The examiner's standard input carries the program and the tests from this process, then the replies from the
    program's process. Both processes therefore use only file descriptors 0 to 2, which every sandbox passes on.

    Raises:
        UnusableTestsError: a sandbox does not start, or the tests need something that the sandbox lacks.
    """
    deadline = time.monotonic() + settings.limits.seconds
    job = {"program": text, "units": tests.units, "builtin": tests.builtin, "all": settings.partial}
    confinement = (settings.confinement, settings.limits)
    (of_examiner, to_examiner), (of_program, to_program), (report, reporter) = (Pipe(False) for _ in range(3))
    with of_examiner, to_examiner, of_program, to_program, report, reporter:
        examiner_ends = of_examiner.fileno(), to_program.fileno(), reporter.fileno()
        with (
            sandbox.confined(examiner, *confinement, (wire, remote_program), *examiner_ends),
            sandbox.confined(program, *confinement, (wire,), of_program.fileno(), to_examiner.fileno()),
        ):
            for end in (of_examiner, of_program, to_program, reporter):
                end.close()
            _wait_for_start(report, deadline)
            feeder = _feed(to_examiner, json.dumps(job).encode() + b"\n")
            lines, _ = _read(report, deadline, OUTPUT_LIMIT)
        feeder.join()
    return _count_passed(lines)


def _count_passed(report: bytes) -> int:
    passed = 0
    for line in report.splitlines():
        result = json.loads(line) if line.startswith(b"{") and line.endswith(b"}") else {}
        if "unsupported" in result:
            raise UnusableTestsError(result["unsupported"])
        passed += bool(result.get("passed"))
    return passed


def _wait_for_start(reader: Connection, deadline: float) -> None:
    """Waits until the other process reports READY; until then it has none of the program's code.

    Raises:
        UnusableTestsError: it does not do so before the deadline.
    """
    if _next_part(reader, deadline, len(READY)) != READY:
        raise UnusableTestsError("the sandbox did not start")


def _feed(writer: Connection, data: bytes) -> threading.Thread:
    """Writes data in a thread while the caller reads the output, then closes the pipe. The thread ends if the reader
    dies.
    """

    def write() -> None:
        unwritten = memoryview(data)
        with suppress(OSError):  # the reader died
            while unwritten:
                unwritten = unwritten[os.write(writer.fileno(), unwritten) :]
            writer.close()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


def _read(reader: Connection, deadline: float, most: int) -> tuple[bytes, bool]:
    """Reads until the end, the deadline, or `most` bytes. Returns the data and True if the end was reached."""
    data = bytearray()
    while len(data) <= most and (part := _next_part(reader, deadline, 1 << 16)) is not None:
        if not part:
            return bytes(data), True
        data += part
    return bytes(data), False


def _next_part(reader: Connection, deadline: float, most: int) -> bytes | None:
    """Waits for up to `most` bytes; empty at the end, None if nothing arrives before the deadline."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    return os.read(reader.fileno(), most) if poll.poll(max(0.0, deadline - time.monotonic()) * 1000) else None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
