"""The version of this package, which pyproject.toml reads, and the commit that it was used at."""

import os

__version__ = "0.1.0"
COMMIT = "RLOO_COMMIT"
"""Environment variable with the commit, followed by ` changed` if files differ from it. The controller sets it, since
an image in which stages run has no git.
"""


def with_commit(commit: str | None = None) -> str:
    """The version and, if known, the commit: `0.1.0+g0123456789ab`, with `.changed` if files differed from that.

    Args:
        commit: as in `COMMIT`; None for what the controller found.
    """
    number, _, changed = (os.environ.get(COMMIT, "") if commit is None else commit).partition(" ")
    return __version__ + (f"+g{number[:12]}" if number else "") + (f".{changed}" if changed else "")
