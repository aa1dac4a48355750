"""TRL's trainers and ours are compared on one arithmetic, whatever the host.

Losses whose terms cancel differ in the last bits of float32 sums, and those depend on the instructions that PyTorch and
MKL choose for a CPU: of six choices tried on one Xeon, five have a case beyond the bound, by up to five times, with
gradients that agree to 2e-6. So where a CPU has AVX-512, the tests of test_trl.py run in a process of their own that
has MKL's kernels for it and PyTorch's baseline, all of them the first time that one is asked for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

COMPARED = Path(__file__).with_name("test_trl.py")
PINNED = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "AVX512"}
FITS = {"GenuineIntel", "avx512f"} <= set(Path("/proc/cpuinfo").read_text().split())


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """In that process runs the test; in any other asks for what it gave there."""
    if pyfuncitem.path != COMPARED or not FITS or PINNED.items() <= os.environ.items():
        return None
    wrong = found().get(pyfuncitem.name, "was not run")
    assert wrong is None, wrong
    return True


@cache
def found() -> dict[str, str | None]:
    """Of each test by its name: what went wrong with it."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-q", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={report}", f"--basetemp={folder}/tmp"]
        command = [sys.executable, "-m", "pytest", *words, str(COMPARED)]
        outcome = subprocess.run(command, env=os.environ | PINNED, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(outcome.stdout + outcome.stderr)
        cases = ET.parse(report).getroot().iter("testcase")
        return {str(case.get("name")): _wrong(case) for case in cases}


def _wrong(case: ET.Element) -> str | None:
    return next((child.text or child.tag for child in case if child.tag in {"failure", "error", "skipped"}), None)
