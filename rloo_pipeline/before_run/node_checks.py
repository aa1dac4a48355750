"""Checks a node: bind mounts, caches, model and data, free space and quota, number format."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rloo_pipeline.before_run import dataset_inputs, exchange, inputs, model_inputs
from rloo_pipeline.before_run.findings import Finding, problems_of
from rloo_pipeline.before_run.memory import GB, MB, RunMemory
from rloo_pipeline.cluster import containers
from rloo_pipeline.config import Config, Container
from rloo_pipeline.runtime.caches import cache_folder


def findings(config: Config, needed: float | None, fetch: str) -> Iterator[Finding]:
    """Runs all checks of folders.

    Args:
        config: the run's configuration.
        needed: bytes that the run will write; None if unknown.
        fetch: command that downloads model and data.
    """
    fix = f"where there is internet: {fetch}, with the HF_HOME of the nodes"
    yield from binds(config.container)
    yield from caches()
    yield from model(config, fix)
    yield from datasets(config, fix)
    yield from space(Path("results"), needed)


def binds(container: Container) -> Iterator[Finding]:
    """Checks that the folders in container.binds exist."""
    for name in container.binds:
        exists = Path(name).is_dir()
        yield Finding(f"bind {name}", exists, "exists" if exists else "no such folder", "correct container.binds")


def caches() -> Iterator[Finding]:
    """Checks that the engines' cache folders are writable."""
    folders = {name: Path(os.environ[name]) for name in containers.CACHES if name in os.environ}
    folders = {"cache": cache_folder()} | {name: folder for name, folder in folders.items() if name != "XDG_CACHE_HOME"}
    for name, folder in folders.items():
        writable = _writable(folder)
        fix = "set XDG_CACHE_HOME (or the variable itself) to a folder that this node can write to"
        yield Finding(f"{name} folder", writable, f"{folder}{'' if writable else ' is not writable'}", fix)


def _writable(folder: Path) -> bool:
    """True if files can be created in a folder, or in its nearest existing parent."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def model(config: Config, fix: str) -> Iterator[Finding]:
    """Checks that the model is complete and can be trained as configured."""
    from rloo_pipeline.artifacts import model_files

    by_config_json = inputs.model_finding(config)
    if not by_config_json.ok:
        yield by_config_json
        return
    if by_config_json.note:
        yield by_config_json._replace(subject="model's context")
    if config.model.build is not None:
        yield Finding("model", True, f"built by {config.model.build}")
        return
    name = str(config.model.name_or_path)
    folder = Path(name) if Path(name).is_dir() else dataset_inputs.cached(name, config.model.revision, "model")
    if folder is None:
        yield Finding("model", False, f"{name} is neither a folder nor in the Hub's cache", fix)
    else:
        with problems_of("model", "" if Path(name).is_dir() else fix) as problems:
            model_files.check(folder)
        yield from problems or [Finding("model", True, f"{folder} is complete")]


def architecture() -> Iterator[Finding]:
    """Notes that a machine is not x86-64."""
    name = os.uname().machine
    if name != "x86_64":
        tried = "the pinned lists resolve for it, but it has never been run" if name == "aarch64" else "not supported"
        yield Finding("machine", True, f"{name}: {tried}; everything here was measured on x86-64", note=True)


def machine(config: Config) -> Iterator[Finding]:
    """Checks that this node can run updates. Stages on other nodes check their own nodes."""
    from rloo_pipeline.training import formats
    from rloo_pipeline.training.deepspeed_internals import nvme

    dtype = config.model.dtype
    if dtype != "float32":
        with problems_of("model.dtype") as problems:
            supported = formats.trains_in(dtype)
            message = f"{dtype} can{'' if supported else 'not'} be trained on this machine"
            yield Finding("model.dtype", supported, message, formats.remedy(dtype))
        yield from problems
    if config.deepspeed.offload.on_disk:
        with problems_of("offload") as problems:
            yield Finding("offload", True, f"to {nvme.disk(config.deepspeed.nvme_path)}")
        yield from problems
    if config.node_folder is not None:
        with problems_of("exchange") as problems:
            exchange.refuse(config, config.deepspeed.nodes, as_jobs=False)
            yield node_folder(config, RunMemory(config, model_inputs.shape(config)).policy)
        yield from problems


def node_folder(config: Config, policy: float, runs: int = 1) -> Finding:
    """Checks that this node's folder for policies (`exchange`) is writable and has space for those needed at a time.

    Args:
        config: configuration of a run that sets such a folder.
        policy: bytes of a policy's weights.
        runs: number of concurrent runs.
    """
    folder = config.node_folder or Path()
    subject, fix = f"exchange {folder}", "name another folder, or leave exchange out"
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return Finding(subject, False, "not a folder that you can write to on this machine", fix)
    free, needed = shutil.disk_usage(folder).free, policy * (2 + config.rollout.lag) * runs
    message = f"{size_of(free)} free, policies need {size_of(needed)}"
    return Finding(subject, free > needed, message, f"free some, {fix}")


def datasets(config: Config, fix: str) -> Iterator[Finding]:
    """Checks that the datasets are here and their first rows can be read."""
    for key, source in config.row_sources.items():
        with problems_of(key) as problems:
            columns = dataset_inputs.columns(config, key, source)
            place = dataset_inputs.data_place(config.data_dir, key, source)
            if place is None:
                yield Finding(key, False, f"{source.name} is neither a folder nor in the Hub's cache", fix)
                continue
            is_empty = Path(place).is_dir() and not any(file.is_file() for file in Path(place).rglob("*"))
            shown = "" if columns is None else f", columns {', '.join(columns)}"
            yield Finding(key, not is_empty, f"{place}{' is empty' if is_empty else shown}", fix)
        yield from problems


def space(folder: Path, needed: float | None) -> Iterator[Finding]:
    """Checks that free space, inodes and quota in the results folder suffice for what the run will write.

    Args:
        folder: results folder.
        needed: bytes that the run will write; None if unknown.
    """
    folder = folder if folder.exists() else Path()
    free = shutil.disk_usage(folder).free
    message = f"{free / GB:.1f} GB free at {folder.resolve()}"
    if needed is None:
        yield Finding("disk", True, f"{message}; how much the run needs is unknown until the model is here", note=True)
    else:
        fix = "free some, raise keep_every, or link results/ to a larger file system"
        yield Finding("disk", free > needed, f"{message}, the run needs about {size_of(needed)}", fix)
    if inodes := os.statvfs(folder).f_files:
        free_inodes = os.statvfs(folder).f_favail
        yield Finding(
            "files", free_inodes > 10_000, f"{free_inodes} of {inodes} inodes are free", "remove files, or ask for more"
        )
    if program := shutil.which("quota"):
        process = subprocess.run([program, "-w", "-p"], capture_output=True, text=True, check=False)
        yield from quota(process.stdout, needed or 0.0)


def size_of(count: float) -> str:
    """Formats bytes as GB or MB."""
    return f"{count / GB:.1f} GB" if count >= 0.1 * GB else f"{count / MB:.1f} MB"


def quota(output: str, needed: float) -> Iterator[Finding]:
    """Checks that the quota on each file system leaves enough room.

    Args:
        output: output of `quota -w -p`. Columns: file system, KiB used, soft limit, hard limit (0: none), …
        needed: bytes that the run will write.
    """
    for line in output.splitlines():
        fields = line.split()
        if len(fields) < 4 or not fields[1].rstrip("*").isdigit() or not fields[3].isdigit():
            continue
        used, limit = int(fields[1].rstrip("*")) * 1024, (int(fields[2]) or int(fields[3])) * 1024
        if limit:
            message = f"{(limit - used) / GB:.1f} GB of the quota on {fields[0]} is left"
            yield Finding(f"quota {fields[0]}", limit - used > needed, message, "free some, or ask for more")
