"""The version of this package, which pyproject.toml reads, and the commit that it was used at."""

import os

__version__ = "0.1.0"
COMMIT = "RLOO_COMMIT"
"""Environment variable with the commit, followed by ` changed` if files differ from it. The controller sets it, since
an image in which stages run has no git.
"""


def with_commit() -> str:
    """The version, with the commit if the controller found one: `0.1.0+g0123456789ab`, or `….changed`."""
    commit, _, changed = os.environ.get(COMMIT, "").partition(" ")
    return __version__ + (f"+g{commit[:12]}" if commit else "") + (f".{changed}" if changed else "")
