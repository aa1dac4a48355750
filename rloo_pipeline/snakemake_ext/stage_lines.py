"""Captures output of jobs to the terminal while a live display is shown, and prints it above the display.

Jobs inherit the terminal from Snakemake, and a line in the middle of a display would garble it. So while the display is
on, standard output and error of this process, and of everything that it starts, go to an unnamed file. It is a file and
not a pipe, so that a job that outlives a killed Snakemake can still write to it.
"""

import os
import tempfile
import threading
from collections.abc import Callable

INTERVAL = 0.1
"""Seconds between reads of the file."""


class StageLines:
    """Captures what is written to the terminal, and passes it on line by line."""

    def __init__(self, show: Callable[[str], None]) -> None:
        """Starts capturing lines.

        Args:
            show: called with each line, from a separate thread.
        """
        self._show = show
        self._file = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115 - stays open until stop()
        self._read_until, self._rest = 0, b""
        self._saved = {number: os.dup(number) for number in (1, 2) if os.isatty(number)}
        for number in self._saved:
            os.dup2(self._file.fileno(), number)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Releases the terminal, and shows the remaining lines."""
        for number, terminal in self._saved.items():
            os.dup2(terminal, number)
            os.close(terminal)
        self._stopped.set()
        self._thread.join()
        self._take()
        if self._rest:
            self._show(_text(self._rest))
        self._file.close()

    def _follow(self) -> None:
        while not self._stopped.wait(INTERVAL):
            self._take()

    def _take(self) -> None:
        """Shows the complete lines that have arrived."""
        while data := os.pread(self._file.fileno(), 1 << 20, self._read_until):
            self._read_until += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._show(_text(line))


def _text(line: bytes) -> str:
    """A line as a terminal would finally show it, after carriage returns have overwritten parts."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", errors="replace")
