"""The logger plugin shows what matters of each event, and Snakemake's own words where it is asked to."""

import logging
import os
import pty
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import snakemake.api  # noqa: F401 - its modules cannot be imported in another order
from helpers import mini
from snakemake.cli import parse_config
from snakemake.exceptions import CliException, WorkflowError, format_exception_to_string
from snakemake.jobs import Reason
from snakemake.logging import DefaultFormatter
from snakemake.persistence import ParamsChange
from snakemake.utils import update_config
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.tests import MockOutputSettings, TestLogHandlerBase

from rloo_pipeline import errors
from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.config import Config
from rloo_pipeline.runtime import scratch
from rloo_pipeline.snakemake_ext import configfiles, dry_run, failures, lost_metadata
from rloo_pipeline.snakemake_ext.controller import Controller
from rloo_pipeline.snakemake_ext.logger import LogHandler, LogHandlerSettings
from rloo_pipeline.snakemake_ext.run_display import RunDisplay
from rloo_pipeline.snakemake_ext.stage_lines import StageLines


class TestInterface(TestLogHandlerBase):
    """What Snakemake's interface asks of every logger plugin."""

    __test__ = True

    def get_log_handler_cls(self) -> type[LogHandler]:
        return LogHandler

    def get_log_handler_settings(self) -> LogHandlerSettings:
        return LogHandlerSettings()


class Call:
    """A call of Snakemake as the plugin sees it."""

    def __init__(self, run: Path, plain: bool = False, **settings: Any) -> None:
        self.outputs: dict[str, list[str]] = {}
        options = MockOutputSettings()
        options.show_failed_logs = False
        for name, value in settings.items():
            setattr(options, name, value)
        self.handler = LogHandler(options, LogHandlerSettings(plain=plain))
        self.handler.setFormatter(DefaultFormatter())
        if self.handler.display:
            self.handler.display.add_run(Config(**mini(rounds=3)), run, [])
        self.event("Workflow has started!", event=LogEvent.WORKFLOW_STARTED)

    def event(self, message: str | None = None, level: int = logging.INFO, **fields: Any) -> None:
        record = logging.LogRecord("snakemake", level, "", 0, message, (), None)
        record.__dict__.update(fields)
        self.handler.handle(record)

    def planned(self, total: int) -> None:
        self.event("Job stats:", event=LogEvent.RUN_INFO, stats={"total": total})

    def job(self, number: int, rule: str, log: Path | None = None, **wildcards: str) -> None:
        fields = {"jobid": number, "rule_name": rule, "wildcards": wildcards}
        fields |= {"log": [str(log)] if log else [], "output": self.outputs.get(rule, ["x"])}
        self.event("", event=LogEvent.JOB_INFO, **fields)

    def done(self, number: int, done: int, total: int) -> None:
        self.event("", event=LogEvent.JOB_FINISHED, job_id=number)
        self.event(None, event=LogEvent.PROGRESS, done=done, total=total)

    def failed(self, number: int, rule: str, log: Path, message: str | None = None) -> None:
        fields = {"jobid": number, "rule_name": rule, "log": [str(log)], "rule_msg": message}
        self.event("", logging.ERROR, event=LogEvent.JOB_ERROR, **fields)


def test_a_run_without_a_terminal_is_a_line_an_event(tmp_path, capfd) -> None:
    call = Call(tmp_path / "results" / "mini")
    run = tmp_path / "results" / "mini"
    call.outputs = {"update_transient": [str(run / "rounds/00001/metrics.json")]}
    call.planned(2)
    call.job(5, "update_transient", run / "logs/update/00001.log", round="00001")
    metrics = {"round": 1, "reward": 0.5, "kl": 0.01, "completions/mean_length": 12.4, "num_completion_tokens": 300}
    write_json(run / "rounds" / "00001" / "metrics.json", metrics)
    log = run / "logs" / "update" / "00001.log"
    log.parent.mkdir(parents=True)
    log.write_text("2026-01-01 10:00:30,000 INFO rloo.time: took 10.0 s, 1.00 s of CPU, 100 MB at most\n")
    call.done(5, 1, 2)
    call.handler.close()
    text = capfd.readouterr().err
    assert "run: mini\n" in text
    assert f"page: {run}/report.html\n" in text
    assert f"begins: update, round 1 (log: {log})\n" in text
    assert "1 of 2 jobs done: update, round 1 (0 s)\n" in text
    assert "round 1 of 3: reward 0.500, KL 0.0100, length 12, tokens/s 30, seconds 10.0; about 0:00:20 until" in text


def test_runs_of_an_experiment_are_counted_and_named(tmp_path, capfd) -> None:
    folder = tmp_path / "results" / "study"
    call = Call(folder / "a" / "0")
    for seed in (1, 2):
        call.handler.display.add_run(Config(**mini(run=f"study-a-{seed}", rounds=3)), folder / "a" / str(seed), [])
    page, shared = folder / "experiment.html", "study/shared/score-0123456789ab"
    call.handler.display.add_experiment(page, {shared: "study/a/0 and 1 more"})
    call.event("Workflow has started!", event=LogEvent.WORKFLOW_STARTED)
    call.outputs = {"update_last": [str(folder / "a" / "2" / "rounds/00001/metrics.json")]}
    call.planned(2)
    call.job(4, "score", run=shared, round="00001", shard="000")
    call.done(4, 1, 2)
    write_json(folder / "a" / "2" / "rounds" / "00001" / "metrics.json", {"round": 1, "reward": 0.5})
    call.job(5, "update_last", run="study/a/2", round="00001")
    call.done(5, 2, 2)
    page.write_text("")
    call.handler.close()
    output = capfd.readouterr()
    text = output.out + output.err
    assert f"and 2 more runs in {folder}" in text
    assert "study-a-2: round 1 of 3: reward 0.500" in text
    assert "1 of 2 jobs done: score, run study/a/0 and 1 more, round 1, shard 0" in text
    assert text.rstrip().endswith(f": {page}"), "and not a page for each run"


def test_known_chatter_is_left_out_and_everything_else_is_not(tmp_path, capfd) -> None:
    call = Call(tmp_path / "results" / "mini")
    capfd.readouterr()
    for chatter in (
        "Select jobs to execute...",
        "Building DAG of jobs...",
        "Execute 2 jobs...",
        "Using shell: /bin/sh",
    ):
        call.event(chatter)
    assert capfd.readouterr().err == ""
    locked = "LockException:\nError: Directory cannot be locked.\n  1. wait\n  2. --unlock"
    call.event(locked, logging.ERROR, event=LogEvent.ERROR)
    call.event("Job 4 has been submitted with SLURM jobid 17 (log: x).")
    call.event("something unknown", logging.WARNING)
    text = f"{locked}\nJob 4 has been submitted with SLURM jobid 17 (log: x).\nsomething unknown\n"
    assert capfd.readouterr().err == text


def test_the_last_lines_of_a_failure_have_its_sentence_log_and_command(tmp_path, capfd, monkeypatch) -> None:
    call = Call(tmp_path / "results" / "mini")
    monkeypatch.setattr("sys.argv", ["/bin/snakemake", "--config", "run=a b"])
    log = tmp_path / "score.log"
    call.planned(9)
    call.job(3, "score", log, round="00002", shard="001")
    log.write_text("x\n2026-01-01 10:00:30,000 ERROR rloo: rloo score: error: no key in row 0\nlater\n")
    command = f"Command 'set -euo pipefail;  rloo score --log={log}' returned non-zero exit status 1."
    call.event(
        f'RuleException:\nCalledProcessError in file "r.smk", line 2:\n{command}', logging.ERROR, event=LogEvent.ERROR
    )
    call.failed(3, "score", log)
    capfd.readouterr()
    call.event("Exiting because a job execution failed. Look above for error messages", logging.ERROR)
    call.event("WorkflowError:\nAt least one job did not complete successfully.", logging.ERROR, event=LogEvent.ERROR)
    call.handler.close()
    assert capfd.readouterr().err.splitlines() == [
        "failed: score, round 2, shard 1: no key in row 0",
        f"log: {log}",
        "Once that is fixed, the same command continues from here: snakemake --config 'run=a b'",
    ]


def test_a_failure_shows_the_end_of_each_log_and_says_how_much_is_above(tmp_path, capfd) -> None:
    call = Call(tmp_path / "results" / "mini", show_failed_logs=True)
    log, empty, gone = (tmp_path / name for name in ("score.log", "empty.log", "gone.log"))
    log.write_text("".join(f"line {number}\n" for number in range(1, 101)))
    empty.touch()
    call.planned(1)
    call.job(3, "score", log)
    capfd.readouterr()
    fields = {
        "jobid": 3,
        "rule_name": "score",
        "log": [str(empty), str(gone), str(log)],
        "rule_msg": "ended as TIMEOUT",
    }
    call.event("", logging.ERROR, event=LogEvent.JOB_ERROR, **fields)
    told, nothing, unreadable, name, *lines = capfd.readouterr().err.splitlines()
    assert told == "failed: score: ended as TIMEOUT"
    assert nothing == f"log {empty}: nothing is in it"
    assert unreadable == f"log {gone}: cannot be read"
    assert name == f"log {log}, last 20 of 100 lines:"
    assert lines == [f"  line {number}" for number in range(81, 101)]


def test_a_call_that_is_refused_though_no_job_is_left_ends_with_one_sentence(tmp_path, capfd, monkeypatch) -> None:
    call = Call(tmp_path / "results" / "mini")
    monkeypatch.setattr(lost_metadata, "kept", lambda _: "a file was replaced")
    record = logging.makeLogRecord({"msg": "Nothing to be done."})
    with pytest.raises(WorkflowError) as refusal:
        Controller.on_message(SimpleNamespace(workflow=SimpleNamespace(dryrun=False)), record)
    call.event(format_exception_to_string(refusal.value), logging.ERROR, event=LogEvent.ERROR)
    assert capfd.readouterr().err.splitlines()[-1] == "Error: a file was replaced"


OVER_CPU_TIME = "SIGXCPU (over the limit on CPU time; raise it with `ulimit -t unlimited`)"


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("returned non-zero exit status 137.", "killed by SIGKILL"),
        ("died with <Signals.SIGKILL: 9>.", "killed by SIGKILL"),
        ("returned non-zero exit status 152.", f"killed by {OVER_CPU_TIME}"),
        ("returned non-zero exit status 120.", "ended with exit status 120"),
    ],
)
def test_a_failure_without_a_sentence_has_what_ended_its_process(tmp_path, capfd, end, words) -> None:
    """The shell of a stage may have become the stage itself, as where the kernel kills it for its memory."""
    call = Call(tmp_path / "results" / "mini")
    log = tmp_path / "score.log"
    call.planned(1)
    call.job(3, "score", log)
    log.write_text("half way\n")
    command = f"Command 'set -euo pipefail;  rloo score --log={log}' {end}"
    call.event(f'RuleException:\nCalledProcessError in file "r.smk", line 2:\n{command}', logging.ERROR)
    call.failed(3, "score", log)
    call.handler.close()
    out = capfd.readouterr().err
    assert f"failed: score: {words}; the last line of its log is: half way" in out
    assert "RuleException" not in out


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("died with <Signals.SIGXCPU: 24>.", f" Its command was killed by {OVER_CPU_TIME}."),
        ("returned non-zero exit status 135.", " Its command was killed by SIGBUS (/dev/shm or a disk is probably"),
        ("returned non-zero exit status 1.", ""),
    ],
)
def test_the_failure_of_a_slurm_job_says_which_signal_killed_its_command(tmp_path, end, words) -> None:
    """SLURM says only that it failed; Snakemake's process in the job writes the rest into SLURM's log."""
    logs = [tmp_path / name for name in ("score.log", "7.log")]
    logs[0].touch()
    error = f"RuleException:\nCalledProcessError in file \"r.smk\", line 2:\nCommand 'rloo score --log={logs[0]}' {end}"
    logs[1].write_text(f"Building DAG of jobs...\n{error}\nError in rule score:\n    jobid: 0\n")
    reported = "SLURM job 7 (score) ended as FAILED. "
    message = failures.message_of([str(log) for log in logs], reported, 0, {})
    assert message.startswith(f"{reported.strip()}{words}")
    assert ("Its command" in message) == bool(words)


@pytest.mark.parametrize("file", ["rules/common.smk", "Snakefile"])
def test_the_failure_of_a_slurm_job_that_never_ran_its_command_is_what_its_snakemake_says(tmp_path, file) -> None:
    log, sentence = tmp_path / "7.log", "APPTAINER_BINDPATH names /scratch, which node2 does not have; take it out"
    at = f'file "/home/ada/my project/workflow/{file}", line 27'
    log.write_text(f"host: node2\nWorkflowError in {at}:\n{sentence}\n  File {at[5:]}, in <module>\n")
    assert failures.message_of([str(log)], "SLURM job 7 (score) ended as FAILED. ", 0, {}) == sentence


def test_a_job_that_worked_the_second_time_is_not_a_failure(tmp_path, capfd) -> None:
    call = Call(tmp_path / "results" / "mini")
    call.planned(1)
    call.job(3, "score")
    call.failed(3, "score", tmp_path / "none.log", "SLURM job 7 ran out of memory")
    call.event("Trying to restart job 3.")
    call.job(3, "score")
    call.done(3, 1, 1)
    call.handler.close()
    text = capfd.readouterr().err
    assert "failed: score: SLURM job 7 ran out of memory\nTrying to restart job 3.\n" in text
    assert text.splitlines()[-1].startswith("finished in ")


def test_an_interrupted_call_says_how_to_go_on(tmp_path, capfd) -> None:
    call = Call(tmp_path / "results" / "mini")
    call.planned(1)
    call.job(3, "score")
    call.event("Terminating processes on user request, this might take some time.")
    call.failed(3, "score", tmp_path / "none.log")
    call.event(
        "RuleException:\nCalledProcessError in file x, line 30:\nCommand 'rloo score' died with <Signals.SIGINT>"
    )
    call.handler.close()
    lines = capfd.readouterr().err.splitlines()
    assert not any("CalledProcessError" in line for line in lines)
    assert lines[-1] == "Interrupted; the same command continues from here."
    assert not any(line.startswith("failed:") for line in lines)


def test_a_job_that_ended_by_the_signal_that_told_the_call_to_stop_has_not_failed(tmp_path, capfd) -> None:
    """As when SLURM or a service manager sends SIGTERM to all processes."""
    call = Call(tmp_path / "results" / "mini")
    call.planned(2)
    log = tmp_path / "score.log"
    for number, status in ((3, 143), (4, 1)):
        call.job(number, "score")
        call.event("Will exit after finishing currently running jobs (scheduler).")
        error = f"Command 'rloo score --log={log}' returned non-zero exit status {status}."
        call.event(f"RuleException:\nCalledProcessError in file x, line 30:\n{error}", level=logging.ERROR)
        call.failed(number, "score", log)
    call.handler.close()
    lines = capfd.readouterr().err.splitlines()
    assert not any("killed by SIGTERM" in line for line in lines)
    assert any("ended with exit status 1" in line for line in lines)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_call_that_was_told_to_start_no_more_jobs_says_how_to_go_on(tmp_path, capfd, jobs) -> None:
    """Snakemake ends with an error even if all jobs are done by then."""
    call = Call(tmp_path / "results" / "mini")
    call.planned(jobs)
    call.job(3, "score")
    call.event("Will exit after finishing currently running jobs (scheduler).")
    call.done(3, 1, jobs)
    call.event("WorkflowError:\nAt least one job did not complete successfully.", level=logging.ERROR)
    call.handler.close()
    lines = capfd.readouterr().err.splitlines()
    assert not any("WorkflowError" in line for line in lines)
    ending = "finished in " if jobs == 1 else "Stopped before all jobs were done; the same command continues from here."
    assert lines[-1].startswith(ending)


def test_a_locale_without_the_character_of_an_arrow_loses_no_line(tmp_path) -> None:
    with (tmp_path / "output").open("w", encoding="latin-1") as stream:
        display = RunDisplay(stream, dry_run=True, color=True, show_failed_logs=False)
        display.message("rollout.shards: 2 → 1")
    assert (tmp_path / "output").read_text() == "rollout.shards: 2 ? 1\n"


def test_no_color_in_the_environment_takes_colours_away(monkeypatch) -> None:
    """Of a terminal, which gets escape sequences for the cursor all the same."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    master, terminal = pty.openpty()
    with open(terminal, "w") as stream:
        display = RunDisplay(stream, dry_run=False, color=True, show_failed_logs=False)
        display.message("a warning", logging.WARNING)
    assert os.read(master, 100) == b"a warning\r\n"
    os.close(master)


def test_the_display_ends_before_the_call_that_finishes_a_stopped_run(tmp_path, capfd) -> None:
    call = Call(tmp_path / "results" / "mini")
    call.planned(1)
    call.job(3, "gate")
    call.failed(3, "gate", tmp_path / "none.log")
    call.handler.display.give_terminal_back()
    capfd.readouterr()
    call.handler.close()
    assert capfd.readouterr().err == ""


def test_snakemake_gets_a_cache_that_it_can_write_to(tmp_path, monkeypatch) -> None:
    """It ends with a traceback else, as where HOME is over quota."""
    monkeypatch.setattr(sys, "argv", ["snakemake", "-n"])
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    Call(tmp_path)
    assert os.environ["XDG_CACHE_HOME"].startswith(str(scratch.user_folder()))


@pytest.mark.parametrize("settings", [{"plain": True}, {"verbose": True}, {"quiet": {"rules"}}, {"debug_dag": True}])
def test_snakemakes_own_output_is_left_alone_where_it_is_asked_for(settings, tmp_path, capfd) -> None:
    call = Call(tmp_path, **settings)
    call.planned(1)
    call.job(3, "score")
    call.handler.close()
    assert not call.handler.writes_to_stream
    assert capfd.readouterr() == ("", "")


def test_what_cannot_be_shown_is_printed_as_snakemake_has_it(tmp_path, capfd) -> None:
    call = Call(tmp_path / "results" / "mini")
    capfd.readouterr()
    call.event("Job stats: 3", event=LogEvent.RUN_INFO)
    assert "Job stats: 3" in capfd.readouterr().err


BEFORE = {"report": {"title": "A; now: B"}, "rewards": [{"weight": 1.0}], "seed": 1}


def planned(rule: str, *output: str, **reason: Any) -> Any:
    """A job of a dry run that Snakemake has this reason for."""
    why = Reason()
    for name, value in reason.items():
        setattr(why, f"_{name}" if isinstance(value, set) else name, value)
    named = SimpleNamespace(name=rule)
    return SimpleNamespace(rule=named, dag=SimpleNamespace(reason=lambda _: why), log=[], output=output)


def params(before: object, now: object) -> dict[str, ParamsChange]:
    """The reason that parameters have changed."""
    return {"params_changed": ParamsChange(only_old={repr(before)}, only_new={repr(now)})}


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (params(BEFORE, BEFORE | {"report": {"title": "C"}}), "report.title: A; now: B → C"),
        (params(BEFORE, BEFORE | {"rewards": [{"weight": 2.0}]}), "rewards[0].weight: 1.0 → 2.0"),
        (params(BEFORE, BEFORE | {"new": None}), "new: (not set) → null"),
        (
            params({"keep": False, "limits": [0.8, None]}, {"keep": "", "limits": []}),
            'keep: false → "", limits: [0.8, null] → []',
        ),
        (params("abc", "abd"), "the code of the stage, or of your functions, has changed"),
        (params(SimpleNamespace(), 1), "other parameters"),
        (params(["wandb"], ["mlflow"]), "other parameters"),
        (params([{"seed": 1}, {"seed": 2}], [{"seed": 3}, {"seed": 2}]), "seed: 1 → 3"),
        (params([BEFORE, BEFORE], [BEFORE | {"seed": 2}] * 2), "seed: 1 → 2"),
        ({"missing_output": {"results/a", "results/b"}}, "output missing"),
        ({"missing_output": {"a"}, "updated_input": {"b"}, "updated_input_run": {"b"}}, "output missing"),
        ({"updated_input": {"b"}, "updated_input_run": {"b"}}, "depends on a job that runs again"),
        ({"updated_input": {"data.jsonl"}}, "newer input data.jsonl"),
        ({"forced": True, "missing_output": {"a"}}, "asked for by --force, --forceall or --forcerun"),
    ],
)
def test_a_reason_in_words(reason, text) -> None:
    assert dry_run.explain([planned("report", **reason)]) == [f"{text}: 1 job (report)"]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (params("abc", "abd"), True),
        ({"code_changed": True}, True),
        (params("abc", "abd") | {"forced": True}, False),
        (params(BEFORE, BEFORE | {"seed": 2}), False),
        (params(BEFORE, BEFORE | {"new": None}), False),
        ({"missing_output": {"a"}}, False),
    ],
)
def test_a_job_that_runs_for_code_alone_is_told_from_others(reason, expected) -> None:
    assert dry_run.is_by_code(planned("update", **reason).dag.reason(None)) is expected


@pytest.mark.parametrize(
    ("now", "expected"),
    [({"new": None}, True), ({"seed": 2}, False), ({"rewards": [{"weight": 1.0}, {"weight": 0.1}]}, False)],
)
def test_a_key_that_a_version_of_the_package_added_is_no_choice_of_the_user(now, expected) -> None:
    both = ParamsChange(only_old={repr(BEFORE), repr("abc")}, only_new={repr(BEFORE | now), repr("abd")})
    assert dry_run.is_by_code(planned("update", params_changed=both).dag.reason(None)) is expected


def test_files_of_the_run_that_are_newer_may_be_a_copys(tmp_path) -> None:
    def lines(newer: str) -> list[str]:
        return list(dry_run.lines([planned("rollout", updated_input={newer})], [tmp_path]))

    assert any("copied without times, `rloo adopt`" in line for line in lines(f"{tmp_path}/prompts"))
    assert not any("rloo adopt" in line for line in lines("data.jsonl"))


def test_a_dry_run_says_how_to_keep_what_another_version_has_finished(tmp_path) -> None:
    def lines(*sources: str) -> list[str]:
        return list(dry_run.lines([planned("update", **params(*sources))], [tmp_path]))

    assert any("--rerun-triggers mtime input keeps" in line for line in lines("abc", "abd"))
    assert not any("--rerun-triggers" in line for line in lines([1], [2]))


def test_jobs_are_counted_by_their_reason() -> None:
    jobs = [
        planned("report", updated_input_run={"b"}),
        *[planned("score", forced=True)] * 2,
        planned("update_last", forced=True),
    ]
    forced = "asked for by --force, --forceall or --forcerun: 3 jobs (score ×2, update)"
    assert dry_run.explain(jobs) == [forced, "depends on a job that runs again: 1 job (report)"]


def test_a_dry_run_says_why_on_standard_output(tmp_path, capfd) -> None:
    call = Call(tmp_path, dryrun=True, stdout=True)
    call.planned(2)
    call.handler.display.planned_jobs += [planned("update_last", "x", missing_output={"x"}), planned("all")]
    call.event("This was a dry-run (flag -n).")
    call.handler.close()
    out, err = capfd.readouterr()
    assert "1 job would run:\n  output missing: 1 job (update)\n" in out
    assert err == ""


def test_a_log_of_an_earlier_attempt_is_not_quoted(tmp_path) -> None:
    log = tmp_path / "score.log"
    log.write_text("rloo score: error: an old one\n")
    before = {str(log): failures.version_of(str(log))}
    assert failures.message_of([str(log)], None, 0, before) == "ended with an error; it wrote no log"
    assert failures.message_of([str(log)], None, 0, {}) == "an old one"
    log.write_text("\n")
    assert failures.message_of([str(log)], None, 0, before) == "ended with an error; its log is empty"
    log.write_text("half way\n")
    killed = failures.message_of([str(log)], None, 137, before)
    assert killed == "killed by SIGKILL; the last line of its log is: half way"


def test_a_log_from_a_node_whose_clock_is_late_is_quoted(tmp_path, capfd) -> None:
    call, log = Call(tmp_path), tmp_path / "score.log"
    call.job(1, "score", log, round="00001", shard="000")
    log.write_text("rloo score: error: a sentence\n")
    os.utime(log, (time.time() - 30,) * 2)
    call.failed(1, "score", log)
    call.handler.close()
    assert "failed: score, round 1, shard 0: a sentence" in capfd.readouterr().err


def test_a_job_that_could_not_write_its_log_names_the_full_disk(tmp_path, monkeypatch) -> None:
    """Python then ends with the status 120, and no error."""
    monkeypatch.setattr(errors.shutil, "disk_usage", lambda _: SimpleNamespace(free=0, total=1))
    log = tmp_path / "00001.log"
    for text in ("", "loads the mod"):
        log.write_text(text)
        assert failures.message_of([str(log)], None, 120, {}).startswith(f"no space left in {tmp_path}: free some")


FILES = {
    "missing": (None, "no such configuration file"),
    "broken": ("rounds: [2\n", "line 2: not valid YAML"),
    "a list": ("- a\n", "must be a mapping"),
    "empty": ("", "must be a mapping"),
    "a key twice": ("seed: 1\nseed: 2\n", "key 'seed' occurs twice"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("program", ["/usr/bin/snakemake", "/lib/snakemake/__main__.py"])
def test_a_wrong_file_of_configfile_gives_a_one_line_error(name, program, tmp_path) -> None:
    text, sentence = FILES[name]
    file = tmp_path / "my.yaml"
    if text is not None:
        file.write_text(text)
    argv = [program, "-n", "--config", "run=x", "--configfile", str(file), "--cores", "1"]
    with pytest.raises(CliException) as error:
        configfiles.check(argv)
    assert str(file) in str(error.value)
    assert sentence in str(error.value)
    configfiles.check(["/usr/bin/pytest", *argv[1:]])


@pytest.mark.parametrize("folder", ["", "elsewhere"])
def test_a_wrong_file_of_a_project_gives_a_one_line_error_too(folder, tmp_path, monkeypatch) -> None:
    """config/config.yaml, which a project's Snakefile reads where no file is named."""
    monkeypatch.chdir(tmp_path)
    argv = ["snakemake", "--cores", "1", *(["--directory", folder] if folder else [])]
    configfiles.check(argv)
    file = tmp_path / folder / "config" / "config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(FILES["a key twice"][0])
    with pytest.raises(CliException, match=r"config/config\.yaml: key 'seed' occurs twice, in lines 1 and 2"):
        configfiles.check(argv)
    (tmp_path / "mine.yaml").write_text("seed: 1\n")
    configfiles.check([*argv, "--configfile", "mine.yaml"])


@pytest.mark.parametrize("folder", ["file", "file/new"])
def test_a_working_folder_that_is_none_gives_a_one_line_error(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CliException, match=rf"--directory {folder}: \S*file is not a folder that you may use"):
        configfiles.check(["snakemake", "--cores", "1", "--directory", folder])
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(CliException, match=r"--directory link: link is not a folder that you may use"):
        configfiles.check(["snakemake", "--cores", "1", "--directory", "link"])
    configfiles.check(["snakemake", "--cores", "1", "--directory", "new/below"])
    assert not (tmp_path / "new").exists(), "Snakemake makes it"


def test_a_key_of_a_section_gives_a_one_line_error_and_not_a_traceback() -> None:
    with pytest.raises(CliException, match=r"write a key of a section as --config 'update=\{lr: 1\}'"):
        configfiles.check(["snakemake", "-n", "--config", "rounds=2", "update.lr=1"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--config", "rounds=2", "-n", "-C", "a={b: 3}"], "write it once: --config rounds=2 'a={b: 3}'"),
        (["--configfile", "a.yaml", "--configfile", "b.yaml"], "write it once: --configfile a.yaml b.yaml"),
    ],
)
def test_an_option_given_twice_is_refused_where_snakemake_keeps_the_last(options, sentence) -> None:
    with pytest.raises(CliException, match=sentence):
        configfiles.check(["snakemake", *options])


TYPED = ["seed=1", "section={n: 3, t: true, none: null, text: '3', list: [1, 2.5]}", "name=null", "lr=1e-5"]


def test_values_on_the_command_line_mean_what_they_mean_in_a_file() -> None:
    config = {"section": {"other": 1}}
    update_config(config, parse_config(TYPED))
    configfiles.restore_values(config, parse_config(TYPED), TYPED)
    assert config == {
        "seed": 1,
        "section": {"other": 1, "n": 3, "t": True, "none": None, "text": "3", "list": [1, 2.5]},
        "name": None,
        "lr": "1e-5",  # as YAML 1.1 reads it in a file
    }


def test_a_module_with_a_part_of_the_configuration_gets_no_value_of_the_whole() -> None:
    config = {"rounds": 3}
    configfiles.restore_values(config, parse_config(["rounds=9", "seed=1"]), ["rounds=9", "seed=1"])
    assert config == {"rounds": 3}


def test_a_wrong_json_file_gives_a_one_line_error(tmp_path) -> None:
    file = tmp_path / "my.json"
    file.write_text('{\n"a": 1,}')
    with pytest.raises(CliException, match=r"my\.json, line 2: not valid JSON"):
        configfiles.check(["snakemake", "--configfile", str(file)])
    file.write_text('{"a": 1}')
    configfiles.check(["snakemake", "--configfile", str(file)])


def test_lines_of_jobs_are_taken_while_a_display_is_on(capfd, monkeypatch) -> None:
    """Also those of a job that writes to the terminal by itself."""
    monkeypatch.setattr(os, "isatty", lambda number: True)
    lines = list[str]()
    stage_lines = StageLines(lines.append)
    os.write(2, b"a bar 1%\ra bar 99%\nhalf")
    os.system("echo of a child >&2")
    os.write(1, b"the end")
    stage_lines.stop()
    os.write(2, b"afterwards")
    assert lines == ["a bar 99%", "halfof a child", "the end"]
    assert capfd.readouterr() == ("", "afterwards")


def test_no_line_is_lost_when_a_job_has_written_much_just_before_a_display_ends(capfd, monkeypatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda number: True)
    lines = list[str]()
    stage_lines = StageLines(lines.append)
    os.write(1, b"".join(b"%0999d\n" % number for number in range(5000)))
    stage_lines.stop()
    assert len(lines) == 5000
    assert capfd.readouterr() == ("", "")
