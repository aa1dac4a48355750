"""A fencing token for each output: of two processes that run the same stage, only the one that started later writes.

A controller that was killed leaves jobs behind, and the next controller starts the same stages again. So each stage
first replaces the token of its output by a new one (a rename), and no writer renames a file into place without checking
that its own token is still there.

Why this is enough: the later process takes the token, removes the temporary files of other writers
(`files.temporary_path`), then writes and renames. If the earlier process wrote its temporary file before that removal,
its rename fails. If it writes one afterwards, its check fails, because the token has changed.

The token file is opened and read again for each check; NFS and Lustre then return what was written last. It is
removed when the stage ends well; a missing token counts as lost. A process that is killed before its rename leaves a
temporary file of 32 bytes, which the next one that takes the token removes.
"""

import glob
import os
import uuid
from contextlib import suppress
from pathlib import Path

from rloo_pipeline.errors import UserError, naming, translate_write_errors

FOLDER = ".fence"
VARIABLE = "RLOO_FENCE"
"""Environment variable with the token and its path, which all processes of a stage inherit."""


_own_tokens: list[str] = []
"""The token that this process took, if any."""


def acquire(run: Path, output: Path) -> None:
    """Makes this process the only one that may write the stage of `output`; a rank inherits its launcher's token."""
    if VARIABLE in os.environ:
        return
    token = uuid.uuid4().hex
    path = run / FOLDER / str(output.absolute().relative_to(run)).replace("/", "__")
    with translate_write_errors(run):
        path.parent.mkdir(exist_ok=True)
        _put(token, path)
    for leftover in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * len(token)}"):
        leftover.unlink(missing_ok=True)
    os.environ[VARIABLE] = f"{token} {path}"
    _own_tokens.append(token)


def _put(token: str, path: Path) -> None:
    """Replaces a token file; retries if another process mistook the temporary file for a killed process's and removed
    it.
    """
    temporary = path.with_name(f"{path.name}.{token}")
    while True:
        temporary.write_text(token)
        with suppress(FileNotFoundError):  # happens at most once for each process that takes the token at the same time
            os.replace(temporary, path)
            return


def check() -> None:
    """Checks that no other process has started the same stage since `acquire`.

    Raises:
        UserError: another process has started it.
    """
    if VARIABLE in os.environ and not _holds_token():
        raise UserError(
            f"{_token_path().name.replace('__', '/')}: the same stage was started again while this one was running; "
            "the later one's result is kept and this one's is dropped"
        )


def release(done: bool = False) -> None:
    """Ends the stage for which this process took a token, so that a worker can run another one.

    Args:
        done: True if the stage succeeded; only then is the token file removed.
    """
    if not _own_tokens or VARIABLE not in os.environ:
        return
    _own_tokens.clear()
    with suppress(OSError):  # the result is complete, and the next process replaces a token that stays
        if done and _holds_token():
            _token_path().unlink(missing_ok=True)
    del os.environ[VARIABLE]


def _holds_token() -> bool:
    try:
        with naming(_token_path()):
            return _token_path().read_text() == os.environ[VARIABLE].partition(" ")[0]
    except FileNotFoundError:
        return False


def _token_path() -> Path:
    return Path(os.environ[VARIABLE].partition(" ")[2])
