"""After one change, Snakemake reruns exactly the jobs that it affects."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers import AFTER_FIRST_TABLES, STOP, Project, mini

import rloo_pipeline
from rloo_pipeline.judging.run_files import is_finished
from rloo_pipeline.snakemake_ext import run_folders

pytestmark = pytest.mark.slow

REPORT = {"summary.json", "report.html"}
EVALUATED = ("completions.parquet", "greedy.parquet", "summary.json")
FINAL = {f"evaluation/final/{file}" for file in (*EVALUATED, "distance.json")}
WARM = {f"evaluation/warmstart/{file}" for file in EVALUATED}
CHECKS = {"warmstart/probe.parquet", "warmstart/checks.json"}


def of_rounds(kinds: tuple[str, ...], rounds: range = range(1, 3)) -> set[str]:
    """Tables of all shards of some rounds; a shard is scored with its held-out completions."""
    kinds += ("scores/held_out",) if "scores" in kinds else ()
    return {
        f"rounds/{number:05d}/{kind}/{shard:03d}.parquet" for number in rounds for kind in kinds for shard in range(2)
    }


def sampled(rounds: range = range(1, 3)) -> set[str]:
    """Files that rollouts write, and the accuracy by round that follows."""
    return of_rounds(("rollouts", "held_out"), rounds) | measured(rounds)


def measured(rounds: range = range(1, 3)) -> set[str]:
    """Held-out accuracy of some rounds."""
    return {
        name.format(number)
        for number in rounds
        for name in ("rounds/{:05d}/held_out.json", "tensorboard/eval/{:05d}.tfevents")
    }


def pages(rounds: range = range(1, 2)) -> set[str]:
    """Records of the pages of a run in flight: those of rounds that are not the last one."""
    return {f"pages/{number:05d}.json" for number in rounds}


def updates(rounds: range = range(1, 3)) -> set[str]:
    """Files that updates write, of which the last is that of the run's last round."""
    per_round = (
        *("policies/{0:05d}", "rounds/{0:05d}/metrics.json", "rounds/{0:05d}/train.parquet"),
        "tensorboard/{0:05d}.tfevents",
    )
    return {name.format(number) for number in rounds for name in per_round} | {f"trainer/{rounds[-1]:05d}"}


def gates(rounds: range) -> set[str]:
    """Diagnoses of rounds that are not the last one."""
    return {f"rounds/{number:05d}/diagnosis.json" for number in rounds}


SECOND_ROUND = gates(range(1, 2)) | sampled(range(2, 3)) | of_rounds(("scores", "reference"), range(2, 3)) | pages()


def test_more_rounds_run_the_new_rounds_only(finished) -> None:
    new = range(3, 5)
    assert (
        finished.planned(rounds=4)
        == gates(range(2, 4))
        | sampled(new)
        | of_rounds(("scores", "reference"), new)
        | updates(new)
        | pages(range(3, 4))
        | FINAL
        | REPORT
    )


@pytest.mark.long
def test_fewer_rounds_do_not_overwrite_the_evaluation_of_a_longer_run(finished, tmp_path) -> None:
    project = Project(tmp_path / "project").take(finished)
    before = project.files("**/*.json")
    sentence = "results/mini has finished 2 rounds; with `rounds: 1`, evaluation and report of round 2 would be"
    outcome = project.snakemake("--cores", "1", rounds=1)
    assert outcome.returncode == 1
    assert sentence in outcome.stdout + outcome.stderr
    assert project.files("**/*.json") == before
    planned = project.snakemake("--dry-run", rounds=1)
    assert planned.returncode == 0
    assert sentence in planned.stdout + planned.stderr
    assert project.snakemake("--cores", "1", "--", "results/mini/prompts", rounds=1).returncode == 0
    shutil.rmtree(project.folder / "results" / "mini" / "evaluation" / "final")
    planned = project.snakemake("--dry-run", rounds=1)
    assert sentence not in planned.stdout + planned.stderr


def test_a_changed_configuration_is_refused_where_snakemake_has_lost_its_records(finished, tmp_path) -> None:
    """It would say that nothing is to be done, or make new rounds with other keys."""
    project = Project(tmp_path / "project").take(finished)
    shutil.rmtree(project.folder / ".snakemake" / "metadata")
    before = project.files("**/*")
    changed, sentence = {"algorithm": {"beta": 0.5}}, "was made with another value of algorithm.beta, and would stay"
    for targets, more in (((), {}), (("--", "results/mini/rounds/00003/metrics.json"), {"rounds": 3})):
        outcome = project.snakemake("--cores", "1", *targets, **changed, **more)
        assert outcome.returncode == 1
        assert sentence in outcome.stdout + outcome.stderr
    assert project.files("**/*") == before
    planned = project.snakemake("--dry-run", plain=False, **changed)
    assert planned.returncode == 0
    assert sentence in planned.stdout + planned.stderr
    remedy = re.search(r"add (--forcerun) (\S+) to make it", " ".join((planned.stdout + planned.stderr).split()))
    assert remedy is not None
    assert project.planned(*remedy.groups(), **changed) >= updates() | FINAL


def test_updates_that_must_run_are_found_although_a_check_before_them_runs_again(finished) -> None:
    """Snakemake alone would check the warm start again and miss the updates that depend on it."""
    changed = {"update": {"learning_rate": 0.001}, "checks": {"accept": ["teaching"]}}
    judged = {"warmstart/checks.json"}
    assert finished.planned(checks=changed["checks"]) == judged | REPORT
    assert finished.planned(**changed) == judged | SECOND_ROUND | updates() | FINAL | REPORT


def test_a_reward_option_reruns_the_scores_and_what_follows(finished) -> None:
    rewards = [
        {"function": "rloo_pipeline.rewards.answer:exact_answer_reward", "name": "answer"},
        {"function": "rloo_pipeline.rewards.format:think_format_reward", "name": "format", "weight": 0.2},
        {"function": "rloo_pipeline.rewards.format:shows_work", "name": "worked", "weight": 0},
    ]
    planned = finished.planned(rewards=rewards)
    assert planned == of_rounds(("scores",)) | measured() | SECOND_ROUND | updates() | WARM | FINAL | REPORT | CHECKS


def test_another_choice_of_prompts_reruns_the_pass_rates_the_rollouts_and_what_follows(finished) -> None:
    rounds = gates(range(1, 2)) | sampled() | of_rounds(("scores", "reference")) | updates() | pages() | FINAL | REPORT
    correct = finished.planned(correct={"reward": "answer"})
    for select, more in (
        ({"pass_rate": [0.1, 0.9]}, {f"warmstart/difficulty/{shard:03d}.parquet" for shard in range(2)}),
        ({"weights": "online"}, {"rounds/00001/pass_rates.parquet"}),
    ):
        planned = finished.planned(dataset={"select": select}, correct={"reward": "answer"})
        assert planned - correct == (rounds | more) - correct
        assert not planned & {"prompts", "policies/00000", "warmstart/probe.parquet"}


def test_a_sampling_option_reruns_the_rollouts_and_what_follows(finished) -> None:
    planned = finished.planned(rollout={"temperature": 0.9})
    rounds = gates(range(1, 2)) | sampled() | of_rounds(("scores", "reference")) | updates() | pages()
    assert planned == rounds | FINAL | REPORT | CHECKS, "the warm start is evaluated at evaluation.temperature"


def test_another_size_of_a_round_reruns_neither_the_probe_nor_the_evaluation_of_the_warm_start(finished) -> None:
    kept = {*CHECKS, *WARM, "policies/00000"}
    planned = finished.planned(rollout={"shards": 1, "generation_batch_size": 48, "oversample": 1.5})
    assert "rounds/00001/metrics.json" in planned
    assert not planned & kept
    planned = finished.planned(rollout={"num_generations": 8})
    assert planned >= CHECKS
    assert not planned & WARM


def test_a_lag_reruns_what_follows_the_first_rollouts(finished) -> None:
    """Round 1 is sampled from policy 0 with any lag; the correction that comes with a lag trains it again."""
    assert finished.planned(rollout={"lag": 1}) == updates() | SECOND_ROUND | FINAL | REPORT
    stdout = finished.snakemake("--dry-run", plain=False, rollout={"lag": 1}).stdout
    assert "rollout.lag: 0 → 1: 2 jobs (rollout ×2)" in stdout
    assert "algorithm.mismatch.correction: none → sequence_tis: 1 job (update)" in stdout


def test_a_refill_trains_again_and_samples_no_shard_of_the_first_round_again(finished) -> None:
    tables = {
        f"rounds/{number:05d}/refill/{kind}.parquet"
        for number in (1, 2)
        for kind in ("rollouts", "scores", "reference")
    }
    changes = {"rollout": {"refill": 1}, "algorithm": {"filter_zero_variance": True}}
    assert finished.planned(**changes) == tables | updates() | SECOND_ROUND | FINAL | REPORT


def test_another_limit_of_a_check_reruns_the_verdict_and_trains_nothing(finished) -> None:
    planned = finished.planned(checks={"limits": {"truncated": [0.9, None]}})
    assert planned == {"warmstart/checks.json"} | REPORT


def test_another_meaning_of_right_judges_policy_0_and_the_evaluations_again_and_trains_nothing(finished) -> None:
    planned = finished.planned(correct={"reward": "format"})
    assert planned == {"warmstart/checks.json"} | WARM | FINAL | measured() | REPORT


def test_a_finished_run_is_sent_to_a_new_tracker_and_nothing_else_runs(finished) -> None:
    assert finished.planned(report_to=["wandb", "mlflow"]) == {"tracking/00001.json", "tracking/00002.json"}


def test_benchmarks_evaluate_nothing_else_again(finished) -> None:
    planned = finished.planned(evaluation={"harness": {"tasks": ["gsm8k"]}})
    assert planned == {"harness/tasks.json"} | REPORT | {
        f"evaluation/{name}/harness.json" for name in ("warmstart", "final")
    }


def test_settings_of_what_a_run_in_flight_shows_rerun_nothing_of_a_finished_one(finished) -> None:
    """Neither with more pages or held-out prompts, nor with fewer, nor in a run that has no such pages."""
    assert finished.planned(report={"every": 0}, evaluation={**mini()["evaluation"], "each_round": 0}) == set()
    assert finished.planned(report={"every": 7}, evaluation={**mini()["evaluation"], "each_round": 40}) == set()
    pages = finished.folder / "results" / "mini" / "pages"
    pages.rename(pages.with_name("aside"))
    try:
        assert finished.planned() == set()
    finally:
        pages.with_name("aside").rename(pages)


def test_another_title_of_the_report_reruns_only_the_report(finished) -> None:
    assert finished.planned(report={"title": "Another"}) == REPORT


def test_a_call_that_was_killed_before_its_first_job_leaves_a_report_that_the_next_one_makes_again(finished) -> None:
    """Else the run would count as unfinished for ever, while nothing is to be done."""
    summary = finished.folder / "results" / "mini" / "summary.json"
    time = summary.stat().st_mtime_ns
    run_folders.mark_unfinished(Mock(to_finish=lambda: ["mini"], run_folder=lambda run: summary.parent))
    try:
        assert finished.planned() == REPORT
    finally:
        os.utime(summary, ns=(time, time))


def test_another_gate_reruns_no_round(finished) -> None:
    assert finished.planned(gates=STOP | {"kl_explosion": {"action": "off"}}) == REPORT


@pytest.mark.long
def test_a_gate_ends_the_run_with_everything_kept_and_a_report_and_without_it_the_run_goes_on(
    finished, tmp_path
) -> None:
    """A finished run of two rounds is extended by a third one, which the gate does not allow to start. The command is
    that of `rloo_pipeline.run(file, changes={"rounds": 3})`, with a second file of the changes.
    """
    project = Project(tmp_path / "project").take(finished)
    before = project.files("[prt]*/**/*")
    (project.folder / "changes.json").write_text('{"rounds": 3}')
    outcome = project.snakemake("changes.json", "--cores", "1", "--retries", "2", gates=STOP)
    output = outcome.stdout + outcome.stderr
    assert outcome.returncode == 0, output
    assert output.count("the run ends after round 2, as gates.cold_start.action asks for: cold start: ") == 1
    assert "ended after round 2 of 3" in output
    assert "Traceback" not in output
    run = project.folder / "results" / "mini"
    assert json.loads((run / "stopped.json").read_text())["round"] == rloo_pipeline.open_run(run).config.rounds == 2
    assert not (run / "rounds" / "00003").exists()
    planned = project.snakemake("changes.json", "--dry-run", plain=False, gates=STOP).stdout
    assert "a gate ended it after round 2; later rounds run only if it lets them" in planned
    assert project.files("[prt]*/**/*") == before
    assert (run / "report.html").stat().st_mtime > (run / "stopped.json").stat().st_mtime
    assert project.snakemake("changes.json", "--cores", "1", gates=STOP).returncode == 0
    assert is_finished(run, rloo_pipeline.open_run(run).config), "also after a second call, which stops there again"
    new = range(3, 4)
    third = sampled(new) | of_rounds(("scores", "reference"), new) | updates(new) | FINAL | REPORT
    assert project.planned(rounds=3) == gates(range(2, 3)) | third
    assert project.snakemake("--cores", "1", "--", "results/mini/rounds/00002/diagnosis.json", rounds=3).returncode == 0
    assert not (run / "stopped.json").exists()
    assert project.planned(rounds=3, gates=STOP) == third, "the diagnosis of a round is not printed again"


@pytest.mark.long
def test_with_a_lag_a_gate_trains_nothing_more_and_what_was_sampled_ahead_is_counted(finished, tmp_path) -> None:
    project = Project(tmp_path / "project").take(finished, *AFTER_FIRST_TABLES)
    outcome = project.snakemake("--cores", "2", rounds=4, gates=STOP, rollout={"lag": 1})
    output = outcome.stdout + outcome.stderr
    assert outcome.returncode == 0, output
    assert "ended after round 1 of 4" in output
    run = project.folder / "results" / "mini"
    assert not (run / "policies" / "00002").exists(), "update 2 waits for the gate, though its rollouts are there"
    assert not (run / "rounds" / "00003").exists(), "nor is policy 1 sampled from"
    assert list((run / "rounds" / "00002" / "rollouts").iterdir())
    assert "Rollouts of 1 later round(s), sampled ahead by rollout.lag, stay unused." in output


def test_settings_that_change_no_result_run_nothing(finished) -> None:
    """Where an engine runs, what an update needs of a machine, what lets a reward fail: a run that ran out of memory or
    ended at a bad row continues with them.
    """
    changes = {
        "report_to": "tensorboard",
        "vllm": {"kv_cache_gib": 2},
        "deepspeed": {"max_tokens_per_micro_batch": 64, "gradient_checkpointing": True, "threads": 2},
        "rewards": [reward | {"on_error": "none", "concurrency": 2} for reward in mini()["rewards"]],
    }
    assert finished.planned(**changes) == set()


def test_a_comment_in_the_config_runs_nothing(finished) -> None:
    path = finished.configure()
    commented = "# a comment\n" + path.read_text()
    assert finished.planned() == set()
    path.write_text(commented)
    outcome = finished.snakemake("--dry-run")
    assert "Nothing to be done" in outcome.stdout + outcome.stderr


def test_how_an_update_adds_up_gradients_trains_again_and_so_does_sft(finished) -> None:
    rounds = gates(range(1, 2)) | sampled() | of_rounds(("scores", "reference")) | updates() | pages()
    planned = finished.planned(deepspeed={"zero_stage": 1})
    assert planned == {"policies/00000"} | rounds | WARM | FINAL | REPORT | CHECKS


FORMULA = "(ratio.detach() * actions).sum(-1) / count", "(ratio.detach() * actions).sum(-1) / (count + 1)"
STATEMENT = "\n", "\nEDITED = True\n"


@pytest.mark.parametrize(
    ("file", "edit", "expected"),
    [
        (
            "user_code/score_table.py",
            STATEMENT,
            of_rounds(("scores",)) | measured() | SECOND_ROUND | updates() | WARM | FINAL | CHECKS | REPORT,
        ),
        ("algorithm/loss.py", FORMULA, updates() | SECOND_ROUND | FINAL | REPORT),
        ("stages/reference.py", STATEMENT, of_rounds(("reference",)) | SECOND_ROUND | updates() | FINAL | REPORT),
        ("judging/evaluation_summary.py", STATEMENT, WARM | FINAL | REPORT | measured()),
        ("report/page.html.j2", STATEMENT, REPORT),
    ],
)
def test_an_edit_that_changes_what_code_does_reruns_the_stages_that_use_it(finished, file, edit, expected) -> None:
    before, after = edit
    with edited(finished.folder / "rloo_pipeline" / file) as path:
        start, match, end = path.read_text().rpartition(before)
        path.write_text(start + (after if match else "the edit is of nothing") + end)
        assert finished.planned() == expected


def test_an_update_of_the_package_trains_a_finished_run_again_only_if_the_user_says_so(finished, tmp_path) -> None:
    project = Project(tmp_path / "project").take(finished)
    file, (before, after) = project.folder / "rloo_pipeline" / "algorithm" / "loss.py", FORMULA
    start, _, end = file.read_text().rpartition(before)
    file.write_text(start + after + end)
    files = project.files("**/*")
    outcome = project.snakemake("--cores", "1")
    assert outcome.returncode == 1
    said = " ".join((outcome.stdout + outcome.stderr).split())
    assert re.search(r"this package has changed since results/mini/policies/00001 was made, so", said)
    assert project.files("**/*") == files
    assert project.planned("--rerun-triggers", "mtime", "input") == set()
    remedy = re.search(r"make all of it again, add (--forcerun)((?: [a-z_]+)+);", said)
    assert remedy is not None
    assert project.planned(remedy[1], *remedy[2].split()) == updates() | SECOND_ROUND | FINAL | REPORT
    # forced jobs are chosen: the call goes on to the first of them
    outcome = project.snakemake("--cores", "1", remedy[1], *remedy[2].split(), "--until", "update")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "rule update:" in outcome.stdout + outcome.stderr


def test_edits_that_change_no_result_rerun_nothing(finished) -> None:
    """A comment and a changed docstring in every file rerun nothing, nor do edits of code that only reports on a run:
    the command line, the TensorBoard files, the page of symptoms.
    """
    package = finished.folder / "rloo_pipeline"
    files = sorted(package.rglob("*.py"))
    edited_modules = [package / name for name in ("cli/main.py", "trackers/events.py", "stages/gate.py")]
    with ExitStack() as edits:
        for file in files:
            edits.enter_context(edited(file))
            text = file.read_text()
            assert text.startswith('"""'), file
            more = "EDITED = True\n" if file in edited_modules else ""
            file.write_text(f"# edited\n{text.replace(chr(34) * 3, chr(34) * 3 + 'Mended. ', 1)}{more}# edited\n")
        assert finished.planned() == set()


@contextmanager
def edited(path: Path) -> Iterator[Path]:
    """Restores a file and its time after the block."""
    before, time = path.read_text(), path.stat().st_mtime_ns
    try:
        yield path
    finally:
        path.write_text(before)
        os.utime(path, ns=(time, time))


@pytest.mark.long
def test_a_reward_function_of_ones_own_is_watched(finished, tmp_path) -> None:
    project = Project(tmp_path / "project").take(finished)
    reward_file = project.folder / "mine.py"
    reward_file.write_text("import beside\n\ndef my_reward(completions):\n    return [beside.ONE] * len(completions)\n")
    (project.folder / "beside.py").write_text("ONE = 1.0\n")
    changes = {"rewards": [{"function": "mine.py:my_reward", "name": "answer"}]}
    scores = "results/mini/rounds/00001/scores/000.parquet"
    assert project.snakemake("--cores", "1", "--", scores, **changes).returncode == 0
    assert project.planned("--", scores, **changes) == set()
    reward_file.write_text("# a comment\n" + reward_file.read_text())
    assert project.planned("--", scores, **changes) == set()
    (project.folder / "beside.py").write_text("ONE = 2.0\n")
    held_out = "rounds/00001/scores/held_out/000.parquet"
    assert project.planned("--", scores, **changes) == {"rounds/00001/scores/000.parquet", held_out}
    assert project.snakemake("--cores", "1", "--", scores).returncode == 0
    assert project.files("rounds/00001/**/*") == finished.files("rounds/00001/**/*")


@pytest.mark.long
def test_prompts_warm_start_and_pass_rates_come_from_the_cache_between_workflows(finished, tmp_path) -> None:
    """A run of another name reads it from the first one's cache and trains nothing; each shard has its own entry."""
    finished.environment["SNAKEMAKE_OUTPUT_CACHE"] = str(tmp_path)
    select = {"dataset": {"select": {"weights": "static", "num_generations": 2}}, "correct": {"reward": "answer"}}
    made = "policies/00000/model.safetensors", *(f"warmstart/difficulty/{shard:03d}.parquet" for shard in range(2))
    try:
        for run in ("first", "second"):
            shards = [f"results/{run}/{name}" for name in made[1:]]
            outcome = finished.snakemake("--cores", "1", "--cache", "--", *shards, run=run, **select)
            assert outcome.returncode == 0, outcome.stderr
            logs = finished.folder / "results" / run / "logs"
            trained = (logs / "warmstart.log").exists() and "SFT" in (logs / "warmstart.log").read_text()
            assert trained == (run == "first")
    finally:
        del finished.environment["SNAKEMAKE_OUTPUT_CACHE"]
    first, second = (
        [(finished.folder / "results" / run / name).read_bytes() for name in made] for run in ("first", "second")
    )
    assert first == second
    assert len(set(first)) == len(made)


def test_replaced_weights_of_a_local_model_are_refused_until_the_run_begins_again(finished, tiny_model, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    changes = {"run": "replaced", "model": {"name_or_path": str(model), "build": None, "build_options": {}}}
    command = ("--cores", "1", "--", "results/replaced/assets")
    assert finished.snakemake(*command, **changes).returncode == 0
    assert finished.snakemake(*command, **changes).returncode == 0
    (model / "model.safetensors").touch()
    outcome = finished.snakemake(*command, **changes)
    assert outcome.returncode == 1
    assert f"{model}/model.safetensors was replaced after the run began" in outcome.stdout + outcome.stderr
    outcome = finished.snakemake("--dry-run", *command, **changes)
    assert outcome.returncode == 0
    assert "was replaced after the run began" in outcome.stdout + outcome.stderr
    outcome = finished.snakemake("--cores", "1", "--", "results/replaced/prompts", **changes)
    assert outcome.returncode == 1
    assert "was replaced after the run began" in outcome.stdout + outcome.stderr
    shutil.rmtree(finished.folder / "results" / "replaced" / "assets")
    assert finished.snakemake(*command, **changes).returncode == 0
    assert finished.snakemake(*command, **changes).returncode == 0


def test_a_copy_without_its_times_and_records_is_adopted_if_its_files_are_whole(finished, tmp_path) -> None:
    project = Project(tmp_path / "project")
    run, copied = project.folder / "results" / "mini", finished.folder / "results" / "mini"
    shutil.copytree(copied, run, symlinks=True, copy_function=shutil.copyfile)
    os.utime(run / "prompts" / ".snakemake_timestamp")
    assert {"policies/00000", "rounds/00001/rollouts/000.parquet", "summary.json"} <= project.planned()
    outcome = project.snakemake("--cores", "1")
    assert outcome.returncode == 1
    assert re.search("results/mini is finished, but .* newer than .* `rloo adopt`", outcome.stdout + outcome.stderr)
    table = run / "rounds" / "00001" / "scores" / "000.parquet"
    whole = table.read_bytes()
    table.write_bytes(whole[:-100] + b"x" + whole[-99:])
    outcome = project.snakemake("--cores", "1", "--touch")
    assert outcome.returncode == 1
    assert "rounds/00001/scores/000.parquet: truncated or damaged" in outcome.stdout + outcome.stderr
    table.write_bytes(whole)
    outcome = project.snakemake("--cores", "1", "--touch")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert project.planned() == set()
    assert not project.planned(rounds=3) & of_rounds(("rollouts",))
    shutil.rmtree(run / "policies" / "00002")
    outcome = project.snakemake("--cores", "1")
    assert outcome.returncode == 1
    assert (
        "policies/00002 is missing, and since the run is finished, nothing would make it again"
        in outcome.stdout + outcome.stderr
    )


@pytest.mark.long
def test_a_table_that_was_deleted_from_a_finished_run_is_named_and_made_again_only_if_asked_for(
    finished, tmp_path
) -> None:
    project = Project(tmp_path / "project").take(finished, "rounds/00001/rollouts/000.parquet")
    table = "results/mini/rounds/00001/rollouts/000.parquet"
    outcome = project.snakemake("--cores", "1", plain=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    said = " ".join((outcome.stdout + outcome.stderr).split())
    assert f"1 table of finished jobs, such as {table}, cannot be found" in said
    assert f" -- {table}" in said
    outcome = project.snakemake("--cores", "1", "--", table)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert project.files("rounds/**/*") == finished.files("rounds/**/*")
    assert project.planned() == set(), "nothing runs again for a table with the content that it had"


@pytest.mark.parametrize("tables", ["held_out", "scores/held_out"])
def test_held_out_files_that_were_deleted_from_a_finished_run_sample_and_score_nothing_again(
    finished, tmp_path, tables
) -> None:
    project = Project(tmp_path / "project").take(finished, f"rounds/*/{tables}", "rounds/*/held_out.json")
    assert project.planned() == REPORT


def test_rounds_that_a_deleted_table_would_train_again_are_said_with_the_table(finished, tmp_path) -> None:
    project = Project(tmp_path / "project").take(finished, "rounds/00002/train.parquet")
    table = "results/mini/rounds/00002/train.parquet"
    outcome = project.snakemake("--cores", "1", plain=False)
    assert "If you want one, which trains rounds again, with" in " ".join((outcome.stdout + outcome.stderr).split())
    assert project.planned("--", table) == updates(range(2, 3))
    outcome = project.snakemake("--cores", "1", "--", table)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "round 1 is trained again" in (project.folder / "results/mini/logs/update/00002.log").read_text()


def test_what_follows_a_part_that_was_remade_by_itself_is_made_again(finished, tmp_path) -> None:
    project = Project(tmp_path / "project").take(finished)
    os.utime(project.folder / "results" / "mini" / "policies" / "00002" / ".snakemake_timestamp")
    outcome = project.snakemake("--cores", "1", "--", "results/mini/evaluation/final/distance.json")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "2 of 2 steps" in outcome.stdout + outcome.stderr


def test_a_copy_that_only_lacks_snakemakes_records_is_adopted_with_the_policies_that_are_not_kept(finished, tmp_path):
    """Its times are in order, so nothing would be touched, and longer runs would be refused for ever."""
    project = Project(tmp_path / "project").take(finished)
    shutil.rmtree(project.folder / ".snakemake" / "metadata")
    outcome = project.snakemake("--cores", "1", "--touch", keep_every=5)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert (project.folder / "results" / "mini" / "policies" / "00001" / "model.safetensors").exists()
    new = range(3, 4)
    third = gates(range(2, 3)) | sampled(new) | of_rounds(("scores", "reference"), new) | updates(new)
    assert project.planned(rounds=3, keep_every=5) == third | FINAL | REPORT
