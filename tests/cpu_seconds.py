"""`pytest --cpu`: CPU seconds of each file of tests, with those of the commands that it runs."""

import os
from collections import Counter
from collections.abc import Iterable

import forks
import psutil


def so_far() -> float:
    """User and system seconds of this process, its children, and the forks of tests/fork_server.py."""
    own = sum(os.times()[:4])
    if forks._server is None:
        return own
    return own + sum(psutil.Process(forks._server.pid).cpu_times()[:4])


def lines(reports: Iterable, most: int = 40) -> list[str]:
    """The sum, and the costliest files."""
    by_file: Counter[str] = Counter()
    for report in reports:
        by_file[report.nodeid.partition("::")[0]] += sum(s for name, s in report.user_properties if name == "cpu")
    costliest = [f"{seconds:7.1f} s  {file}" for file, seconds in by_file.most_common(most)]
    return [f"{by_file.total():7.1f} s of CPU", *costliest]
