"""Errors that a user can fix, as one sentence that names the file or key and says what to do."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """An error outside the program. The user sees only the message; the traceback goes to the log."""

    def __str__(self) -> str:
        """The message, which may quote data, as `printable` text."""
        return printable(super().__str__())


class RefusedPolicyError(UserError):
    """Policy 0 has failed a check that is not accepted."""


class IncompatibleEngine(BaseException):
    """The engine that this worker keeps does not fit the stage, and a process can only ever load one engine, so another
    process must run the stage. A BaseException, because the stage itself has not failed and must not catch it.
    """


CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")})
"""C0 and C1 control characters but newline and tab, as `str.translate` takes them."""


def printable(text: str) -> str:
    """`text` without the characters with which a terminal could be controlled, such as ESC.

    Text of a model or a data set could otherwise set the window's title, write to the clipboard or clear the screen.
    """
    return text.translate(CONTROLS)


def one_line(text: object, longest: int = 200) -> str:
    """A text, or the message of an error, on one line of at most `longest` characters that UTF-8 has."""
    return " ".join(str(text).encode(errors="replace").decode().split())[:longest]


def did_you_mean(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean 'x'?` with the most similar candidate, or an empty string if none is similar.

    Args:
        name: name as the user wrote it.
        candidates: valid names.
        cutoff: minimum similarity, from 0 to 1 (difflib's ratio).
    """
    import difflib

    others = [candidate for candidate in candidates if candidate != name]
    matches = difflib.get_close_matches(name, others, n=1, cutoff=cutoff)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def unexpanded(path: str) -> str:
    """`; ~ is not expanded …` for a missing path that a shell would have expanded, or an empty string."""
    part = next((part for part in Path(path).parts if part.startswith(("~", "$"))), None)
    return f"; {part} is not expanded, write out the path" if part else ""


OF_FILES = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of writing that `explain` says what to do about."""


def explain(error: BaseException) -> str:
    """One sentence for any exception; a UserError is its own message."""
    if isinstance(error, UserError):
        return str(error)
    if _is_disk_full(error):
        file = getattr(error, "filename", None) or "an output"
        return f"no space left while writing {file}: free some disk or quota and run again"
    if isinstance(error, OSError) and error.filename and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"{os.fsdecode(error.filename)}: {error.strerror}; change its permissions, or use another folder"
    if os.strerror(errno.EFBIG) in str(error):  # safetensors raises its own exception with this text
        file = getattr(error, "filename", None) or "a file"
        return f"{file}: over the limit on file sizes; raise it (`ulimit -f unlimited`)"
    if os.strerror(errno.EMFILE) in str(error):  # Gloo and others raise their own exceptions
        return "over the limit on open files; raise it (`ulimit -n 4096`)"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; run the same command again to continue"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out of memory: give the job more memory, or end other processes on its machine or GPU"
    return f"unexpected {type(error).__name__}: {one_line(error, 300)}"


@contextmanager
def translate_disk_full(folder: Path) -> Iterator[None]:
    """Context manager for writing to `folder`: turns an error caused by a full disk into one that names the folder.

    Raises:
        UserError: the block failed because there was no space left.
    """
    try:
        yield
    except Exception as error:
        # torch's writers give neither the errno nor its text
        if _is_disk_full(error) or (not isinstance(error, UserError) and nearly_full(folder)):
            raise UserError(no_space_left(folder)) from error
        raise


def raise_disk_full(error: BaseException) -> None:
    """Re-raises an error that a full disk caused, so that handlers for other errors do not reword it."""
    if _is_disk_full(error):
        raise error


NEARLY_FULL = 1 << 16
"""Free bytes below which a disk counts as full."""


def nearly_full(folder: Path) -> bool:
    """True if the disk of a folder is full."""
    return shutil.disk_usage(folder).free < NEARLY_FULL


def no_space_left(folder: Path) -> str:
    """The sentence about a full disk."""
    return f"no space left in {folder}: free some disk or quota and run again"


def _is_disk_full(error: BaseException) -> bool:
    """True if a disk or quota is full; safetensors and pyarrow raise their own exceptions with the same text."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    texts = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "No usable temporary directory")
    return any(text in str(error) for text in texts)
