"""Apptainer, user namespaces, the image, and its CUDA against the node's driver."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from rloo_pipeline.preflight import Finding

OLDEST = (1, 1)
"""Apptainer that runs without setuid, by user namespaces."""
LOCK = "/opt/rloo/lock.txt"
"""The pinned list that an image was built from, in the image."""
CUDA = re.compile(r"^(?:nvidia-cuda-runtime(?:-cu\d+)?|cuda-toolkit)==(\d+)\.(\d+)", re.MULTILINE)
SECONDS = 120
SYSTEM = Path("/proc/sys")


def look(image: str) -> Iterator[Finding]:
    """Everything about images on this node."""
    program = shutil.which("apptainer")
    found = apptainer(program)
    yield found
    yield namespaces()
    exists = "://" in image or Path(image).exists()
    yield Finding(
        "image",
        exists,
        image if exists else f"{image} is not here",
        "make images, or name another in container.image, on a file system that all nodes see",
    )
    if found.ok and exists and program:
        yield from cuda(_said(program, "exec", image, "cat", LOCK), driver())


def apptainer(program: str | None) -> Finding:
    """Whether Apptainer is here and new enough."""
    cure = "load its module (module avail apptainer), or ask for Apptainer 1.1 or newer; without it, leave out --sdm"
    if program is None:
        return Finding("apptainer", False, "not on the PATH", cure)
    said = _said(program, "--version") or ""
    version = re.search(r"(\d+)\.(\d+)\S*", said)
    if version is None:
        return Finding("apptainer", False, f"{program} does not start ({said.strip()[:80]})", cure)
    new = (int(version[1]), int(version[2])) >= OLDEST
    return Finding("apptainer", new, f"{version[0]} at {program}", "" if new else cure)


def namespaces(system: Path = SYSTEM) -> Finding:
    """Whether users may make namespaces: by the kernel's settings, and by making one."""
    for file, bad in (
        ("user/max_user_namespaces", "0"),
        ("kernel/unprivileged_userns_clone", "0"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1"),
    ):
        place = system / file
        if place.exists() and place.read_text().strip() == bad:
            cure = f"ask the administrators for {file.replace('/', '.')} other than {bad}, or for setuid Apptainer"
            return Finding("user namespaces", False, f"{place} is {bad}", cure)
    tool = shutil.which("unshare")
    if tool and _said(tool, "--user", "--map-root-user", "true") is None:
        return Finding("user namespaces", False, "unshare --user fails", "ask the administrators to allow them")
    return Finding("user namespaces", True, "allowed")


def cuda(lock: str | None, driver_version: tuple[int, int] | None) -> Iterator[Finding]:
    """Whether the node's driver is of the image's CUDA or newer.

    Args:
        lock: the image's pinned list; None where the image cannot be read.
        driver_version: the CUDA that the driver is made for; None where there is no driver.
    """
    if lock is None:
        yield Finding("image runs", False, f"cannot read {LOCK} in it", "build it anew with make images")
        return
    yield Finding("image runs", True, "starts, and has its pinned list")
    made = CUDA.search(lock)
    if made is None:
        yield Finding("CUDA", True, "an image for CPUs")
    elif driver_version is None:
        said = f"image of CUDA {made[1]}.{made[2]}, and no NVIDIA driver here"
        yield Finding("CUDA", False, said, "on a login node this is right: call it on a GPU node, srun … rloo doctor")
    else:
        said = f"image of CUDA {made[1]}.{made[2]}, driver for CUDA {driver_version[0]}.{driver_version[1]}"
        # a driver serves every CUDA of its major version and all before
        fits = driver_version[0] >= int(made[1])
        yield Finding("CUDA", fits, said, "ask for a newer driver, or build the image from an older CUDA")


def driver() -> tuple[int, int] | None:
    """The CUDA version that the node's driver is made for, as the driver itself says."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def _said(*command: str) -> str | None:
    """Standard output of a command; None where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout
