"""Of two processes at work on the same output, the one that started later writes it, whatever the other one does.

A controller that was killed leaves jobs behind, and the next one starts the same stages again. So each stage, when it
starts, puts a token of its own in the place of the one before, by a rename, and nobody puts a file in its place without
having seen that the token is still there. Why that suffices: a later process first takes the token, then removes what
others have beside the place (`files.place_beside`), then writes and renames. Of an earlier one, what it had beside the
place before that removal is gone, so that its rename fails; what it puts there afterwards is checked against the token,
which is another by then.

The token is a file that is opened and read anew each time, which NFS and Lustre answer with what was last written. It
goes when the stage ends well: no token is not one's own token.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from rloo_pipeline.errors import UserError, translate_disk_full

FOLDER = ".fence"
VARIABLE = "RLOO_FENCE"
"""Environment variable with the token and its place, for the processes of one stage."""


_mine: list[str] = []
"""The token that this process took, if it did."""


def take(run: Path, output: Path) -> None:
    """Makes this process the one that may write what goes with `output`; a rank has its token from who started it."""
    if VARIABLE in os.environ:
        return
    token = uuid.uuid4().hex
    place = run / FOLDER / str(output.absolute().relative_to(run)).replace("/", "__")
    with translate_disk_full(run):
        place.parent.mkdir(exist_ok=True)
        beside = place.with_name(f"{place.name}.{token}")
        beside.write_text(token)
        os.replace(beside, place)
    os.environ[VARIABLE] = f"{token} {place}"
    _mine.append(token)


def check() -> None:
    """Sees that nobody has started the same stage since.

    Raises:
        UserError: somebody has.
    """
    if VARIABLE in os.environ and not _own():
        raise UserError(
            f"{_place().name.replace('__', '/')}: the same stage was started again while this one was at work; "
            "the later one's result stands and this one's is dropped"
        )


def give_back(done: bool = False) -> None:
    """The end of the stage that this process took a token for; the token goes when the stage is done.

    The process may do another stage after it: a worker's does.
    """
    if not _mine or VARIABLE not in os.environ:
        return
    _mine.clear()
    if done and _own():
        _place().unlink(missing_ok=True)
    del os.environ[VARIABLE]


def _own() -> bool:
    try:
        return _place().read_text() == os.environ[VARIABLE].partition(" ")[0]
    except FileNotFoundError:
        return False


def _place() -> Path:
    return Path(os.environ[VARIABLE].partition(" ")[2])
