"""Atomic writes of files and folders, and their digests.

Everything is written under a temporary name in the same folder and then renamed, so no reader, rerun or second writer
ever sees an incomplete file. Folders whose content must be verified later carry a manifest with the size and BLAKE3
digest of each file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import fence
from rloo_pipeline.errors import UserError, translate_disk_full

MANIFEST = "manifest.json"
DIGEST = "blake3"
UMASK = os.umask(0o022)
os.umask(UMASK)


def temporary_path(path: Path) -> Path:
    """A new hidden path in the folder of `path`, to be written and then renamed to `path`.

    Removes the temporary files that earlier writers of `path` left; an earlier writer that still runs fails at its
    rename.

    Raises:
        UserError: a later process runs the same stage (fence.py).
    """
    fence.check()
    path.parent.mkdir(parents=True, exist_ok=True)
    for stale in path.parent.glob(f".{path.name}.*.tmp"):
        if stale.is_dir():
            shutil.rmtree(stale, ignore_errors=True)
        else:
            stale.unlink(missing_ok=True)
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary path; it is renamed to `path` if the block succeeds and removed if it raises."""
    temporary = temporary_path(path)
    try:
        with translate_disk_full(path.parent):
            yield temporary
            _sync(temporary)
            fence.check()
            os.replace(temporary, path)
            _sync(path.parent)
    except FileNotFoundError:
        fence.check()  # a later process has removed it
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields an empty temporary folder; it replaces `path` if the block succeeds and is removed if it raises."""
    temporary = temporary_path(path)
    try:
        with translate_disk_full(path.parent):
            temporary.mkdir()
            yield temporary
            replace_folder(temporary, path)
    except FileNotFoundError:
        fence.check()  # a later process has removed it
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def replace_folder(temporary: Path, path: Path) -> None:
    """Syncs a finished folder to disk and renames it to `path`, replacing the folder that is there."""
    for file in temporary.rglob("*"):
        if file.is_file() and not file.is_symlink():
            _share(file)
        _sync(file)
    previous = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    fence.check()
    if path.exists():
        os.replace(path, previous)
    try:
        os.replace(temporary, path)
    except FileNotFoundError:  # a later process has removed it, and `previous` is that process's result
        if previous.exists():
            os.replace(previous, path)
        raise
    _sync(path.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _share(path: Path) -> None:
    """Gives a file the permissions of the umask, since safetensors makes its files readable by their owner only."""
    if path.stat().st_nlink == 1:
        path.chmod(0o666 & ~UMASK)


def _sync(path: Path) -> None:
    """Syncs a file, or the entries of a folder, to disk."""
    if path.is_symlink():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: object) -> None:
    """Writes indented JSON with sorted keys; refuses NaN, which is not valid JSON."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        UserError: the file is missing or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run the stage that writes it first") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); delete it and run again") from error


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file, for digests that people compare with other programs."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(path: Path) -> str:
    """Hex BLAKE3 of a file.

    As collision-resistant as SHA-256 and twelve times as fast on CPUs without SHA instructions. Every round reads
    policy and trainer state several times.
    """
    import blake3

    hasher: Any = blake3.blake3
    with path.open("rb") as file:
        return hashlib.file_digest(file, hasher).hexdigest()


def folder_files(folder: Path) -> list[Path]:
    """The files of a folder in sorted order, without hidden files and the manifest."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in files if not path.name.startswith(".") and path.name != MANIFEST)


def write_manifest(folder: Path, **about: object) -> None:
    """Writes the manifest of a folder: size and digest of each file, and the facts in `about`."""
    entries = {str(f.relative_to(folder)): {"bytes": f.stat().st_size, DIGEST: digest(f)} for f in folder_files(folder)}
    write_json(folder / MANIFEST, {"about": about, "files": entries})


def folder_digest(folder: Path) -> str:
    """One digest of a folder's content, computed from its manifest where it has one.

    Raises:
        UserError: the folder does not exist.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; run the stage that writes it first")
    if (folder / MANIFEST).exists():
        return digest(folder / MANIFEST)
    lines = (f"{f.relative_to(folder)} {digest(f)}\n" for f in folder_files(folder))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def verify_manifest(folder: Path) -> dict[str, Any]:
    """Checks every file of a folder against its manifest.

    Returns:
        The facts in `about` that `write_manifest` was given.

    Raises:
        UserError: the manifest is missing, or a file is missing, added, or differs from what was written.
    """
    manifest = read_json(folder / MANIFEST)
    names = {str(f.relative_to(folder)) for f in folder_files(folder)}
    for name in sorted(names ^ manifest["files"].keys()):
        state = "is missing" if name in manifest["files"] else "was not written by this run"
        raise UserError(f"{folder / name} {state}: delete {folder} and run again")
    for name, entry in manifest["files"].items():
        file = folder / name
        if file.stat().st_size != entry["bytes"]:
            size = file.stat().st_size
            raise UserError(
                f"{file} is truncated or changed ({size} bytes, {entry['bytes']} "
                f"were written): delete {folder} and run again"
            )
        if digest(file) != entry.get(DIGEST):
            raise UserError(
                f"{file} was changed since it was written ({DIGEST} differs): delete {folder} and run again"
            )
    about: dict[str, Any] = manifest["about"]
    return about


def link_or_copy(source: Path, target: Path) -> None:
    """Makes `target` a hard link to `source`, or a copy where the file system does not allow links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
