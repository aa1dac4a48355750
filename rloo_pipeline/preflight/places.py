"""Folders: those that are bound into the image, caches, model and data, free space and quota."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rloo_pipeline import runtime
from rloo_pipeline.config import Config, Source
from rloo_pipeline.errors import UserError
from rloo_pipeline.preflight import Finding

GB = 1e9
CACHES = ("HF_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR")


def look(config: Config, needed: float) -> Iterator[Finding]:
    """Everything about folders; `needed` are the bytes that the run will write."""
    yield from binds(config)
    yield from caches()
    yield model(config)
    yield from datasets(config)
    yield from space(Path("results"), needed)


def binds(config: Config) -> Iterator[Finding]:
    """Folders that the configuration wants to be seen in the image."""
    for name in config.container.binds:
        there = Path(name).is_dir()
        yield Finding(f"bind {name}", there, "there" if there else "no such folder", "mend container.binds")


def caches() -> Iterator[Finding]:
    """Whether engines can write where they keep their caches."""
    folders = {"cache": runtime.cache_folder()}
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


def model(config: Config) -> Finding:
    """Whether the model is here, whole, and of a kind that can be trained."""
    from rloo_pipeline.training import model_support, policy

    if config.model.build is not None:
        return Finding("model", True, f"made by {config.model.build}")
    name = str(config.model.name_or_path)
    folder = Path(name) if Path(name).is_dir() else _cached(name, config.model.revision, "model")
    if folder is None:
        return Finding("model", False, f"{name} is neither a folder nor in the Hub's cache", _fetch(config))
    try:
        policy.check(folder)
    except UserError as error:
        return Finding("model", False, str(error), _fetch(config))
    try:
        model_support.refuse_run(config, folder)
    except UserError as error:
        return Finding("model", False, str(error), "name another model in model.name_or_path")
    return Finding("model", True, f"{folder} is whole")


def datasets(config: Config) -> Iterator[Finding]:
    """Whether data is here and can be read."""
    sources = {"dataset.train": config.dataset.train, "dataset.eval": config.dataset.eval}
    if config.warmstart.sft:
        sources["warmstart.sft.demonstrations"] = config.warmstart.sft.demonstrations
    for key, source in sources.items():
        yield _dataset(config, key, source)


def _dataset(config: Config, key: str, source: Source) -> Finding:
    base = Path(config.data_dir or ".")
    if source.generator:
        return Finding(key, True, f"made by {source.generator}")
    if source.path:
        file = base / source.path
        readable = file.is_file() and file.stat().st_size > 0 and os.access(file, os.R_OK)
        said = f"{file}, {file.stat().st_size / 1e6:.1f} MB" if readable else f"{file} is not there, or empty"
        return Finding(key, readable, said, "mend its path, or data_dir")
    name = str(source.name)
    folder = base / name if (base / name).is_dir() else _cached(name, source.revision, "dataset")
    if folder is None:
        return Finding(key, False, f"{name} is neither a folder nor in the Hub's cache", _fetch(config))
    empty = not any(file.is_file() for file in folder.rglob("*"))
    return Finding(key, not empty, f"{folder}{' is empty' if empty else ''}", _fetch(config))


def _cached(name: str, revision: str | None, kind: str) -> Path | None:
    """The snapshot of a repository in the Hub's cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, repo_type=kind, local_files_only=True))
    except Exception:  # the Hub's own errors differ from version to version, and all of them say that it is not there
        return None


def _fetch(config: Config) -> str:
    return f"where there is internet: snakemake --cores 1 -- results/{config.run}/assets, with the nodes' HF_HOME"


def space(folder: Path, needed: float) -> Iterator[Finding]:
    """Free space, free files and quota where results go."""
    place = folder if folder.exists() else Path()
    free = shutil.disk_usage(place).free
    said = f"{free / GB:.1f} GB free at {place.resolve()}, the run needs about {needed / GB:.1f} GB"
    yield Finding("disk", free > needed, said, "free some, raise keep_every, or link results/ to a larger file system")
    if inodes := os.statvfs(place).f_files:
        left = os.statvfs(place).f_favail
        yield Finding("files", left > 10_000, f"{left} of {inodes} files are free", "remove some, or ask for more")
    if program := shutil.which("quota"):
        done = subprocess.run([program, "-w", "-p"], capture_output=True, text=True, check=False)
        yield from quota(done.stdout, needed)


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
