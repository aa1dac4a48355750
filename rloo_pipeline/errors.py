"""The errors that a user can mend: one sentence that names the file or key and says what to do."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """Something outside the program is wrong; the message is all the user sees, the traceback goes to the log."""


class IncompatibleEngine(BaseException):
    """The engine that this worker keeps is not what the stage needs, and a process holds one engine in its life: the
    stage is for another process. No error of the stage, hence no Exception.
    """


def did_you_mean(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """`; did you mean 'x'?` for the nearest of the known words, or nothing when none is near.

    Args:
        word, known: what was written, and what is there.
        likeness: least similarity, from 0 to 1 (difflib's ratio).
    """
    import difflib

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f"; did you mean '{near[0]}'?" if near else ""


def explain(error: BaseException) -> str:
    """One sentence for any exception: a UserError's own words, or what is known of the other ones."""
    if isinstance(error, UserError):
        return str(error)
    if _full(error):
        place = getattr(error, "filename", None) or "an output"
        return f"no space left while writing {place}: free some disk or quota and run again"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; run the same command again to go on"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out of memory: lower deepspeed.max_tokens_per_micro_batch or give the job more memory"
    text = " ".join(str(error).split())
    return f"unexpected {type(error).__name__}: {text[:300]}"


@contextmanager
def translate_disk_full(folder: Path) -> Iterator[None]:
    """A block that writes to a folder: where there is no space left, the error names it.

    Raises:
        UserError: in place of any error that the block ends with for want of space.
    """
    try:
        yield
    except Exception as error:
        # torch's writers say neither the number nor the reason
        if _full(error) or (not isinstance(error, UserError) and shutil.disk_usage(folder).free < LITTLE):
            raise UserError(f"no space left in {folder}: free some disk or quota and run again") from error
        raise


LITTLE = 1 << 16
"""Free bytes of a disk that is as good as full."""


def _full(error: BaseException) -> bool:
    """Whether a disk or a quota is used up; safetensors and pyarrow say so in words of their own."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(words in str(error) for words in (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT)))
