"""Checks that a node can run the container image: Apptainer, user namespaces, the image, its CUDA version, the
driver.
"""

import ctypes
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from rloo_pipeline.before_run.findings import Finding
from rloo_pipeline.runtime.command_output import output_of

OLDEST = (1, 1)
"""First Apptainer version that needs only user namespaces, not setuid."""
LOCK = "/opt/rloo/lock.txt"
"""Path of the list of pinned packages inside the image."""
CUDA = re.compile(r"^(?:nvidia-cuda-runtime(?:-cu\d+)?|cuda-toolkit)==(\d+)\.(\d+)", re.MULTILINE)
DRIVERS = {12: 525, 13: 580}
"""First Linux driver of each major CUDA version."""
TIMEOUT = 120
"""Time limit of a command, in seconds."""


def findings(image: str) -> Iterator[Finding]:
    """Runs all checks of this node for an image.

    Args:
        image: path or URI.
    """
    program = shutil.which("apptainer")
    runs = apptainer(program)
    yield runs
    exists = "://" in image or Path(image).exists()
    yield Finding(
        "image",
        exists,
        image if exists else f"{image} does not exist",
        "run `rloo images cuda` (or cpu), or set container.image to another one, on a file system that all nodes "
        "share; a run without --sdm apptainer needs none: ask with --no-image",
    )
    if runs.ok and exists and program:
        lock = output_of(program, "exec", image, "cat", LOCK, seconds=TIMEOUT, with_errors=True)
        if lock is None:  # if it runs, Apptainer has namespaces (perhaps by AppArmor) or setuid
            yield namespaces()
        yield from cuda(lock, driver())


def apptainer(program: str | None) -> Finding:
    """Checks that Apptainer is installed and new enough."""
    fix = "load its module (module avail apptainer), or ask for Apptainer 1.1 or newer; without it, leave out --sdm"
    if program is None:
        return Finding("apptainer", False, "not on the PATH", fix)
    output = output_of(program, "--version", seconds=TIMEOUT) or ""
    version = re.search(r"(\d+)\.(\d+)\S*", output)
    if version is None:
        return Finding("apptainer", False, f"{program} does not start ({output.strip()[:80]})", fix)
    is_new = (int(version[1]), int(version[2])) >= OLDEST
    return Finding("apptainer", is_new, f"{version[0]} at {program}", "" if is_new else fix)


def namespaces() -> Finding:
    """Checks that users can create user namespaces, by creating one."""
    allowed = output_of("unshare", "--user", "--map-root-user", "true") is not None
    fix = (
        "ask the administrators to allow them (kernel settings user.max_user_namespaces, "
        "kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns), or for setuid Apptainer"
    )
    return Finding("user namespaces", allowed, "allowed" if allowed else "unshare --user fails", fix)


def cuda(lock: str | None, driver_version: tuple[int, int] | None) -> Iterator[Finding]:
    """Checks that the node's driver supports the image's CUDA version.

    Args:
        lock: list of pinned packages in the image, with what Apptainer printed; None if the image cannot be read.
        driver_version: highest CUDA version that the driver supports; None if there is no driver.
    """
    if lock is None:
        yield Finding(
            "image runs", False, f"cannot read {LOCK} in it", "build it again with `rloo images cuda` (or cpu)"
        )
        return
    yield Finding("image runs", True, "starts, and has its list of packages")
    if "to temporary sandbox" in lock:  # what Apptainer prints then
        message = "Apptainer cannot mount it and unpacks it for each stage, which takes time and space"
        yield Finding("image mounts", True, message, "ask for squashfuse or setuid Apptainer", note=True)
    version = CUDA.search(lock)
    if version is None:
        yield Finding("CUDA", True, "an image for CPUs")
        return
    message, major = f"image of CUDA {version[1]}.{version[2]}", int(version[1])
    if major in DRIVERS:
        message += f", which needs driver {DRIVERS[major]} or newer"
    if driver_version is None:
        fix = "expected on a login node: run `srun … rloo doctor` on a GPU node"
        yield Finding("CUDA", False, f"{message}; no NVIDIA driver here", fix)
        return
    message += f"; the driver here is for CUDA {driver_version[0]}.{driver_version[1]}"
    fits = driver_version[0] >= major  # a driver supports all minor versions of its major version
    yield Finding("CUDA", fits, message, newer_driver(major, "APPTAINERENV_LD_LIBRARY_PATH, bound into the image,"))


def newer_driver(major: int, variable: str) -> str:
    """Says how to get a driver that is new enough for a major CUDA version.

    Source: NVIDIA, "CUDA Compatibility", Forward Compatibility.
    """
    newer = f"driver {DRIVERS[major]} or newer" if major in DRIVERS else "a newer driver"
    return (
        f"ask for {newer}; on data center GPUs it may be enough to put the folder `compat` of CUDA {major} (package "
        f"cuda-compat-{major}-*) first in {variable}"
    )


def driver() -> tuple[int, int] | None:
    """The highest CUDA version that the node's driver supports, as it reports itself."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10
