"""Fixtures for all tests: a small model, a finished run, and isolation of engines between tests."""

import compileall
import gc
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import cpu_seconds
import forks
import own_pytest
import pytest
import shape_checks
import skipped_tests
from filelock import FileLock
from helpers import ROOT, Project
from hypothesis import settings

CPU = pytest.StashKey[float]()
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


# The models are so small that threads slow them down. Set before torch is imported, and inherited by child processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RLOO_COMMIT"] = ""  # a stage of this clone names the version as one of a project without git does
sys.dont_write_bytecode = False  # also with PYTHONDONTWRITEBYTECODE: else each command compiles the package anew
shape_checks.install()
# Property tests must not depend on the load of the machine or on examples stored elsewhere.
settings.register_profile("rloo", deadline=None, derandomize=True, database=None, max_examples=40)
settings.load_profile("rloo")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--long`, which `make test-all` uses, `--no-forks` and `--cpu`."""
    parser.addoption("--cpu", action="store_true", help="print the CPU seconds of each file")
    parser.addoption("--long", action="store_true", help="run the tests that take long, too")
    parser.addoption("--no-forks", action="store_true", help="start each command anew, as on a machine with a GPU")


def pytest_configure(config: pytest.Config) -> None:
    """Compiles the package once for all commands. Turns forks off where the option says so."""
    forks.use_forks = forks.use_forks and not config.getoption("--no-forks")
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(ROOT / "rloo_pipeline", quiet=2)
        if forks.use_forks and config.getoption("numprocesses", None):
            forks.share()
    if not forks.use_forks and own_pytest.VARIABLE not in os.environ:
        config.pluginmanager.register(own_pytest)
        if forks.HAS_GPU:
            forks.hide_gpu()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--long`, skips the long tests, so that the summary counts them."""
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason=skipped_tests.LONG))


def pytest_collection_finish() -> None:
    """Keeps what tests write and edit within a second from being taken from bytecode, and takes what is imported out of
    each later collection of garbage.
    """
    sys.dont_write_bytecode = True
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Gives tests with an engine the GPU in turns, with their fixtures; others do not see it."""
    engine = item.get_closest_marker("slow") is not None or "engines" in getattr(item, "fixturenames", ())
    with forks.turn(engine):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Notes the CPU seconds before the test and its fixtures."""
    item.stash[CPU] = cpu_seconds.so_far()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Adds the CPU seconds to the last report of the test."""
    try:
        return (yield)
    finally:
        if CPU in item.stash:
            item.user_properties.append(("cpu", max(0.0, cpu_seconds.so_far() - item.stash[CPU])))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how many tests were skipped, why, and how to run them."""
    if file := os.environ.get("RLOO_TEST_COUNTS"):  # tools/gpu/machine.py reads it
        counts = {name: len(terminalreporter.stats.get(name, [])) for name in ("passed", "failed", "error", "skipped")}
        Path(file).write_text(json.dumps(counts))
    if terminalreporter.config.getoption("--cpu"):
        terminalreporter.section("CPU seconds")
        for line in cpu_seconds.lines(r for r in terminalreporter.getreports("") if r.when == "teardown"):
            terminalreporter.line(line)
    reports = terminalreporter.stats.get("skipped", [])
    if reports:
        terminalreporter.section("skipped tests")
    for line in skipped_tests.lines(Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)):
        terminalreporter.line(line)


def pytest_unconfigure() -> None:
    """Ends the process from which commands are forked."""
    forks.close()


@pytest.fixture(autouse=True)
def _no_rank_is_left_behind() -> Iterator[None]:
    """Restores the variables of a rank, which an engine in this process sets and later commands would inherit."""
    before = {name: os.environ.get(name) for name in OF_A_RANK}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True, scope="module")
def _no_vllm_engine_is_left_behind() -> Iterator[None]:
    """Ends the vLLM engines of a module's tests with it.

    An engine ends when Python collects it, and then destroys the process group: maybe in the middle of a later test,
    whose DeepSpeed engine is in the same group.
    """
    yield
    if "vllm.v1.engine.core_client" in sys.modules:
        from rloo_pipeline.runtime import devices

        for holder in list(devices._holders):
            if (llm := getattr(holder, "llm", None)) is not None:
                llm.llm_engine.engine_core._finalizer()


@pytest.fixture(autouse=True)
def _no_group_of_processes_is_left_behind() -> None:
    """Makes DeepSpeed forget a process group that a vLLM engine of this process has destroyed."""
    groups = sys.modules.get("deepspeed.utils.groups")
    if groups is not None:
        from torch.distributed import distributed_c10d

        if groups._WORLD_GROUP not in distributed_c10d._world.pg_group_ranks:
            groups._WORLD_GROUP = None


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """An untrained model of a few thousand weights with its tokenizer, and the record of its self-check."""
    from rloo_pipeline.artifacts.policy import Policy
    from rloo_pipeline.demo.character_model import tiny_qwen3
    from rloo_pipeline.training import self_check

    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_qwen3(folder, 3, hidden_size=32, layers=2, heads=2, key_value_heads=1, head_dim=32, intermediate_size=64)
    self_check.load_or_run(Policy(folder)).write(folder)
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Project:
    """A project with the finished run `mini`; tests must not change its files.

    One pytest worker runs it, and each worker gets its own copy.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    template, own = shared / "finished", tmp_path_factory.mktemp("finished") / "project"
    with FileLock(shared / "finished.lock"):
        if not template.exists():
            first = Project(shared / "finished.part")
            outcome = first.snakemake("--cores", "1", plain=False)
            assert outcome.returncode == 0, outcome.stdout + outcome.stderr
            first.folder.rename(template)
    shutil.copytree(template, own, symlinks=True)
    project = Project(own)
    project.made_in = template
    return project
