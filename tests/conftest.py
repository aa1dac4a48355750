"""A small model and a finished run."""

import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import forks
import left_out
import pytest
from filelock import FileLock
from helpers import Project
from hypothesis import settings

OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


# Models here are so small that threads cost more than they give; before torch is imported, and for what is started.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What a property holds for does not depend on how busy the machine is, nor on examples found elsewhere.
settings.register_profile("rloo", deadline=None, derandomize=True, database=None)
settings.load_profile("rloo")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--long` for `make test-all`."""
    parser.addoption("--long", action="store_true", help="run the tests that take long, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--long`, skips what takes long, so that the end says how many those are."""
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason=left_out.LONG))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what was skipped, and what would run it."""
    reports = terminalreporter.stats.get("skipped", [])
    if reports:
        terminalreporter.section("left out")
    for line in left_out.lines(Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)):
        terminalreporter.line(line)


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


@pytest.fixture(autouse=True)
def _no_group_of_processes_is_left_behind() -> None:
    """An engine of vLLM that has ended in this process took the group of its processes along, and DeepSpeed has it in
    mind all the same.
    """
    groups = sys.modules.get("deepspeed.utils.groups")
    if groups is not None:
        from torch.distributed import distributed_c10d

        if groups._WORLD_GROUP not in distributed_c10d._world.pg_group_ranks:
            groups._WORLD_GROUP = None


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
            outcome = first.snakemake("--cores", "1")
            assert outcome.returncode == 0, outcome.stdout + outcome.stderr
            first.folder.rename(made)
    shutil.copytree(made, own, symlinks=True)
    project = Project(own)
    project.made_in = made
    return project
