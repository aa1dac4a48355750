"""What a gain is worth: the paired bootstrap's interval and p-value, and the time that jobs took and waited."""

from datetime import datetime, timedelta
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel

from rloo_pipeline.insight.jobs import costs, jobs_of, spent
from rloo_pipeline.insight.statistics import gain, pass_at_k

DRAW = np.random.default_rng(7)
BEFORE = (DRAW.random(400) < 0.4).astype(float)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer() -> None:
    for right in range(7):
        subsets = list(combinations([1] * right + [0] * (6 - right), 3))
        assert pass_at_k(6, right, 3) == pytest.approx(sum(max(subset) for subset in subsets) / len(subsets))


@pytest.mark.parametrize("shift", [0.0, 0.05, 0.1, 0.3])
def test_the_p_value_is_close_to_that_of_a_paired_test(shift: float) -> None:
    """The differences of 400 prompts are near enough to normal for the t-test to say the same."""
    after = np.clip(BEFORE + (DRAW.random(400) < shift), 0, 1) - (DRAW.random(400) < 0.1) * BEFORE
    found = gain(BEFORE, after, 20_000, 1)
    expected = ttest_rel(after, BEFORE)
    assert found.value == pytest.approx(float(np.mean(after - BEFORE)))
    assert found.p == pytest.approx(float(expected.pvalue), abs=0.02)
    low, high = found.ci95 or (0, 0)
    interval = expected.confidence_interval()
    assert (low, high) == pytest.approx((interval.low, interval.high), abs=0.01)
    assert (low > 0 or high < 0) == ((found.p or 0) < 0.05)


def test_prompts_that_one_policy_has_no_value_for_are_left_out() -> None:
    found = gain(np.array([0.0, np.nan, 1.0]), np.array([1.0, 1.0, np.nan]), 100, 1)
    assert (found.value, found.prompts) == (1.0, 1)
    assert gain(np.array([np.nan]), np.array([1.0]), 100, 1).value is None


def write(run: Path, place: str, began: int, seconds: float, more: str = "", spent: str = "") -> None:
    log = run / "logs" / f"{place}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    ended = datetime(2026, 11, 1) + timedelta(seconds=began + seconds)
    log.write_text(f"{more}{ended},000 INFO rloo.time: took {seconds:.1f} s{spent}\n")


def test_waiting_is_the_time_in_which_no_job_works(tmp_path: Path) -> None:
    """Two jobs side by side from 0 to 100 and 50 to 150, and one from 300 to 400: 150 of 400 seconds are empty."""
    gpu = "2026-11-01 00:00:00,000 INFO rloo.time: used 2 x NVIDIA H100\n"
    write(tmp_path, "rollout/00001-000", 0, 100, gpu, ", 360.00 s of CPU, 900 MB at most")
    write(tmp_path, "rollout/00001-001", 50, 100, gpu, ", 180.00 s of CPU, 800 MB at most")
    write(tmp_path, "update/00001", 300, 100)
    write(tmp_path, "update/00002", 9000, 100)
    for place, measured in (("update/00001", "2048.5\t360"), ("rollout/00001-000", "9.5\t0.1")):  # the latter is srun's
        file = tmp_path / "benchmarks" / f"{place}.tsv"
        file.parent.mkdir(parents=True)
        file.write_text(f"s\tmax_rss\tcpu_time\n100\t{measured}\n")
    jobs = jobs_of(tmp_path, rounds=1)
    assert spent(jobs).wall == 400
    assert spent(jobs).waiting == pytest.approx(150 / 400)
    rollout, update = costs(jobs)
    assert (rollout.stage, rollout.jobs, rollout.seconds, rollout.cpu_hours) == ("rollout", 2, 200.0, 0.15)
    assert rollout.gpu_hours == pytest.approx(400 / 3600)
    assert (update.cpu_hours, update.memory_mb, update.gpu_hours) == (0.1, 2048.5, 0.0)
