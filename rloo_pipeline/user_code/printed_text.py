"""Forwards output of processes in a sandbox or image: a thread copies it from a pipe to this process's stderr.

They hold no file of this process: not its log, which they could cut, nor its terminal, which they could read.
"""

from __future__ import annotations

import os
import threading
from typing import IO

from rloo_pipeline.errors import printable

MOST_BYTES = 1 << 24
"""Maximum number of bytes to copy; the rest is read and dropped, so that no process waits for the pipe."""
END_SECONDS = 5.0
"""Longest wait for remaining output, if a process that outlives the others keeps the pipe open."""


class PrintedText:
    """Copies the text."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.pipe = pipe
        self._copied, self._tail = 0, b""
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        while part := os.read(self.pipe.fileno(), 1 << 16):
            self._tail = (self._tail + part)[-2000:]
            text = part.decode(errors="replace")[: MOST_BYTES - self._copied]
            self._copied += len(text)
            if text:
                os.write(2, printable(text).encode())

    def last_line(self) -> str:
        """The last line, once the processes have ended."""
        self._thread.join(END_SECONDS)
        lines = self._tail.decode(errors="replace").split("\n")
        return next((printable(line).strip() for line in reversed(lines) if line.strip()), "")

    def close(self) -> None:
        """Waits for the rest."""
        self._thread.join(END_SECONDS)
        if not self._thread.is_alive():
            self.pipe.close()
