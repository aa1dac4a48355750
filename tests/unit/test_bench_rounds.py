"""The figures of `make bench` about a run's rounds."""

import os
import sys
from datetime import datetime

import pytest
from helpers import ROOT
from synthetic_runs import write_log


@pytest.fixture
def whole(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "bench"))
    import whole

    yield whole
    sys.modules.pop("whole")


def test_engines_are_idle_where_neither_side_works(whole, tmp_path) -> None:
    """Round 2 begins at second 10 and ends at 20: an update from 11 to 15 and a rollout from 14 to 18 are 7 of 10 s."""
    run = tmp_path / "results" / "bench"
    for file, (second, seconds) in {
        "rollout/00001-000.log": (8, 8.0),
        "update/00001.log": (10, 2.0),
        "update/00002.log": (15, 4.0),
        "rollout/00003-000.log": (18, 4.0),
        "rollout/00004-000.log": (25, 5.0),
    }.items():
        text = f"2030-01-01 00:00:{second:02d},000 INFO rloo: so much, sampled in {seconds:.2f} s\n"
        write_log(run, file, text)
    for number, second in ((1, 10), (2, 20)):
        metrics = run / "rounds" / f"{number:05d}" / "metrics.json"
        metrics.parent.mkdir(parents=True)
        metrics.touch()
        os.utime(metrics, (datetime(2030, 1, 1, 0, 0, second).timestamp(),) * 2)
    assert whole.Project(tmp_path, "bench").idle_share(2) == pytest.approx(0.3)
