"""Files that are whole or absent, and digests of them.

Everything is written beside its place and renamed into it, so that a reader, a rerun or a second writer never sees a
half of it. A folder carries a manifest of sizes and BLAKE3 digests where its content must be trusted later.
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


def place_beside(path: Path) -> Path:
    """A fresh hidden name beside `path` to write under.

    What an earlier writer of the same path left there is removed; if it is still alive, it fails at its rename.

    Raises:
        UserError: a later process is at work on the same stage (fence.py).
    """
    fence.check()
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A path to write to; it becomes `path` when the block ends well, and is gone when it does not."""
    beside = place_beside(path)
    try:
        with translate_disk_full(path.parent):
            yield beside
            _sync(beside)
            fence.check()
            os.replace(beside, path)
            _sync(path.parent)
    except FileNotFoundError:
        fence.check()  # a later process has removed it
        raise
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """An empty folder to fill; it takes the place of `path` when the block ends well, and is gone when it does not."""
    beside = place_beside(path)
    try:
        with translate_disk_full(path.parent):
            beside.mkdir()
            yield beside
            put_folder(beside, path)
    except FileNotFoundError:
        fence.check()  # a later process has removed it
        raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def put_folder(beside: Path, path: Path) -> None:
    """Forces a finished folder to the disk and renames it to `path`, in place of what was there."""
    for file in beside.rglob("*"):
        if file.is_file() and not file.is_symlink():
            _share(file)
        _sync(file)
    before = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    fence.check()
    if path.exists():
        os.replace(path, before)
    try:
        os.replace(beside, path)
    except FileNotFoundError:  # a later process has removed it: what was at its place is that one's
        if before.exists():
            os.replace(before, path)
        raise
    _sync(path.parent)
    shutil.rmtree(before, ignore_errors=True)


def _share(path: Path) -> None:
    """Gives a file the rights that the umask grants; safetensors writes files that only their owner can read."""
    if path.stat().st_nlink == 1:
        path.chmod(0o666 & ~UMASK)


def _sync(path: Path) -> None:
    """Forces a file, or the names in a folder, to the disk."""
    if path.is_symlink():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: object) -> None:
    """Indented JSON with sorted keys; NaN is refused, since no other reader takes it."""
    with atomic_write(path) as beside:
        beside.write_text(json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")


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
    """Hex SHA-256 of a file's bytes: for what people compare with other programs."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(path: Path) -> str:
    """Hex BLAKE3 of a file's bytes: as hard to forge as SHA-256, and twelve times as fast on CPUs that have no
    instructions for that one. Every round reads policy and trainer state several times.
    """
    import blake3

    made: Any = blake3.blake3
    with path.open("rb") as file:
        return hashlib.file_digest(file, made).hexdigest()


def folder_files(folder: Path) -> list[Path]:
    """The files of a folder in a fixed order, without hidden ones and the manifest itself."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in files if not path.name.startswith(".") and path.name != MANIFEST)


def write_manifest(folder: Path, **about: object) -> None:
    """Records size and digest of every file of a folder, and what it is `about`, in its manifest."""
    entries = {str(f.relative_to(folder)): {"bytes": f.stat().st_size, DIGEST: digest(f)} for f in folder_files(folder)}
    write_json(folder / MANIFEST, {"about": about, "files": entries})


def folder_digest(folder: Path) -> str:
    """One digest for a folder's whole content, from its manifest when it has one.

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
    """What the folder's manifest says it is about, once every file matches it.

    Raises:
        UserError: the manifest is missing, or a file is missing, added, or differs from what was written.
    """
    manifest = read_json(folder / MANIFEST)
    found = {str(f.relative_to(folder)) for f in folder_files(folder)}
    for name in sorted(found ^ manifest["files"].keys()):
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
    """The same file at another place: a hard link where the file system allows one, else a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
