"""How long planned jobs take, by the logs of jobs like them."""

from pathlib import Path

from rloo_pipeline.snakemake_ext import dry_run


def log(run: Path, name: str, seconds: float, gpus: int = 0) -> None:
    """The log of a finished job."""
    file = run / "logs" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    used = f"2026-01-01 10:00:00,000 INFO rloo.time: used {gpus} x NVIDIA H100\n" if gpus else ""
    file.write_text(f"{used}2026-01-01 10:00:00,000 INFO rloo.time: took {seconds} s, 1.0 s of CPU, 9 MB at most\n")


def test_jobs_take_what_jobs_like_them_took(tmp_path) -> None:
    for number, seconds in ((1, 1000), (2, 2000)):
        log(tmp_path, f"rollout/0000{number}-000.log", seconds, gpus=2)
        log(tmp_path, f"score/0000{number}-000.log", 10)
        log(tmp_path, f"score/0000{number}-000-judge.log", 500)
    log(tmp_path, "evaluate/final.log", 60)
    names = ["rollout/00003-000", "score/00003-000", "score/00003-000-judge", "evaluate/final", "harness/final"]
    logs = [(tmp_path, str(tmp_path / "logs" / f"{name}.log")) for name in names]
    assert dry_run.planned_time(logs) == (
        "About 0:34:30 of work (0.57 hours, 0.83 GPU-hours), judging by similar jobs; 1 of these jobs has no "
        "measurement yet."
    )


def test_there_is_no_estimate_without_a_measurement(tmp_path) -> None:
    assert "is unknown" in dry_run.planned_time([(tmp_path, str(tmp_path / "logs" / "prompts.log"))])


def test_a_new_run_of_an_experiment_takes_what_the_others_took(tmp_path) -> None:
    log(tmp_path / "a/0", "rollout/00001-000.log", 30)
    log(tmp_path / "a/1", "update/00001.log", 10)
    new = tmp_path / "b/0"
    log(new, "update/00001.log", 20)
    logs = [(new, str(new / "logs" / f"{name}.log")) for name in ("rollout/00001-000", "update/00002")]
    runs = [tmp_path / "a/0", tmp_path / "a/1", new]
    assert dry_run.planned_time(logs, runs).startswith("About 0:00:50 of work")
    assert "no similar job has finished" in dry_run.planned_time(logs[:1])
