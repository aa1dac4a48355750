"""Tests that hold a vLLM engine in their process: each is a pytest of its own where nothing may be forked."""

import os
import subprocess
import sys

import pytest

VARIABLE = "RLOO_OWN_PYTEST"
"""Set in a pytest that runs one test for another one, which waits and has the turn."""
COMMAND = (sys.executable, "-m", "pytest", "-q", "-n", "0", "--long", "--no-forks", "-p", "no:cacheprovider")


@pytest.hookimpl
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Runs a test with the marker `holds_vllm`, with its fixtures, and reports it."""
    if item.get_closest_marker("holds_vllm") is None:
        return None
    if item.get_closest_marker("skip") is not None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    config = ("-c", str(item.config.inipath), "--rootdir", str(item.config.rootpath))
    test = f"{item.path}::{item.nodeid.partition('::')[2]}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    run = subprocess.run(
        [*COMMAND, *config, test], env=environment | {VARIABLE: "1"}, capture_output=True, text=True, check=False
    )
    outcome, text = ("failed", run.stdout[-5000:]) if run.returncode else ("passed", None)
    keywords = dict.fromkeys(item.keywords, 1)
    report = pytest.TestReport(item.nodeid, item.location, keywords, outcome, text, "call")
    item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
