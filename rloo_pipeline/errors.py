"""The errors that a user can mend: one sentence that names the file or key and says what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterable


class UserError(Exception):
    """Something outside the program is wrong; the message is all the user sees, the traceback goes to the log."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest of the known words, or nothing when none is near."""
    import difflib

    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def explain(error: BaseException) -> str:
    """One sentence for any exception: a UserError's own words, or what is known of the other ones."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left while writing {error.filename or 'an output'}: free some disk or quota and run again"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; run the same command again to go on"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out of memory: lower deepspeed.max_tokens_per_micro_batch or give the job more memory"
    text = " ".join(str(error).split())
    return f"unexpected {type(error).__name__}: {text[:300]}"
