"""The test cluster: `make cluster-up` starts it, `make images` builds the image."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from helpers import ROOT, Project
from machine import Cluster, missing

from rloo_pipeline.cluster import containers
from rloo_pipeline.config_file import load


@pytest.fixture(scope="session")
def image() -> Path:
    """The image of the sources as they are."""
    name = ROOT / containers.image(load(ROOT / "tests" / "configs" / "mini.yaml"), ROOT)
    if not name.exists():
        missing(f"no image {name}: run `make images`")
    return name


@pytest.fixture(scope="session")
def slurm() -> None:
    """The nodes are there."""
    if shutil.which("sinfo") is None or subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
        missing("no SLURM here: run `make cluster-up` (Debian 12, as root)")


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Project:
    """A project with the finished run `mini`, made without SLURM and image; the processes of pytest share it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with FileLock(shared / "finished.lock"):
        project = Project(shared / "finished")
        if not (project.folder / "results" / "mini" / "report.html").exists():
            outcome = project.snakemake("--cores", "2")
            assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return project


@pytest.fixture
def cluster(slurm, image, tmp_path) -> Iterator[Cluster]:
    """A project on the cluster; its jobs end with the test."""
    made = Cluster(tmp_path / "project")
    yield made
    made.end()
