"""Weights of policies on a node's own disk or in its memory (`exchange`), with links to them in the run's folder.

Each node of an update has a copy of all of them. Only policies that the run does not keep are stored this way. They go
below a folder that the controller makes on each node and removes when it ends (snakemake_ext/node_exchange.py), under
the paths that the policies had while they were written, so no two policies share one.
"""

import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path

from rloo_pipeline.artifacts import files, manifest
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import scratch

WRITTEN = ".*.tmp"
"""Pattern of the name of a folder in which a policy is written, and so of its `place`."""


def place(written: Path) -> Path | None:
    """The folder on this node for the weights of a policy; None if the controller has made none.

    Args:
        written: folder beside the run's policies in which the policy is written.
    """
    store = os.environ.get(scratch.EXCHANGE)
    return Path(store) / written.absolute().relative_to("/") if store else None


def make(folder: Path, policies: Path) -> None:
    """Makes the `place` of a policy, and removes the places of this run's policies that are no longer needed.

    Args:
        folder: the place.
        policies: the run's policies.

    Raises:
        UserError: this node does not have the controller's folder.
    """
    store = Path(os.environ[scratch.EXCHANGE])
    if not store.is_dir() or store.stat().st_uid != os.getuid():
        raise UserError(
            f"{store}: this folder for policies (exchange) is missing on {socket.gethostname()}, or belongs to another "
            "user; run again, or set exchange: shared"
        )
    linked = set[Path]()
    for link in (link for policy in policies.glob("[0-9]*") for link in links(policy)):
        with suppress(FileNotFoundError):  # Snakemake removes policies that no job needs any more
            linked.add(link.readlink().parent)
    for other in folder.parent.glob(WRITTEN):
        if other not in {*linked, folder}:
            shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)


def links(policy: Path) -> list[Path]:
    """The weight files of a policy that are links to a node's files; links that a user made do not count."""
    linked = (file for file in sorted(policy.glob("*.safetensors")) if file.is_symlink())
    return [file for file in linked if file.readlink().parent.match(WRITTEN)]


def fill(policy: Path, *copies: Path) -> bool:
    """Replaces the links of a policy with files, copied from this node or from folders with the same policy.

    Readers check the digests. Returns False if a file is in none of these places, or differs in size from the original.
    """
    sizes = files.read_artifact(policy / manifest.MANIFEST)["files"]
    for link in links(policy):
        candidates = (link.parent / link.readlink(), *(folder / link.name for folder in copies))
        whole = (file for file in candidates if file.is_file() and file.stat().st_size == sizes[link.name]["bytes"])
        if (source := next(whole, None)) is None:
            return False
        with files.atomic_write(link) as temporary:
            files.link_or_copy(source, temporary)
    return True
