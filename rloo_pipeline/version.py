"""The version of this package, which pyproject.toml reads."""

import os

__version__ = "0.1.0"
VERSION = "RLOO_VERSION"
"""Environment variable with the version and the commit that last changed the code. The controller sets it, since an
image in which stages run has no git.
"""


def with_commit() -> str:
    """The version and, if known, the commit: `0.1.0+g0123456789ab`, with `.changed` if code differed from that."""
    return os.environ.get(VERSION, __version__)
