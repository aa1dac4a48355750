"""Folders: those that are bound into the image, caches, model and data, free space and quota."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rloo_pipeline.config import Config, Dtype, Source
from rloo_pipeline.errors import UserError
from rloo_pipeline.preflight import Finding, inputs
from rloo_pipeline.runtime.caches import cache_folder

GB, MB = 1e9, 1e6
CACHES = ("HF_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR")


def look(config: Config, needed: float | None, fetch: str) -> Iterator[Finding]:
    """Everything about folders.

    Args:
        config: of the run.
        needed: bytes that the run will write, where they are known.
        fetch: the command that fetches model and data.
    """
    cure = f"where there is internet: {fetch}, with the nodes' HF_HOME"
    yield from binds(config)
    yield from caches()
    yield from model(config, cure)
    yield from datasets(config, cure)
    yield from space(Path("results"), needed)


def binds(config: Config) -> Iterator[Finding]:
    """Folders that the configuration wants to be seen in the image."""
    for name in config.container.binds:
        there = Path(name).is_dir()
        yield Finding(f"bind {name}", there, "there" if there else "no such folder", "mend container.binds")


def caches() -> Iterator[Finding]:
    """Whether engines can write where they keep their caches."""
    folders = {"cache": cache_folder()}
    folders |= {name: Path(os.environ[name]) for name in CACHES if name in os.environ}
    for name, folder in folders.items():
        writable = _writable(folder)
        cure = "set XDG_CACHE_HOME (or the variable itself) to a folder that this node can write to"
        yield Finding(f"{name} folder", writable, f"{folder}{'' if writable else ' cannot be written to'}", cure)


def _writable(folder: Path) -> bool:
    """Whether a file can be made in a folder, or in the nearest one above it that is there."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def model(config: Config, fetch: str) -> Iterator[Finding]:
    """Whether the model is here and whole, and can be trained as the configuration asks."""
    from rloo_pipeline.artifacts import policy

    seen = inputs.look_at_model(config)
    if seen.problem:
        yield Finding("model", False, seen.problem)
        return
    if seen.note:
        yield Finding("model's context", True, seen.note, note=True)
    if config.model.build is not None:
        yield Finding("model", True, f"made by {config.model.build}")
        return
    name = str(config.model.name_or_path)
    folder = Path(name) if Path(name).is_dir() else inputs.cached(name, config.model.revision, "model")
    if folder is None:
        yield Finding("model", False, f"{name} is neither a folder nor in the Hub's cache", fetch)
    elif not Path(name).is_dir() and not any(folder.glob("*.safetensors")):
        yield Finding("model", False, f"the weights of {name} are not in the Hub's cache", fetch)
    else:
        try:
            policy.check(folder)
        except UserError as error:
            yield Finding("model", False, str(error), fetch)
        else:
            yield Finding("model", True, f"{folder} is whole")


def number_format(dtype: Dtype) -> Finding:
    """Whether this node trains in a format of 16 bits; where stages run on others, they ask there."""
    from rloo_pipeline.training import formats

    try:
        trains = formats.trains_in(dtype)
    except ImportError:
        return Finding("model.dtype", True, f"{dtype}; the stages, whose environment is not this one, ask DeepSpeed")
    said = f"{dtype} can{'' if trains else 'not'} be trained on this machine, says DeepSpeed"
    return Finding("model.dtype", trains, said, formats.CURE)


def datasets(config: Config, fetch: str) -> Iterator[Finding]:
    """Whether data is here and can be read, as far as its first row tells."""
    for key, source in inputs.sources(config).items():
        yield _dataset(config, key, source, fetch)


def _dataset(config: Config, key: str, source: Source, fetch: str) -> Finding:
    base = Path(config.data_dir or ".")
    if source.generator:
        return Finding(key, True, f"made by {source.generator}")
    if source.path:
        try:
            columns = inputs.columns(config, key, source)
        except UserError as error:
            return Finding(key, False, str(error))
        size = f"{base / source.path}, {(base / source.path).stat().st_size / 1e6:.1f} MB"
        return Finding(key, True, size + (f", columns {', '.join(columns)}" if columns else ""))
    name = str(source.name)
    folder = base / name if (base / name).is_dir() else inputs.cached(name, source.revision, "dataset")
    if folder is None:
        return Finding(key, False, f"{name} is neither a folder nor in the Hub's cache", fetch)
    empty = not any(file.is_file() for file in folder.rglob("*"))
    return Finding(key, not empty, f"{folder}{' is empty' if empty else ''}", fetch)


def space(folder: Path, needed: float | None) -> Iterator[Finding]:
    """Free space, free files and quota where results go, against the bytes that the run will write."""
    place = folder if folder.exists() else Path()
    free = shutil.disk_usage(place).free
    said = f"{free / GB:.1f} GB free at {place.resolve()}"
    if needed is None:
        yield Finding("disk", True, f"{said}; what the run needs is not known before the model is here", note=True)
    else:
        cure = "free some, raise keep_every, or link results/ to a larger file system"
        yield Finding("disk", free > needed, f"{said}, the run needs about {size_of(needed)}", cure)
    if inodes := os.statvfs(place).f_files:
        left = os.statvfs(place).f_favail
        yield Finding("files", left > 10_000, f"{left} of {inodes} files are free", "remove some, or ask for more")
    if program := shutil.which("quota"):
        done = subprocess.run([program, "-w", "-p"], capture_output=True, text=True, check=False)
        yield from quota(done.stdout, needed or 0.0)


def size_of(count: float) -> str:
    """Bytes as a person reads them."""
    return f"{count / GB:.1f} GB" if count >= 0.1 * GB else f"{count / MB:.1f} MB"


def quota(said: str, needed: float) -> Iterator[Finding]:
    """What `quota -w -p` says: file system, blocks of 1 KiB used, soft and hard limit (0: none), …"""
    for line in said.splitlines():
        words = line.split()
        if len(words) < 4 or not words[1].rstrip("*").isdigit() or not words[3].isdigit():
            continue
        used, limit = int(words[1].rstrip("*")) * 1024, (int(words[2]) or int(words[3])) * 1024
        if limit:
            left = f"{(limit - used) / GB:.1f} GB of the quota on {words[0]} are left"
            yield Finding(f"quota {words[0]}", limit - used > needed, left, "free some, or ask for more")
