"""Errors that a user can fix: one sentence that names the file or key and says what to do."""

import errno
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class UserError(Exception):
    """An error that the program did not cause. The user sees only the message; the traceback goes to the log."""

    def __str__(self) -> str:
        """The message, made `printable` because it may quote data."""
        return printable(super().__str__())


class RefusedPolicyError(UserError):
    """Policy 0 has failed a check that is not accepted."""


class IncompatibleEngine(BaseException):
    """The engine that this worker keeps does not fit the stage. Since a process can load only one engine in its life,
    another process must run the stage. It is a BaseException because the stage has not failed and must not catch it.
    """


CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")})
"""C0 and C1 control characters except newline and tab, as a table for `str.translate`."""


def printable(text: str) -> str:
    """Removes the characters that can control a terminal, such as ESC.

    Text from a model or dataset could otherwise set the window's title, write to the clipboard or clear the screen.
    """
    return text.translate(CONTROLS)


def one_line(text: object, longest: int = 200) -> str:
    """Puts a text or an exception's message on one line of at most `longest` characters, without lone surrogates."""
    try:
        whole = str(text)
    except Exception as error:  # some exceptions of users fail to describe themselves
        whole = f"(its __str__ raised {type(error).__name__})"
    return " ".join(whole.encode(errors="replace").decode().split())[:longest]


def did_you_mean(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns `; did you mean 'x'?` with the most similar candidate, or an empty string if none is similar.

    Args:
        name: the name that the user wrote.
        candidates: valid names.
        cutoff: minimum similarity, from 0 to 1 (difflib's ratio).
    """
    import difflib

    others = [candidate for candidate in candidates if candidate != name]
    matches = difflib.get_close_matches(name, others, n=1, cutoff=cutoff)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def counted(number: int, noun: str) -> str:
    """A number and its noun: `1 round`, `2 rounds`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def unexpanded(path: str) -> str:
    """Returns `; ~ is not expanded …` for a missing path that a shell would have expanded, otherwise an empty
    string.
    """
    part = next((part for part in Path(path).parts if part.startswith(("~", "$"))), None)
    return f"; {part} is not expanded, write out the path" if part else ""


REMEDIES = {
    "SIGXCPU": " (over the limit on CPU time; raise it with `ulimit -t unlimited`)",
    "SIGXFSZ": " (over the limit on file sizes; raise it with `ulimit -f unlimited`)",
    "SIGBUS": " (/dev/shm or a disk is probably full; free some of it, or ask for more)",
}
"""Advice about the signal that killed a process, in words that follow its name."""


def ending(status: int) -> str:
    """Describes an exit status. Shells and srun report 128 plus the number of the signal that killed a command."""
    if status > 128:
        with suppress(ValueError):
            name = signal.Signals(status - 128).name
            return f"killed by {name}{REMEDIES.get(name, '')}"
    return f"ended with exit status {status}" if status else "ended with an error"


OF_FILE_SYSTEM = {errno.EIO, errno.ESTALE, errno.EBUSY, errno.ESHUTDOWN}
"""Errors of a shared file system or its server, most of which do not last."""
DENIED = (errno.EROFS, errno.EACCES, errno.EPERM)
"""Errors of files that this user, or nobody, may read or write."""
OF_FILES = {*DENIED, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, *OF_FILE_SYSTEM}
"""Errors of files for which `explain` suggests a fix."""

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of flock on file systems without locks, such as Lustre mounted without `flock`."""


def explain(error: BaseException) -> str:
    """Explains any exception in one sentence. For a UserError, that is its message."""
    if isinstance(error, UserError):
        return str(error)
    if _is_disk_full(error):
        file = getattr(error, "filename", None) or "an output"
        return f"no space left while writing {file}: free some disk or quota and run again"
    if isinstance(error, OSError) and error.filename and error.errno in DENIED:
        helps = "run again once it can be written" if error.errno == errno.EROFS else "change its permissions"
        return f"{os.fsdecode(error.filename)}: {error.strerror}; {helps}, or use another folder"
    if isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError):
        return f"{os.fsdecode(error.filename2 or error.filename or 'a path')}: {error.strerror}; name a different path"
    if failure := _failure_of_file_system(error):
        return _file_system_failed(getattr(error, "filename", None) or "a file", failure)
    if os.strerror(errno.EFBIG) in str(error):  # safetensors raises its own exception with this text
        file = getattr(error, "filename", None) or "a file"
        return f"{file}: over the limit on file sizes; raise it (`ulimit -f unlimited`)"
    if os.strerror(errno.EMFILE) in str(error):  # Gloo and others raise their own exceptions
        return "over the limit on open files; raise it (`ulimit -n 4096`)"
    if type(error).__name__ == "DistStoreError" and any(os.strerror(code) in str(error) for code in NO_LOCKS):
        return f"TMPDIR is on a file system without locks ({one_line(error)}); set it to a folder on a disk of the node"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; run the same command again to continue"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out of memory: give the job more memory, or end other processes on its machine or GPU"
    if isinstance(error, ModuleNotFoundError) and error.name:  # transformers raises some without a name
        return f"{error.name} is not installed here; use the environment of `make setup`, or `apptainer run IMAGE …`"
    return f"unexpected {type(error).__name__}: {one_line(error, 300)}"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context manager for reading `path`. Adds its name to errors of files, which have none once the file is open."""
    try:
        yield
    except OSError as error:
        if error.errno in OF_FILES:  # others, such as those of a connection, are not about this file
            error.filename = error.filename or str(path)
        raise


@contextmanager
def translate_write_errors(folder: Path) -> Iterator[None]:
    """Context manager for writes to `folder`. Turns an error caused by a full disk or a failed file system into one
    that names the folder.

    Raises:
        UserError: the block failed because there was no space left, or the file system failed.
    """
    try:
        yield
    except Exception as error:
        # torch's writers give neither errno nor its text
        if _is_disk_full(error) or (not isinstance(error, UserError) and nearly_full(folder)):
            raise UserError(no_space_left(folder)) from error
        raise_disk_error(error, folder)
        raise


def raise_disk_error(error: BaseException, place: Path) -> None:
    """Raises an error that a full disk or a failed file system caused, so that handlers for other errors do not reword
    it. One without a file name gets that of `place`.
    """
    if _is_disk_full(error):
        raise error
    if not isinstance(error, UserError) and (failure := _failure_of_file_system(error)):
        raise UserError(_file_system_failed(getattr(error, "filename", None) or place, failure)) from error


def raise_unless_missing(error: BaseException, place: Path) -> None:
    """As `raise_disk_error`, and also for every other error of the system but a missing file."""
    raise_disk_error(error, place)
    if isinstance(error, OSError) and error.errno and not isinstance(error, FileNotFoundError | NotADirectoryError):
        error.filename = error.filename or str(place)
        sentence = f"{os.fsdecode(error.filename)}: {error.strerror}"
        raise UserError(explain(error) if error.errno in DENIED else sentence) from error


NEARLY_FULL = 1 << 16
"""Free bytes below which a disk counts as full."""


def nearly_full(folder: Path) -> bool:
    """True if the disk that holds a folder is nearly full; /proc and other views of the kernel have no size."""
    usage = shutil.disk_usage(folder)
    return usage.total > 0 and usage.free < NEARLY_FULL


def no_space_left(folder: Path) -> str:
    """The error message for a full disk."""
    return f"no space left in {folder}: free some disk or quota and run again"


def _is_disk_full(error: BaseException) -> bool:
    """True if an error means that a disk or quota is full. safetensors and pyarrow raise their own exceptions with the
    same text.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    texts = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "No usable temporary directory")
    return any(text in str(error) for text in texts)


def _failure_of_file_system(error: BaseException) -> str | None:
    """The text of an error of the file system; None for others. safetensors and torch raise their own exceptions."""
    if isinstance(error, OSError) and error.errno:
        return error.strerror if error.errno in OF_FILE_SYSTEM else None
    codes = (errno.EIO, errno.ESTALE, errno.EROFS)
    texts = {f"{os.strerror(code)} ({name}{code})": os.strerror(code) for code in codes for name in ("os error ", "")}
    return next((text for whole, text in texts.items() if whole in str(error)), None)


def _file_system_failed(file: str | bytes | Path, failure: str) -> str:
    return (
        f"{os.fsdecode(file)}: the file system failed ({failure}); run again; if that does not help, use another folder"
    )
