"""Fixtures of the test cluster: `make cluster-up` starts it, `make images` builds the image."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT
from slurm_project import Cluster, missing

from rloo_pipeline.cluster import containers
from rloo_pipeline.config.loading import load

LONGEST = ("test_submit", "test_runs", "test_nodes")
"""Files with tests of minutes, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves long tests to the front, so that the processes of xdist have work until the end."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@pytest.fixture(scope="session")
def image() -> Iterator[Path]:
    """The image for the current sources. A process keeps it mounted, so that its files stay in memory between jobs."""
    name = ROOT / containers.image(load(ROOT / ".test" / "config" / "config.yaml").container, ROOT)
    if not name.exists():
        missing(f"no image {name}: run `make images`")
    with subprocess.Popen(["apptainer", "exec", name, "sleep", "infinity"]) as mounted:
        yield name
        mounted.kill()


@pytest.fixture(scope="session")
def slurm() -> None:
    """Requires a running SLURM."""
    if shutil.which("sinfo") is None or subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
        missing("no SLURM here: run `make cluster-up` (Debian 12, as root)")


@pytest.fixture
def cluster(slurm, image, tmp_path) -> Iterator[Cluster]:
    """A project on the cluster; its jobs end with the test."""
    cluster = Cluster(tmp_path / "project")
    yield cluster
    cluster.end()
