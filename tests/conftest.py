"""A small model and a finished run."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import forks
import pytest
from filelock import FileLock
from helpers import Project

OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


def pytest_unconfigure() -> None:
    """Ends what commands were forked from."""
    forks.close()


@pytest.fixture(autouse=True)
def _no_rank_is_left_behind() -> Iterator[None]:
    """An engine in this process makes it a rank, and the commands of later tests would take themselves for it."""
    before = {name: os.environ.get(name) for name in OF_A_RANK}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """An untrained model of a few thousand weights with its tokenizer."""
    from rloo_pipeline.demo.model import tiny_qwen3

    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_qwen3(folder, 3, hidden_size=32, layers=2, heads=2, key_value_heads=1, head_dim=32, intermediate_size=64)
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Project:
    """A project with the finished run `mini`; tests must leave its files as they found them.

    The processes of pytest make it once, and each has a copy of its own.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    made, own = shared / "finished", tmp_path_factory.mktemp("finished") / "project"
    with FileLock(shared / "finished.lock"):
        if not made.exists():
            first = Project(shared / "finished.part")
            outcome = first.snakemake("--cores", "2")
            assert outcome.returncode == 0, outcome.stdout + outcome.stderr
            first.folder.rename(made)
    shutil.copytree(made, own, symlinks=True)
    return Project(own)
