"""The manifest of a folder: size and BLAKE3 digest of each file, and facts about the folder, which readers check."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rloo_pipeline.artifacts.files import check_facts, read_artifact, read_json, write_json
from rloo_pipeline.errors import UserError, naming
from rloo_pipeline.runtime import ranks
from rloo_pipeline.runtime.progress import announcing

MANIFEST = "manifest.json"
DIGEST = "blake3"
PIECE = 1 << 24
"""Bytes of a file that are read at once: enough for BLAKE3 to use several threads."""
READERS = 4
"""Number of files read in parallel: a parallel file system gives one reader only a small part of its bandwidth."""
LARGE = 1 << 30
"""Size in bytes above which reading a file is announced, because it may take long."""


def digest(path: Path) -> str:
    """Hex BLAKE3 of a file.

    As collision-resistant as SHA-256 and twelve times as fast on CPUs without SHA instructions, on one thread. Every
    round reads the policy several times.
    """
    import blake3

    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    size = path.stat().st_size
    piece = memoryview(bytearray(min(PIECE, size + 1)))
    waits = announcing(f"reading {path} ({size / 1e9:.1f} GB)") if size > LARGE else nullcontext()
    with waits, naming(path), path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            hasher.update(piece[:count])
    return hasher.hexdigest()


def folder_files(folder: Path) -> list[Path]:
    """Files of a folder in sorted order, except hidden files and the manifest."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in files if not path.name.startswith(".") and path.name != MANIFEST)


def file_names(folder: Path) -> list[str]:
    """The names of these files, as paths in the folder."""
    return [str(file.relative_to(folder)) for file in folder_files(folder)]


class Manifest(NamedTuple):
    """The content of a folder's manifest."""

    about: dict[str, Any]
    """The facts that `write_manifest` was given."""
    digests: dict[str, str]
    """Hex BLAKE3 of each file, by its path in the folder."""


def write_manifest(folder: Path, known: Mapping[str, str] = MappingProxyType({}), /, **about: object) -> Manifest:
    """Writes the manifest of a folder: size and digest of each file, and the facts in `about`.

    Args:
        folder: the folder.
        known: digests of files that were computed when they were written, by path in the folder.
        about: the facts.
    """
    # files that another node has written may not be listed here yet
    files = entries(folder, dict.fromkeys([*file_names(folder), *known]), known)
    write_json(folder / MANIFEST, {"about": about, "files": files})
    return Manifest(about, {name: str(entry[DIGEST]) for name, entry in files.items()})


def entries(
    folder: Path, names: Iterable[str], known: Mapping[str, str] = MappingProxyType({})
) -> dict[str, dict[str, Any]]:
    """Size and BLAKE3 digest of files in a folder, for `check_entries`; `known` is as in `write_manifest`."""
    paths = {name: folder / name for name in names}
    return {
        name: {"bytes": path.stat().st_size, DIGEST: known.get(name) or digest(path)} for name, path in paths.items()
    }


def check_entries(
    folder: Path,
    files: Mapping[str, Mapping[str, Any]],
    names: Iterable[str],
    remedy: str,
    added: str = "was not written by this run",
) -> None:
    """Checks the files of a folder, now called `names`, against their entries.

    In a job with several ranks, each rank reads some of the files. Ranks wait for each other before they load weights
    (`split_model.start_ranks`).

    Raises:
        UserError: a file is missing, differs, or is new (`added` tells why that is wrong); `remedy` says what to do.
    """
    for name in sorted(set(names) ^ files.keys()):
        raise UserError(f"{folder / name} {'is missing' if name in files else added}; {remedy}")
    for name, entry in files.items():
        size = (folder / name).stat().st_size
        if size != entry["bytes"]:
            text = f"{folder / name} is truncated or changed ({size} bytes, {entry['bytes']} were written); {remedy}"
            raise UserError(text)
    rank = ranks.current()
    own = sorted(files)[rank.number :: rank.world]
    with ThreadPoolExecutor(READERS) as threads:
        for name, found in zip(own, threads.map(digest, (folder / name for name in own)), strict=True):
            if found != files[name][DIGEST]:
                raise UserError(f"{folder / name} was changed since it was written ({DIGEST} differs); {remedy}")


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a folder without checking the files, which this process has already done."""
    content = read_artifact(folder / MANIFEST)
    return Manifest(content["about"], {name: entry[DIGEST] for name, entry in content["files"].items()})


def read_verified(folder: Path, name: str) -> Any:
    """Reads a JSON file of a folder after checking it against the manifest; returns None if there is no such file."""
    if not (folder / name).exists():
        return None
    verify_manifest(folder, lambda other: other == name)
    return read_json(folder / name)


def verify_manifest(folder: Path, chosen: Callable[[str], object] = bool, **expected: object) -> Manifest:
    """Checks the files of a folder against its manifest.

    Args:
        folder: the folder.
        chosen: returns True for files to check, given their paths in the folder; by default all.
        expected: facts that the folder must have been written with, such as the round.

    Raises:
        UserError: the manifest is missing or has different facts, or a file is missing, added, or differs from what was
            written.
    """
    remedy = f"delete {folder} and run again"
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; run the stage that writes it first")
    if not (folder / MANIFEST).exists():
        raise UserError(f"{folder}: has no {MANIFEST}, so this version of the program did not write it; {remedy}")
    manifest = read_artifact(folder / MANIFEST, remedy)
    check_facts(folder, manifest["about"], expected, remedy)
    files = {name: entry for name, entry in manifest["files"].items() if chosen(name)}
    check_entries(folder, files, filter(chosen, file_names(folder)), remedy)
    return Manifest(manifest["about"], {name: entry[DIGEST] for name, entry in files.items()})
