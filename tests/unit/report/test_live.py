"""The live view shows the state of a run from its files, even if some are missing."""

import fcntl
import io
import os
import shutil
import time
from pathlib import Path
from unittest import mock

import helpers
import pytest
from helpers import done, mini, printed, rloo
from rich.console import RenderableType
from synthetic_runs import configuration, finish_run, train_again, write_config, write_log, write_prompts

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.files import read_artifact, write_json
from rloo_pipeline.cluster import slurm
from rloo_pipeline.cluster.slurm import SlurmJob
from rloo_pipeline.commands import watch
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging import run_files
from rloo_pipeline.judging.diagnosis import STOPPED
from rloo_pipeline.report import live_run
from rloo_pipeline.report.live import chart, sparkline, watched
from rloo_pipeline.report.live_run import LiveRun
from rloo_pipeline.report.run_progress import progress_of
from rloo_pipeline.runtime.console import Terminal
from rloo_pipeline.snakemake_ext import locks

STARTED = 1_000_000.0
PACE = 100.0


def write_run(folder: Path, rounds: int, **changes) -> Path:
    """Writes a run of 8 rounds with two shards, of which `rounds` are done, PACE seconds apart."""
    write_config(folder, Config(**mini(rounds=8, **changes)))
    for number in range(1, rounds + 1):
        file = folder / "rounds" / f"{number:05d}" / "metrics.json"
        write_json(file, {"round": number, "reward": number / 8, "kl": 0.6 if number == rounds else 0.01})
        os.utime(file, (STARTED + number * PACE, STARTED + number * PACE))
    return folder


@pytest.fixture(scope="module")
def of_two_rounds(tmp_path_factory) -> Path:
    return finish_run(tmp_path_factory.mktemp("finished") / "run", configuration(rounds=2))


@pytest.fixture
def finished_run(of_two_rounds, tmp_path) -> Path:
    """A finished run of two rounds, to be changed."""
    return Path(shutil.copytree(of_two_rounds, tmp_path / "run"))


def shown(run: Path) -> str:
    console = Terminal(width=150, file=io.StringIO())
    files = run_files.read(run)
    with mock.patch("time.time", return_value=STARTED + 310):
        console.print(watched(files, progress_of(files)))
    return console.file.getvalue()


def test_a_finished_run_shows_its_gain(finished_run) -> None:
    summary = read_artifact(finished_run / "summary.json")
    words = shown(finished_run)
    assert (
        f"held-out pass@1 {summary['warmstart']['accuracy']:.1%} -> {summary['final']['accuracy']:.1%}: gain " in words
    )
    os.utime(finished_run / "summary.json", (0, 0))
    assert "if it was copied without times, `rloo adopt` accepts it" in shown(finished_run)
    (finished_run / "summary.json").unlink()
    assert "held-out pass@1" not in (words := shown(finished_run))
    assert "copied" not in words


def test_several_finished_runs_show_the_accuracy_of_their_final_policies(finished_run) -> None:
    """Their curves may be of a few of the held-out prompts."""
    right = f"{read_artifact(finished_run / 'summary.json')['final']['accuracy']:.1%}"
    lines = printed(watch.watch, [finished_run, finished_run], once=True, every=1.0, width=100).splitlines()
    assert "final pass@1" in lines[0]
    assert all(right in line for line in lines[1:3])
    (finished_run / "summary.json").unlink()
    assert "final" not in printed(watch.watch, [finished_run, finished_run], once=True, every=1.0, width=100)


def test_with_a_lag_rollouts_beside_the_update_are_shown(tmp_path) -> None:
    run = write_run(tmp_path / "run", 2)
    working = {"update/00003.log": "update", "rollout/00004-000.log": "rollout", "refill/00004.log": "refill"}
    for name in working:
        write_log(run, name, "2026-01-01 00:00:00,000 INFO rloo: at work")
    assert [job.job.stage for job in progress_of(run_files.read(run)).working] == ["update"]
    changes = {"rollout": {"lag": 1, "refill": 2}, "algorithm": {"filter_zero_variance": True}}
    write_config(run, Config(**mini(rounds=8, **changes)))
    assert {job.job.stage for job in progress_of(run_files.read(run)).working} == set(working.values())


def test_jobs_that_only_some_runs_have_are_shown(tmp_path) -> None:
    """A reward function with a GPU of its own."""
    run = write_run(tmp_path / "run", 0)
    assert "between two jobs, or not running" in shown(run)
    write_log(run, "score/00001-001-judge.log", "2026-01-01 00:00:00,000 INFO rloo: at work")
    judge = {"function": "own.py:judge", "gpus": 1}
    write_config(run, Config(**mini(rounds=8, rewards=[*mini()["rewards"], judge])))
    progress = progress_of(run_files.read(run))
    assert [job.job.stage for job in progress.working] == ["score_alone"]
    totals = {stage.name: stage.total for stage in progress.stages}
    assert totals["score_alone"] == 16
    assert "not running" not in shown(run)


def test_the_evaluation_of_what_a_run_chose_is_a_job_of_it(tmp_path) -> None:
    run = write_run(tmp_path / "run", 8)
    write_config(run, Config(**mini(rounds=8, select={}, dataset={"dev": {"path": "dev.jsonl"}})))
    write_json(run / "selection.json", {})
    write_log(run, "evaluate_chosen/1.log", "2026-01-01 00:00:00,000 INFO rloo: sampling")
    assert "evaluate_chosen/1: sampling" in shown(run)
    assert "not running" not in shown(run)


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([0.0, 0.5, 1.0], 10, "▁▅█"),
        ([1.0, None, 2.0], 10, "▁ █"),
        ([3.0, 3.0], 10, "▁▁"),
        ([0.0, 0.0, 1.0, 1.0], 2, "▁█"),
        ([None, None], 10, ""),
        ([0.05] * 1000, 32, "▁" * 32),
    ],
)
def test_a_sparkline_has_a_gap_for_a_missing_value(values, width, line) -> None:
    assert sparkline(values, width) == line


def test_jobs_are_done_running_failed_or_to_come(tmp_path) -> None:
    run = write_run(tmp_path / "run", 3)
    folder = run / "rounds" / "00004"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "rollouts" / "000.parquet").touch()
    write_log(run, "rollout/00004-001.log", "x\n2026-01-01 10:00:00,1 INFO rloo: sampling: 3 of 9, about 4 s left\n")
    write_log(run, "score/00004-000.log", "2026-01-01 10:00:00,1 ERROR rloo: rloo score: error: it raised\n")
    write_log(
        run,
        "evaluate/warmstart.log",
        "2026-01-01 10:00:00,1 INFO rloo.time: took 4.0 s, 3.00 s of CPU, 90 MB at most\n",
    )
    progress = progress_of(run_files.read(run))
    by_name = {stage.name: stage[1:] for stage in progress.stages}
    assert by_name["rollout"] == (7, 1, 16)
    assert by_name["score"] == (6, 0, 16)
    assert by_name["update"] == (3, 0, 8)
    assert by_name["evaluate"] == (0, 0, 2), "a complete log without output is of a job whose output was deleted"
    working = {job.job.log: job for job in progress.working}
    assert working["logs/rollout/00004-001.log"].last_line == "sampling: 3 of 9, about 4 s left"
    assert working["logs/score/00004-000.log"].failed
    assert LiveRun(run_files.read(run)).pace == PACE


def test_a_frame_has_round_curves_diagnosis_and_time_left(tmp_path) -> None:
    run = write_run(tmp_path / "run", 3)
    output = shown(run)
    assert "round 3 of 8" in output
    assert "0:01:40 per round, about 0:08:10 left" in output, "10 s of the round have passed"
    assert "0.125 → 0.375" in output
    assert "KL explosion: KL 0.6 nats per token" in output
    write_json(run / STOPPED, {"round": 3})
    assert "ended by a gate after round 3" in shown(run)
    write_json(run / STOPPED, {"round": 2})
    assert "ended by a gate" not in shown(run), "the run went on"


def test_the_time_left_falls_while_a_round_lasts_and_no_further_than_to_the_next(tmp_path, monkeypatch) -> None:
    run = run_files.read(write_run(tmp_path / "run", 3))
    for passed, seconds_left in {0: 500, 40: 460, 99: 401, 5000: 400}.items():
        monkeypatch.setattr(time, "time", lambda passed=passed: STARTED + 3 * PACE + passed)
        assert LiveRun(run).seconds_left() == seconds_left
    first = write_run(tmp_path / "first", 1)
    assert LiveRun(run_files.read(first)).seconds_left() is None
    (first / "policies" / "00000").mkdir(parents=True)
    os.utime(first / "policies" / "00000", (STARTED + 20, STARTED + 20))
    monkeypatch.setattr(time, "time", lambda: STARTED + PACE)
    assert LiveRun(run_files.read(first)).seconds_left() == 7 * 80, "the first round began with policy 0"


def test_a_pause_between_two_calls_is_not_the_time_of_a_round(tmp_path) -> None:
    run = write_run(tmp_path / "run", 2)
    (run / "policies" / "00000").mkdir(parents=True)
    os.utime(run / "policies" / "00000", (STARTED - 86400, STARTED - 86400))
    assert LiveRun(run_files.read(run)).pace == PACE


def test_the_time_left_beside_the_bar_falls_too(tmp_path, monkeypatch) -> None:
    run = write_run(tmp_path / "run", 3)
    measured, seconds_left = None, []
    for passed in (0, 60, 5000):
        monkeypatch.setattr(live_run.time, "time", lambda passed=passed: STARTED + passed)
        measured = measured or LiveRun.of_call(run_files.read(run).config, run)
        measured.read()  # an evaluation: no new round
        seconds_left.append(measured.seconds_left())
    assert seconds_left == [500, 440, 400]


def test_no_time_is_left_beside_the_bar_while_a_run_of_an_experiment_has_not_begun(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(live_run.time, "time", lambda: STARTED)
    runs = {rounds: write_run(tmp_path / f"run-{rounds}", rounds) for rounds in (0, 3, 5, 8)}
    measured = {rounds: LiveRun.of_call(run_files.read(run).config, run) for rounds, run in runs.items()}
    assert live_run.seconds_left_of([measured[3], measured[5], measured[8]]) == 5 * PACE
    assert live_run.seconds_left_of([measured[3], measured[0]]) is None
    assert live_run.seconds_left_of([measured[8]]) is None


def test_held_out_accuracy_is_a_curve_where_it_was_measured(tmp_path) -> None:
    run = write_run(tmp_path / "run", 3)
    assert "held-out accuracy" not in shown(run)
    for number, accuracy in ((1, 0.25), (2, 0.5), (4, 0.75)):
        file = run / "rounds" / f"{number:05d}" / "held_out.json"
        write_json(file, {"policy": number - 1, "accuracy": accuracy, "prompts": 8})
    evaluation = {"accuracy": 0.125, "evaluated": "warmstart", "policy": "p"}
    write_json(run / "evaluation" / "warmstart" / "summary.json", evaluation)
    [line] = [line for line in shown(run).splitlines() if line.startswith("held-out accuracy")]
    assert line.split() == ["held-out", "accuracy", "▁▅", "█", "25.0%", "→", "75.0%"], (
        "evaluations are of other problems"
    )
    measured = LiveRun.of_call(run_files.read(run).config, run)
    assert [row.held_out for row in measured.rows(99)] == [0.25, 0.5, None, 0.75]


def test_held_out_accuracy_is_that_of_evaluations_where_rounds_measured_none(tmp_path) -> None:
    run = write_run(tmp_path / "run", 8, evaluation={"every": 2})
    for name, accuracy in (("warmstart", 0.125), ("00002", 0.25), ("final", 0.5)):
        evaluation = {"accuracy": accuracy, "ci95": [0.0, 1.0], "evaluated": name, "policy": "p"}
        write_json(run / "evaluation" / name / "summary.json", evaluation)
    assert "12.5% → 50.0%" in shown(run)
    measured = LiveRun.of_call(run_files.read(run).config, run)
    assert [row.held_out for row in measured.rows(99)] == [0.125, None, 0.25, *[None] * 5, 0.5]


def watch_once(run: Path) -> str:
    """What `rloo watch` shows of a run."""
    return printed(watch.watch, [run], once=True, every=1.0, width=150)


@pytest.mark.parametrize(
    "file",
    ["assets/assets.json", "prompts/counts.json", "policies/00000/manifest.json", "rounds/00001/scores/000.parquet"],
)
def test_a_run_whose_start_is_made_again_is_in_progress_before_its_first_update(finished_run, file) -> None:
    run = finished_run
    assert "round 2 of 2  finished" in watch_once(run)
    write_json(run / file, {})
    os.utime(run / file, (time.time() + 1,) * 2)
    assert "round 0 of 2" in watch_once(run)
    assert "finished" not in watch_once(run)


def test_what_comes_before_the_rounds_is_done_though_what_is_made_from_it_is_newer(tmp_path) -> None:
    run = write_run(tmp_path / "run", 0)
    outputs = {
        "stage_assets": "assets/assets.json",
        "prompts": "prompts/counts.json",
        "warmstart": "policies/00000/manifest.json",
        "probe": "warmstart/probe.parquet",
        "checks": "warmstart/checks.json",
    }
    for second, file in enumerate(outputs.values()):
        write_json(run / file, {})
        os.utime(run / file, (STARTED + second,) * 2)
    stages = progress_of(run_files.read(run)).stages
    assert {stage.name for stage in stages if stage.done == stage.total} == outputs.keys()


def test_a_run_with_a_job_at_work_is_not_finished(finished_run) -> None:
    """Snakemake has deleted the prompts, and their job has begun."""
    write_log(finished_run, "prompts.log", "2026-01-01 00:00:00,000 INFO rloo: tokenizing\n")
    assert "finished" not in watch_once(finished_run)


def test_a_run_that_is_trained_again_is_shown_as_far_as_it_has_come(tmp_path) -> None:
    run = finish_run(tmp_path / "run", configuration())
    assert "round 40 of 40  finished" in watch_once(run)
    train_again(run, 3)
    assert "round 3 of 40" in watch_once(run)
    assert "finished" not in watch_once(run)
    measured = LiveRun.of_call(run_files.read(run).config, run)
    assert [row.round for row in measured.rows(99)] == [0, 1, 2, 3]


def test_what_the_training_before_has_left_of_a_job_is_not_its_output(tmp_path) -> None:
    run = write_run(tmp_path / "run", 3)
    left = ("rounds/00004/rollouts/000.parquet", "rounds/00004/metrics.json", "evaluation/final/summary.json")
    for name in left:
        file = run / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (STARTED, STARTED))
    by_name = {stage.name: stage.done for stage in progress_of(run_files.read(run)).stages}
    assert (by_name["rollout"], by_name["update"], by_name["evaluate"]) == (6, 3, 0)
    os.utime(run / left[0], (STARTED + 4 * PACE, STARTED + 4 * PACE))
    assert {stage.name: stage.done for stage in progress_of(run_files.read(run)).stages}["rollout"] == 7


def test_what_an_engine_prints_is_not_an_action_of_the_stage(tmp_path) -> None:
    run = write_run(tmp_path / "run", 3)
    engine = "(EngineCore pid=7) INFO 11-23 [rloo_model.py:9] rloo: compiling\n" * 90
    write_log(run, "rollout/00004-000.log", engine)
    write_log(run, "rollout/00004-001.log", f"2026-01-01 10:00:00,1 INFO rloo: sampling: 3 of 9\n{engine}")
    working = progress_of(run_files.read(run)).working
    assert [job.last_line for job in working] == ["", "sampling: 3 of 9"]


def test_a_completion_of_the_latest_scored_round_is_shown(tmp_path) -> None:
    run = write_run(tmp_path / "run", 1)
    write_prompts(run / "prompts" / "train")
    assert "a completion" not in shown(run)
    for number, text in ((1, "first"), (2, "\x1b[2J[bold]second[/]")):
        folder = run / "rounds" / f"{number:05d}"
        keys = {"prompt_id": "p7", "sample": 0}
        row = {**keys, "prompt_ids": [1], "completion_ids": [2], "completion": text, "sampling_logps": [-1.0]}
        row |= {"finish_reason": "stop", "seed": 0}
        tables.write(folder / "rollouts" / "000.parquet", [row], tables.ROLLOUTS, "rollouts")
        score = {**keys, "scores/answer": 1.0, "reward": 0.25, "seconds": 0.0, "error": None}
        tables.write(folder / "scores" / "000.parquet", [score], tables.scores_schema(["answer"]), "scores")
    for file in (run / "rounds" / "00001").glob("*/*.parquet"):
        os.utime(file, (STARTED, STARTED))
    output = shown(run)
    assert "a completion of round 2, reward 0.25" in output
    assert "[bold]second[/]" in output, "as plain text, not as markup"
    assert "\x1b" not in output
    assert "7+<b>7</b>" in output
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "How many?"}]
    helpers.write_prompts(run / "prompts", [{"prompt_id": "p7", "prompt": [{"role": "user", "content": parts}]}])
    assert "│ [image]How many? " in shown(run), "parts as text, not as Python writes them"
    metrics = run_files.metrics_of(run, 1)
    os.utime(metrics, (time.time() + 1,) * 2)
    assert "a completion of round 1" in shown(run), "the other one is of an earlier policy 1"
    os.utime(metrics, (STARTED, STARTED))
    scores = run / "rounds" / "00002" / "scores" / "000.parquet"
    tables.write(scores, [], tables.scores_schema(["answer"]), "scores")
    assert "a completion of round 1" in shown(run), "in round 2 no group of the first shard has ended"
    scores.write_bytes(b"cut off")
    assert "a completion of round 1" in shown(run)


def test_at_80_columns_the_reason_of_a_failure_and_the_curves_are_whole(tmp_path) -> None:
    run = write_run(tmp_path / "run", 3)
    reason = "it raised ValueError (my_rewards.py, line 7): could not convert string to float: 'forty-two' for row 8"
    write_log(run, "score/00004-000.log", f"2026-01-01 10:00:00,1 ERROR rloo: {reason}\n")
    files = run_files.read(run)
    lines = printed_at_80(watched(files, progress_of(files)))
    assert reason in " ".join(" ".join(lines).split())
    assert "0.125 → 0.375" in "\n".join(lines)
    assert max(map(len, lines)) <= 80


def printed_at_80(frame: RenderableType) -> list[str]:
    """The lines of a frame on a terminal of 80 columns."""
    console = Terminal(width=80, file=io.StringIO())
    console.print(frame)
    return console.file.getvalue().splitlines()


def test_without_an_argument_the_run_of_the_project_is_watched(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="results: no run has begun in this folder"):
        watch._folder(None)
    write_run(Path("results/old"), 1)
    assert watch._folder(None) == Path("results/old")
    assert watch._folder(Path("new")) == Path("results/new"), "a name"
    assert watch._folder(Path("results/new")) == Path("results/new")
    Path("config").mkdir()
    Path("config/config.yaml").write_text("run: mine\n")
    assert watch._folder(None) == Path("results/mine")
    with pytest.raises(UserError, match=r"^results/mine has not begun; `rloo run` starts it$"):
        watch.watch([], once=True, every=1)


def test_a_run_that_has_not_begun_is_waited_for(tmp_path, monkeypatch, capsys) -> None:
    run = tmp_path / "results" / "mine"
    naps = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            write_run(run, 8)
            raise KeyboardInterrupt  # the user ends it then

    monkeypatch.setattr(watch.time, "sleep", sleep)
    watch.watch([run], once=False, every=0.5)
    output = capsys.readouterr().out
    assert "has not begun; waiting for it" in " ".join(output.split())
    assert "round 8 of 8" in output
    assert naps == [0.5, 0.5]


def test_a_run_that_has_ended_is_not_waited_for_unless_its_job_is_in_the_queue(tmp_path, monkeypatch, capsys) -> None:
    run, lock = write_run(tmp_path / "results" / "mine", 2), tmp_path / ".snakemake" / "rloo-mine.lock"
    write_log(run, "score/00003-000.log", "2026-01-01 10:00:00,1 ERROR rloo: my.py, line 7: it is wrong\n")
    write_json(run / "logs" / "submit" / "job.json", {"job": "7"})
    queued = [SlurmJob("PENDING", "Resources", "0:00", 1), None]
    monkeypatch.setattr(slurm, "job", lambda _: queued.pop(0))
    lock.parent.mkdir()
    lock.touch()
    naps = []
    slurm._was_queued.cache_clear()

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        slurm._was_queued.cache_clear()

    monkeypatch.setattr(watch.time, "sleep", sleep)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "has ended" not in watch_once(run)
    watch.watch([run], once=False, every=0.5)
    assert naps == [0.5], "it was in the queue once more"
    _, _, last = capsys.readouterr().out.rpartition("round 2 of 8")
    assert last.startswith("  has ended; the command that started it continues it")
    assert "my.py, line 7: it is wrong" in last


def test_the_last_view_has_what_was_written_before_the_run_ended(finished_run, tmp_path, monkeypatch) -> None:
    run = finished_run
    summary = (run / "summary.json").rename(tmp_path / "summary.json")

    def end(_: object) -> bool:
        summary.rename(run / "summary.json")
        return False

    monkeypatch.setattr(locks, "may_be_alive", end)
    assert "round 2 of 2  finished" in watch_once(run)


def test_where_nothing_can_be_redrawn_the_view_is_printed_at_once(tmp_path, monkeypatch, capsys) -> None:
    run, seen = write_run(tmp_path / "run", 2), []

    def sleep(seconds: float) -> None:
        seen.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", sleep)
    watch.watch([run], once=False, every=0.5)
    assert "round 2 of 8" in seen[0]


def test_a_locale_without_the_characters_of_curves_ends_no_view(tmp_path) -> None:
    outcome = done("watch", write_run(tmp_path / "run", 2), "--once", PYTHONIOENCODING="ascii")
    assert "round 2 of 8" in outcome.stdout


def test_once_prints_one_frame_and_writes_nothing(tmp_path) -> None:
    run = write_run(tmp_path / "run", 2)
    before = sorted((file, file.stat().st_mtime_ns) for file in run.rglob("*"))
    outcome = done("watch", run, "--once")
    assert "round 2 of 8" in outcome.stdout
    assert sorted((file, file.stat().st_mtime_ns) for file in run.rglob("*")) == before
    assert "not the folder of a run" in rloo("watch", tmp_path, "--once").stderr


def write_curves(folder: Path, rewards: list[float], planned: int = 8) -> Path:
    """A run with these rewards, and held-out accuracies of half of them."""
    write_config(folder, Config(**mini(rounds=planned)))
    for number, reward in enumerate(rewards, 1):
        write_json(folder / "rounds" / f"{number:05d}" / "metrics.json", {"round": number, "reward": reward})
        held_out = {"policy": number - 1, "accuracy": reward / 2, "prompts": 8}
        write_json(folder / "rounds" / f"{number:05d}" / "held_out.json", held_out)
    return folder


def test_several_runs_are_laid_over_each_other(tmp_path) -> None:
    runs = [write_curves(tmp_path / "slow", [0.1, 0.2, 0.3]), write_curves(tmp_path / "fast", [0.1, 0.5, 0.9, 0.9])]
    output = printed(watch.watch, runs, once=True, every=1.0, width=80)
    lines = output.splitlines()
    assert max(map(len, lines)) <= 80
    table = [line.split() for line in lines[1:3]]
    assert table == [["A", "slow", "3", "of", "8", "0.300", "15.0%"], ["B", "fast", "4", "of", "8", "0.900", "45.0%"]]
    reward = lines[lines.index("reward") + 1 : lines.index("held-out accuracy, each run on its own problems") - 2]
    assert reward[0].replace(" ", "") == "0.9│BB"
    assert reward[-1].strip().startswith("0.1 │B"), "where curves meet, the later one is drawn"
    assert sum(line.count("A") for line in reward) == 2
    assert lines[-1].split() == ["0", "round", "3"]


@pytest.mark.parametrize("width", [8, 10, 12])
def test_several_runs_are_drawn_on_a_terminal_that_is_too_narrow(width, tmp_path) -> None:
    runs = [write_curves(tmp_path / name, [0.1 * number for number in range(12)]) for name in "ab"]
    assert "│" in printed(watch.watch, runs, once=True, every=1.0, width=width)
    assert chart("reward", [{120: 0.5, 121: 0.6}], ".3g", width).plain.count("A") == 2


def test_an_experiment_is_a_curve_of_means_for_each_arm(tmp_path) -> None:
    for seed, rewards in ((0, [0.2, 0.4]), (1, [0.4, 0.6, 0.8])):
        write_curves(tmp_path / "a" / str(seed), rewards)
    (tmp_path / "experiment.yaml").write_text("experiment: e\narms: {a: {}, b: {}}\nseeds: [0, 1]\n")
    output = printed(watch.watch, [tmp_path], once=True, every=1.0, width=80)
    assert [line.split() for line in output.splitlines()[1:3]] == [
        ["A", "a", "5", "of", "16", "0.500", "25.0%"],
        ["B", "b", "not", "begun"],
    ]
    with pytest.raises(UserError, match="27 runs; 26 curves can be told apart"):
        watch.watch([tmp_path] * 27, once=True, every=1.0)


def test_what_a_run_has_written_since_is_read(tmp_path) -> None:
    run = write_run(tmp_path / "run", 5)
    measured = LiveRun.of_call(run_files.read(run).config, run)
    write_run(run, 6)
    for number in range(1, 7):
        held_out = {"policy": number - 1, "accuracy": number / 8, "prompts": 8}
        write_json(run / "rounds" / f"{number:05d}" / "held_out.json", held_out)
    measured.read()
    assert [row.held_out for row in measured.rows(99)] == [number / 8 for number in range(1, 7)] + [None]
    train_again(run, 2)
    measured.read()
    assert [row.round for row in measured.rows(99)] == [0, 1, 2]
    half_written = run / "rounds" / "00002" / "metrics.json"
    half_written.write_text("{")
    os.utime(half_written, (time.time() + 9,) * 2)
    measured.read()
    assert measured.rows(1)[0].round == 2, "a file is being replaced"


def test_a_log_that_is_just_being_replaced_ends_no_view(tmp_path) -> None:
    run = write_run(tmp_path / "run", 0)
    measured = LiveRun.of_call(run_files.read(run).config, run)
    write_run(run, 1)
    (run / "logs" / "update" / "00001.log").mkdir(parents=True)
    measured.read()
    assert measured.rounds_left == 7
    assert measured.pace is None
