"""The cost of jobs comes from their logs and benchmarks."""

from datetime import datetime, timedelta
from pathlib import Path

import pytest
from synthetic_runs import write_log

from rloo_pipeline.errors import explain
from rloo_pipeline.report.jobs import costs, jobs_of, spent


def write(run: Path, place: str, start: int, seconds: float, before: str = "", cost: str = "") -> None:
    end = datetime(2026, 11, 1) + timedelta(seconds=start + seconds)
    write_log(run, f"{place}.log", f"{before}{end},000 INFO rloo.time: took {seconds:.1f} s{cost}\n")


def test_waiting_is_the_time_without_a_running_job(tmp_path: Path) -> None:
    """Two jobs side by side from 0 to 100 and 50 to 150, and one from 300 to 400: 150 of 400 seconds are empty."""
    gpu = "2026-11-01 00:00:00,000 INFO rloo.time: used 2 x NVIDIA H100\n"
    write(tmp_path, "rollout/00001-000", 0, 100, gpu, ", 360.00 s of CPU, 900 MB at most")
    write(tmp_path, "rollout/00001-001", 50, 100, gpu, ", 180.00 s of CPU, 800 MB at most")
    line = "2026-11-01 00:00:00,000 INFO rloo.time: rank {}: {} MB at most\n"
    ranks = line.format(0, 950) + line.format(1, 970)
    write(tmp_path, "update/00001", 300, 100, ranks, ", 9.00 s of CPU, 100 MB at most")
    write(tmp_path, "update/00002", 9000, 100)
    write(tmp_path, "report", 400, 100)
    write(tmp_path, "report_so_far/00001", 350, 100)
    for place, measured in (
        ("update/00001", "2048.5\t360"),
        ("rollout/00001-000", "9.5\t0.1"),
    ):  # the latter measured srun alone
        file = tmp_path / "benchmarks" / f"{place}.tsv"
        file.parent.mkdir(parents=True)
        file.write_text(f"s\tmax_rss\tcpu_time\n100\t{measured}\n")
    jobs = jobs_of(tmp_path, rounds=1)
    assert spent(jobs).wall == 400
    assert spent(jobs).waiting == pytest.approx(150 / 400)
    rollout, update = costs(jobs)
    assert (rollout.stage, rollout.jobs, rollout.seconds, rollout.cpu_hours) == ("rollout", 2, 200.0, 0.15)
    assert rollout.gpu_hours == pytest.approx(400 / 3600)
    assert (update.cpu_hours, update.memory_mb, update.gpu_hours) == (0.1, 970, 0.0)
    assert rollout.memory_mb == 900


def test_logs_that_are_named_by_shard_or_seed_are_of_no_round(tmp_path: Path) -> None:
    for name in ("difficulty/012", "evaluate_chosen/1234", "evaluate_chosen/12345", "harness/final", "update/00001"):
        write(tmp_path, name, 0, 10)
    write(tmp_path, "update/00002", 0, 10)
    counted = {cost.stage: cost.jobs for cost in costs(jobs_of(tmp_path, rounds=1))}
    assert counted == {"difficulty": 1, "evaluate_chosen": 2, "harness": 1, "update": 1}


def test_rollouts_beside_an_update_are_counted(tmp_path: Path) -> None:
    """Rollouts from 0 to 60 and 60 to 120, 10 seconds of scoring after each, updates 70 to 100, 130 to 160."""
    for number, began in ((1, 0), (2, 60)):
        write(tmp_path, f"rollout/{number:05d}-000", began, 60)
        write(tmp_path, f"score/{number:05d}-000", began + 60, 10)
    write(tmp_path, "update/00001", 70, 30)
    write(tmp_path, "update/00002", 130, 30)
    assert spent(jobs_of(tmp_path, rounds=2)).overlapping == 30


@pytest.mark.parametrize("unreadable", ["logs/update/00001.log", "benchmarks/update/00001.tsv"])
def test_a_log_or_benchmark_that_cannot_be_read_is_named(tmp_path: Path, unreadable: str) -> None:
    write(tmp_path, "update/00001", 0, 10)
    (tmp_path / unreadable).unlink(missing_ok=True)
    (tmp_path / unreadable).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / unreadable).symlink_to("/proc/self/mem")  # reading it fails with EIO
    with pytest.raises(OSError, match="Input/output error") as raised:
        jobs_of(tmp_path, rounds=1)
    assert explain(raised.value).startswith(f"{tmp_path / unreadable}: the file system failed")
