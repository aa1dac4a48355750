"""The live view shows what the files of a run say, whatever of them is there."""

import io
import os
from pathlib import Path

import pytest
import yaml
from helpers import mini, rloo
from made_up import write_prompts
from rich.console import Console

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.config import Config
from rloo_pipeline.diagnosis import run_files
from rloo_pipeline.report.live import frame, sparkline
from rloo_pipeline.report.run_progress import progress_of

STARTED = 1_000_000.0
PACE = 100.0


def write_run(folder: Path, rounds: int) -> Path:
    """A run of 8 rounds with two shards, so many of which are done, each after PACE seconds."""
    folder.mkdir(exist_ok=True)
    made = Config(**mini(rounds=8))
    (folder / "config.yaml").write_text(yaml.safe_dump(made.model_dump(mode="json")))
    for number in range(1, rounds + 1):
        file = folder / "rounds" / f"{number:05d}" / "metrics.json"
        write_json(file, {"round": number, "reward": number / 8, "kl": 0.6 if number == rounds else 0.01})
        os.utime(file, (STARTED + number * PACE, STARTED + number * PACE))
    return folder


def write_log(run: Path, name: str, said: str, time: float = STARTED) -> None:
    log = run / "logs" / name
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(said)
    os.utime(log, (time, time))


def shown(run: Path, stopped: int | None = None) -> str:
    console = Console(width=150, file=io.StringIO())
    console.print(frame(run_files.read(run), stopped))
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([0.0, 0.5, 1.0], 10, "▁▅█"),
        ([1.0, None, 2.0], 10, "▁ █"),
        ([3.0, 3.0], 10, "▁▁"),
        ([0.0, 0.0, 1.0, 1.0], 2, "▁█"),
        ([None, None], 10, ""),
    ],
)
def test_a_sparkline_has_gaps_where_values_have(values, width, line) -> None:
    assert sparkline(values, width) == line


def test_jobs_are_done_running_failed_or_to_come(tmp_path) -> None:
    run = write_run(tmp_path / "run", 3)
    folder = run / "rounds" / "00004"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "rollouts" / "000.parquet").touch()
    write_log(run, "rollout/00004-001.log", "x\n2026-01-01 INFO rloo: sampling: 3 of 9, about 4 s left\n")
    write_log(run, "score/00004-000.log", "2026-01-01 ERROR rloo: rloo score: error: it raised\n")
    write_log(run, "evaluate/warmstart.log", "2026-01-01 INFO rloo.time: took 4.0 s, 3.00 s of CPU, 90 MB at most\n")
    found = progress_of(run_files.read(run), now=STARTED + 10)
    by_name = {stage.name: stage[1:] for stage in found.stages}
    assert by_name["rollout"] == (7, 1, 16)
    assert by_name["score"] == (6, 0, 16)
    assert by_name["update"] == (3, 0, 8)
    assert by_name["evaluate"] == (0, 0, 2), "a log that is at its end is of a job whose output was taken away"
    working = {job.job.log: job for job in found.working}
    assert working["logs/rollout/00004-001.log"].last_line == "sampling: 3 of 9, about 4 s left"
    assert working["logs/score/00004-000.log"].failed
    assert found.seconds_per_round == PACE


def test_a_frame_has_round_curves_diagnosis_and_time_left(tmp_path) -> None:
    run = write_run(tmp_path / "run", 3)
    said = shown(run)
    assert "round 3 of 8" in said
    assert "0:01:40 per round, about 0:08:20 left" in said
    assert "0.125 → 0.375" in said
    assert "KL explosion: KL 0.6 nats per token" in said
    assert "ended by a gate after round 3" in shown(run, stopped=3)
    assert "ended by a gate" not in shown(run, stopped=2), "the run went on"


def test_a_completion_of_the_latest_scored_round_is_shown(tmp_path) -> None:
    run = write_run(tmp_path / "run", 1)
    write_prompts(run / "prompts" / "train")
    assert "a completion" not in shown(run)
    for number, text in ((1, "first"), (2, "[bold]second[/]")):
        folder = run / "rounds" / f"{number:05d}"
        keys = {"prompt_id": "p7", "sample": 0}
        row = {**keys, "prompt_ids": [1], "completion_ids": [2], "completion": text, "sampling_logps": [-1.0]}
        row |= {"finish_reason": "stop", "seed": 0}
        tables.write(folder / "rollouts" / "000.parquet", [row], tables.ROLLOUTS, "rollouts")
        score = {**keys, "answer": 1.0, "reward": 0.25, "seconds": 0.0, "error": None}
        tables.write(folder / "scores" / "000.parquet", [score], tables.scores_schema(["answer"]), "scores")
    said = shown(run)
    assert "a completion of round 2, reward 0.25" in said
    assert "[bold]second[/]" in said, "as it is, and not as markup"
    assert "7+<b>7</b>" in said
    (run / "rounds" / "00002" / "scores" / "000.parquet").write_bytes(b"cut off")
    assert "a completion of round 1" in shown(run)


def test_once_prints_one_frame_and_writes_nothing(tmp_path) -> None:
    run = write_run(tmp_path / "run", 2)
    before = sorted((file, file.stat().st_mtime_ns) for file in run.rglob("*"))
    outcome = rloo("watch", run, "--once")
    assert outcome.returncode == 0, outcome.stderr
    assert "round 2 of 8" in outcome.stdout
    assert sorted((file, file.stat().st_mtime_ns) for file in run.rglob("*")) == before
    assert "not the folder of a run" in rloo("watch", tmp_path, "--once").stderr
