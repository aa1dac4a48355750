"""Atomic writes of files and folders, and JSON files with a digest of their content, which readers check.

Everything is written under a temporary name in the same folder and then renamed, so no reader, rerun or second writer
ever sees an incomplete file. `manifest.py` has the digests of whole folders.
"""

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import fence
from rloo_pipeline.errors import UserError, naming, translate_write_errors

SEAL = "blake2b"
"""Key of a JSON file that holds the digest of the other keys; not BLAKE3, which the controller lacks."""
REMEDY = "delete it and run again"
OUTPUT_CACHE = "SNAKEMAKE_OUTPUT_CACHE"
"""Variable that names the folder in which `snakemake --cache` keeps files."""
TIMESTAMP = ".snakemake_timestamp"
"""Snakemake's file in a folder that records when its job ran."""
UMASK = os.umask(0o022)
os.umask(UMASK)


def temporary_path(path: Path) -> Path:
    """A new hidden path in the folder of `path`, to be written and then renamed to `path`.

    Removes the temporary files that earlier writers of `path` left; an earlier writer that is still running fails at
    its rename.

    Raises:
        UserError: a later process runs the same stage (fence.py).
    """
    fence.check()
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_temporary(path.parent, path.name)
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def remove_temporary(folder: Path, name: str) -> None:
    """Removes a folder's temporary files for files or folders whose names match a pattern."""
    for stale in folder.glob(f".{name}.*.tmp"):
        _remove(stale)


def remove_older(folder: Path) -> None:
    """Removes the folders beside an existing one whose names sort before its own."""
    for other in folder.parent.iterdir() if folder.exists() else ():
        if other.name < folder.name:
            _remove(other)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary path; it is renamed to `path` if the block succeeds and removed if it raises."""
    with _temporary(path) as temporary:
        yield temporary
        _sync(temporary)
        fence.check()
        rename(temporary, path)
        _sync(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields an empty temporary folder; it replaces `path` if the block succeeds and is removed if it raises."""
    with _temporary(path) as temporary:
        try:
            temporary.mkdir(exist_ok=True)  # it has just been made if NFS asks twice
        except FileNotFoundError:
            raise OSError(errno.EROFS, "its file system takes no new folders", str(path)) from None
        yield temporary
        replace_folder(temporary, path)


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Yields a temporary path for `path`, and removes what is left there after the block."""
    temporary = temporary_path(path)
    try:
        with naming(path), translate_write_errors(path.parent):
            try:
                yield temporary
            except OSError:
                fence.check()  # a later process has removed it, which NFS calls a stale file
                raise
    finally:
        with suppress(OSError):  # the next writer removes what stays
            _remove(temporary)


def replace_folder(temporary: Path, path: Path) -> None:
    """Flushes a finished folder to disk and renames it to `path`, replacing any folder there."""
    for file in temporary.rglob("*"):
        if file.is_file() and not file.is_symlink():
            _apply_umask(file)
        _sync(file)
    previous = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    fence.check()
    if path.exists():
        rename(path, previous)
    try:
        rename(temporary, path)
    except OSError:  # if a later process has removed it, `previous` is that process's result
        if previous.exists():
            os.replace(previous, path)
        raise
    _sync(path.parent)
    shutil.rmtree(previous, ignore_errors=True)


def rename(source: Path, target: Path) -> None:
    """Renames a file or folder. NFS repeats a request whose answer is lost, and the repeated one finds no source."""
    number = source.lstat().st_ino
    try:
        os.replace(source, target)
    except FileNotFoundError:
        if not os.path.lexists(target) or target.lstat().st_ino != number:
            raise


def _apply_umask(path: Path) -> None:
    """Gives a file the permissions of the umask, since safetensors makes its files readable by their owner only."""
    if path.stat().st_nlink == 1:
        with suppress(PermissionError):  # file systems with ACLs may refuse it to the owner
            path.chmod(0o666 & ~UMASK)


def _sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk."""
    if path.is_symlink():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # SMB cannot flush folders
            raise
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Writes a text file as `atomic_write` does."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Writes indented JSON with sorted keys and its digest; refuses NaN, which is not valid JSON."""
    text = json.dumps({**value, SEAL: _seal(path.name, value)}, indent=2, sort_keys=True, allow_nan=False)
    write_text(path, text + "\n")


def _seal(name: str, value: Mapping[str, object]) -> str:
    """Digest of a JSON file's name and content, so that a file with a different name cannot pass for it."""
    content = json.loads(json.dumps(value))  # keys are strings from here on, as in the file
    return hashlib.blake2b(f"{name}\n{json.dumps(content, sort_keys=True)}".encode(), digest_size=32).hexdigest()


def read_json(path: Path, remedy: str = REMEDY) -> Any:
    """The content of any JSON file. One that `write_json` wrote is checked, and returned without its digest.

    Args:
        path: the file.
        remedy: advice for the error message.

    Raises:
        UserError: the file is missing, not JSON, or not what `write_json` wrote.
    """
    return _read_sealed(path, remedy)[0]


def read_artifact(path: Path, remedy: str = REMEDY, **expected: object) -> dict[str, Any]:
    """The content of a JSON file that a stage wrote.

    Args:
        path: the file.
        remedy: advice for the error message.
        expected: values that some of its keys must have, such as the round.

    Raises:
        UserError: see `read_json`; or the file has no digest, or a key does not have the expected value.
    """
    content, sealed = _read_sealed(path, remedy)
    if not sealed:
        raise UserError(f"{path}: has no digest, so this version of the program did not write it; {remedy}")
    check_facts(path, content, expected, remedy)
    return dict(content)


def _read_sealed(path: Path, remedy: str) -> tuple[Any, bool]:
    """The content of a JSON file without its digest, and True if it had one."""
    try:
        with naming(path):
            content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run the stage that writes it first") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); {remedy}") from error
    if not isinstance(content, dict) or SEAL not in content:
        return content, False
    if content.pop(SEAL) != _seal(path.name, content):
        raise UserError(f"{path} was changed since it was written ({SEAL} differs); {remedy}")
    return content, True


def check_facts(path: Path, facts: Mapping[str, object], expected: Mapping[str, object], remedy: str = REMEDY) -> None:
    """Checks the facts that a file states about itself, such as its run, its round and its policy.

    Raises:
        UserError: a fact differs from the expected one.
    """
    for key, value in expected.items():
        if facts.get(key) != value:
            actual, required = (str(fact)[:16] for fact in (facts.get(key), value))
            raise UserError(f"{path}: its {key} is {actual}, but {required} is expected here; {remedy}")


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file, for digests that people compare with other programs."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def link_or_copy(source: Path, target: Path) -> None:
    """Makes `target` a hard link to `source`, or a copy if the file system does not allow links.

    It also copies if Snakemake's cache is in use: the cache makes its files writable by everybody, and through a hard
    link it would do so with `source`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if OUTPUT_CACHE not in os.environ:
        with suppress(OSError):
            os.link(source.resolve(), target)
            return
    shutil.copyfile(source, target)
