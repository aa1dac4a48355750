"""The executor's own decisions, without SLURM; tests/cluster runs it on one."""

import asyncio
import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Event, Lock
from types import SimpleNamespace

import pytest
import snakemake_executor_plugin_slurm as plugin
import snakemake_executor_plugin_slurm_jobstep as jobstep
from helpers import executable, has_ended
from snakemake.scheduling.job_scheduler import JobScheduler
from snakemake_interface_common.exceptions import WorkflowError

from rloo_pipeline.runtime import slurm_commands
from rloo_pipeline.snakemake_ext import slurm_executor, slurm_job_steps
from rloo_pipeline.snakemake_ext.slurm_executor import Executor
from rloo_pipeline.snakemake_ext.slurm_states import BEYOND_LIMITS_FOR, JobStates


class AtOnce:
    """Makes calls in the thread that submits them."""

    def submit(self, function, *arguments) -> SimpleNamespace:
        function(*arguments)
        return SimpleNamespace(result=lambda: None)


class Jobs(Executor):
    """An executor that has no thread and no SLURM, and records its calls."""

    def __init__(self, answers: list[dict[str, str] | None]) -> None:
        settings = SimpleNamespace(init_seconds_before_status_checks=10, keep_successful_logs=False)
        self.workflow = SimpleNamespace(executor_settings=settings)
        self.logger = SimpleNamespace(error=self.note, warning=self.note, debug=self.note)
        self._states, self._last_end = JobStates(), slurm_executor.time.monotonic()
        self._answers, self.calls = answers, []
        self.array_jobs, self._main_event_loop = {"rollout"}, None
        self._submitting, self._known, self.run_uuid = Lock(), set(), "uuid"
        self._waiting = self._job_submission_executor = AtOnce()

    def note(self, *call: object) -> None:
        self.calls.append(call)

    async def _ask(self) -> tuple[dict[str, str] | None, bool]:
        return self._answers.pop(0), True

    def report_job_success(self, job_info) -> None:
        self.note("success", job_info.external_jobid)

    def report_job_error(self, job_info, msg=None, aux_logs=None) -> None:
        self.note("error", job_info.external_jobid)

    def _submit_job(self, job) -> None:
        self.note("job", job.name)

    def _submit_array_jobs(self, jobs) -> None:
        self.note("array", *(job.name for job in jobs))


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """Seconds as the test sets them."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(slurm_executor, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def job_info(number: str) -> SimpleNamespace:
    job = SimpleNamespace(rule=SimpleNamespace(name="score", restart_times=2))
    return SimpleNamespace(external_jobid=number, aux={}, job=job)


def active(executor: Executor, *jobs: SimpleNamespace) -> list[str]:
    async def ask() -> list[str]:
        return [job.external_jobid async for job in executor.check_active_jobs(list(jobs))]

    return asyncio.run(ask())


def test_slurm_is_asked_again_after_a_tenth_of_the_time_since_a_job_ended(clock) -> None:
    running, completed = {"1": "RUNNING", "2": "RUNNING"}, {"1": "RUNNING", "2": "COMPLETED"}
    executor = Jobs([running, running, running, completed])
    waits = []
    for later in (0, 300, 3000, 0):
        clock.now += later
        active(executor, job_info("1"), job_info("2"))
        waits.append(executor.next_seconds_between_status_checks)
    assert waits == [10, 30, 60, 10]


def test_jobs_that_ended_are_reported_and_the_others_kept(clock) -> None:
    executor = Jobs([{"1": "COMPLETED", "2": "TIMEOUT", "3": "RUNNING"}])
    assert active(executor, *map(job_info, "123")) == ["3"]
    assert executor.calls == [("success", "1"), ("error", "2")]


def test_it_is_said_once_that_slurm_does_not_answer_until_it_has_answered(clock) -> None:
    executor = Jobs([None, None, {"1": "RUNNING"}, None])
    said = []
    for _ in range(4):
        assert active(executor, job_info("1")) == ["1"]
        said.append(len(executor.calls))
    assert said == [1, 1, 1, 2]


def test_a_cancelled_job_is_not_submitted_again(clock) -> None:
    executor, job = Jobs([{"1": "CANCELLED by 1000"}]), job_info("1")
    assert active(executor, job) == []
    assert job.job.rule.restart_times == 0
    assert "SLURM job 1 (score) was cancelled" in executor.calls[0][0]


def test_a_job_that_can_never_start_is_cancelled_and_not_submitted_again(clock, monkeypatch) -> None:
    executor, job = Jobs([{"1": "PENDING PartitionTimeLimit"}] * 2), job_info("1")
    monkeypatch.setattr(executor, "cancel_jobs", lambda jobs: executor.note("scancel", *jobs), raising=False)
    assert active(executor, job) == ["1"]
    clock.now += BEYOND_LIMITS_FOR
    assert active(executor, job) == []
    assert job.job.rule.restart_times == 0
    assert executor.calls[0] == ("scancel", job)
    assert "SLURM job 1 (score) requests what its partition" in executor.calls[1][0]
    assert "(PartitionTimeLimit)" in executor.calls[1][0]


def test_without_an_answer_no_job_has_ended(clock) -> None:
    executor = Jobs([None])
    assert active(executor, job_info("1"), job_info("2")) == ["1", "2"]
    assert len(executor.calls) == 1


def test_all_jobs_that_are_ready_are_submitted(monkeypatch) -> None:
    """Those of one rule as an array, also where more of them will follow."""
    executor = Jobs([])
    monkeypatch.setattr(
        slurm_executor.plugin.Executor, "run_jobs", lambda _, jobs: [executor._submit_job(job) for job in jobs]
    )

    def ready(rule: str, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, rule=SimpleNamespace(name=rule), is_group=lambda: False)

    executor.run_jobs([ready("rollout", "a"), ready("update", "b"), ready("rollout", "c")])
    executor.run_jobs([ready("rollout", "d")])
    assert executor.calls == [("job", "b"), ("array", "a", "c"), ("job", "d")]


@pytest.mark.parametrize("answer", ["Unable to contact slurm controller (connect failure)", "Socket timed out on recv"])
def test_a_job_is_submitted_until_slurms_controller_answers(monkeypatch, tmp_path, answer) -> None:
    """None counts as failed, so none requests the resources of a second attempt. What SLURM took is cancelled."""
    executor, waits = Jobs([]), []
    clock = SimpleNamespace(monotonic=slurm_executor.time.monotonic, sleep=lambda seconds: waits.append(round(seconds)))
    monkeypatch.setattr(slurm_executor, "time", clock)  # of this module alone, since subprocess sleeps too
    executor.slurm_logdir, executor.format_job_exec = tmp_path, lambda job: "true"
    executor.logger.info = executor.note
    monkeypatch.setattr(Executor, "report_job_submission", lambda self, info: self.note(info.external_jobid))
    asked = tmp_path / "asked"
    executable(tmp_path, "squeue", f'echo "$2" >>{asked}; [ $(wc -l <{asked}) != 1 ] && printf "%s\\n" 5 6 6')
    executable(tmp_path, "scancel", f'echo "$*" >>{tmp_path}/cancelled')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    executor._known = {"5"}
    (tmp_path / "times").write_text("")
    fails_twice = f"echo >>{tmp_path}/times; [ $(wc -l <{tmp_path}/times) = 3 ]"
    sbatch = f"{fails_twice} && echo 7 || {{ echo '{answer}' >&2; false; }} #"
    executor._submit_array(sbatch, [SimpleNamespace(name="rollout", jobid=index) for index in range(2)])
    assert executor.calls[-2:] == [("7_1",), ("7_2",)]
    assert waits == [10, 10, 10], "two times without an answer of sbatch, and one of squeue"
    assert asked.read_text() == 3 * "--name=uuid\n"
    assert (tmp_path / "cancelled").read_text() == "6\n6\n"
    assert executor._known == {"5", "7"}

    monkeypatch.setattr(slurm_executor.plugin.Executor, "run_job", lambda self, job: self.note("submitted", job))
    executor._report_job_error_threadsafe(SimpleNamespace(job="update"), f"SLURM sbatch failed: '{answer}'")
    assert executor.calls[-1] == ("submitted", "update")
    executor._report_job_error_threadsafe(SimpleNamespace(job="update", external_jobid=None), "Invalid partition")
    assert executor.calls[-1] == ("error", None)


FAILED = "SLURM sbatch failed. The error message was '{}'.\n    sbatch call:\n        sbatch --wrap='a long command'\n"


def test_a_job_that_slurm_refuses_ends_the_run_with_slurms_sentence(monkeypatch) -> None:
    """The resources of a second attempt would be refused too."""
    executor, job = Jobs([]), job_info("none")
    monkeypatch.setattr(plugin.Executor, "_report_job_error_threadsafe", lambda self, _, msg: self.note(msg))
    refusal = "sbatch: error: Do not use --mem here\nsbatch: error: Batch job submission failed: user's limits"
    executor._report_job_error_threadsafe(job, FAILED.format(refusal))
    assert job.job.rule.restart_times == 0
    [(message,)] = executor.calls
    assert message.startswith(
        "SLURM refuses the job: Do not use --mem here Batch job submission failed: user's limits; set the resources"
    )
    assert "command" not in message

    job = SimpleNamespace(name="score", rule=SimpleNamespace(restart_times=2))
    with pytest.raises(WorkflowError) as error:
        plugin.validate_slurm_extra(SimpleNamespace(resources=SimpleNamespace(slurm_extra="--mem=0")))
    executor._submission_failed([job], error.value)
    assert job.rule.restart_times == 0
    assert executor.calls[-1][0].startswith("SLURM refuses the job: The --mem")


@pytest.mark.parametrize(
    ("error", "again"),
    [
        ("Slurm temporarily unable to accept job, sleeping and retrying", True),
        ("Batch job submission failed: Zero Bytes were transmitted or received", True),
        ("Batch job submission failed: Slurm backup controller in standby mode", True),
        ("Batch job submission failed: Protocol authentication error", False),
    ],
)
def test_an_error_that_does_not_last_is_no_refusal(monkeypatch, error, again) -> None:
    executor, job = Jobs([]), job_info("none")
    monkeypatch.setattr(executor, "_later", lambda *_: None)
    monkeypatch.setattr(plugin.Executor, "_report_job_error_threadsafe", lambda self, _, msg: self.note(msg))
    before = vars(job.job.rule).copy()
    executor._report_job_error_threadsafe(job, FAILED.format(f"sbatch: error: {error}"))
    assert vars(job.job.rule) == before
    [(message,)] = executor.calls
    assert ("submitting again" in message) == again


def test_jobs_wait_while_the_queue_takes_no_more_of_them(monkeypatch, tmp_path) -> None:
    """An array with more tasks than the limit would wait forever, so it is submitted in parts."""
    executor = Jobs([])
    monkeypatch.setattr(slurm_executor.time, "sleep", lambda _: None)
    monkeypatch.setattr(slurm_executor.plugin.Executor, "run_job", lambda self, job: self.note("job", job.name))
    monkeypatch.setattr(Executor, "report_job_submission", lambda self, info: self.note(info.external_jobid))
    executor.slurm_logdir, executor.format_job_exec = tmp_path, lambda job: "true"
    executor.logger.info = lambda _: None
    full = "sbatch: error: QOSMaxSubmitJobPerUserLimit"
    sbatch = f"sh -c 'case $* in *1-2*) echo 7;; *) echo {full} >&2; false;; esac' sh"
    executor._submit_array(sbatch, [SimpleNamespace(name=name, jobid=name) for name in "abcd"])
    *submitted, (warning,), third, fourth = executor.calls
    assert submitted == [("7_1",), ("7_2",)], "at once, without a wait"
    assert "no more jobs of yours for now (QOSMaxSubmitJobPerUserLimit)" in warning
    assert (third, fourth) == (("7_1",), ("7_2",))

    executor._report_job_error_threadsafe(SimpleNamespace(job=SimpleNamespace(name="d")), FAILED.format(full))
    assert executor.calls[-1] == ("job", "d")
    assert len(executor.calls) == 6, "the warning comes once"


def test_a_job_that_waits_for_a_full_queue_holds_up_no_other(monkeypatch) -> None:
    """The other one may be of an account whose queue has room."""
    executor, go_on = Jobs([]), Event()
    executor._waiting, executor._job_submission_executor = ThreadPoolExecutor(1), ThreadPoolExecutor(2)
    monkeypatch.setattr(slurm_executor.time, "sleep", lambda _: go_on.wait(2))

    def run_job(self, job) -> None:
        info = SimpleNamespace(job=job, external_jobid="1")
        if job.name == "full" and not go_on.is_set():
            self._report_job_error_threadsafe(info, FAILED.format("sbatch: error: AssocGrpSubmitJobsLimit"))
        else:
            self.note(job.name)

    monkeypatch.setattr(plugin.Executor, "run_job", run_job)
    for name in ("full", "other"):
        executor.run_job(SimpleNamespace(name=name))
    assert executor.calls[1:] == [("other",)]
    go_on.set()
    executor._waiting.shutdown()
    assert executor.calls[1:] == [("other",), ("full",)]


@pytest.mark.parametrize(("account", "option"), [(None, ""), (1234, " -A 1234"), ("a&b, other", " -A 'a&b'")])
def test_the_account_is_that_of_the_profile_or_left_to_sbatch(monkeypatch, account, option) -> None:
    """Some clusters have no sacct, by which the plugin would guess it."""
    monkeypatch.setenv("PATH", "")
    job = SimpleNamespace(resources={} if account is None else {"slurm_account": account})
    assert next(Jobs([]).get_account_arg(job)) == option


def test_without_sbatch_no_job_is_tried(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(WorkflowError, match="no sbatch on the PATH: run this where SLURM's commands are installed"):
        Executor(None, None)


def test_the_plugins_calls_of_slurms_commands_do_not_see_what_the_users_shell_sets_for_them(
    monkeypatch, tmp_path
) -> None:
    executable(tmp_path, "sbatch", "")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(
        os, "environ", os.environ | {"SQUEUE_USERS": "me", "SCANCEL_STATE": "PENDING", "SACCT_LOCAL": ""}
    )
    seen = []
    monkeypatch.setattr(plugin.Executor, "__init__", lambda *_: seen.extend(os.environ))
    monkeypatch.setattr(plugin.Executor, "run_uuid", "uuid", raising=False)
    Executor(None, None)
    assert [name for name in seen if name.startswith(("SQUEUE", "SCANCEL", "SACCT"))] == []


def test_in_a_job_the_name_of_the_clusters_configuration_stays(monkeypatch, tmp_path) -> None:
    """The controller's job submits others, and a job's own step is started with srun."""
    executable(tmp_path, "sbatch", "")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ |= dict.fromkeys(("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOB_ACCOUNT", "SLURM_MEM_PER_NODE"), "x")
    os.environ.pop("SBATCH_ACCOUNT", None)
    seen = []
    monkeypatch.setattr(plugin.Executor, "__init__", lambda *_: seen.append({**os.environ}))
    monkeypatch.setattr(plugin.Executor, "run_uuid", "uuid", raising=False)
    Executor(None, None)
    assert [name for name in seen[0] if name.startswith("SLURM_")] == ["SLURM_CONF"]
    assert seen[0]["SBATCH_ACCOUNT"] == "x"

    monkeypatch.setattr(jobstep, "subprocess", jobstep.subprocess)
    slurm_job_steps.keep_slurm_conf(None)
    started = jobstep.subprocess.Popen("echo $SLURM_CONF", shell=True, env={}, stdout=jobstep.subprocess.PIPE)
    assert started.communicate()[0] == b"x\n"


@pytest.mark.parametrize(
    ("state", "killed", "preempted", "restarts", "requeued"),
    [
        ("RUNNING", "graceful", "None", 1, True),
        ("RUNNING", "graceful", "None", slurm_job_steps.MOST_RESTARTS, False),
        ("COMPLETING", "graceful", "None", 1, False),
        ("RUNNING", None, "None", 1, False),
        ("RUNNING", None, "2026-01-01T00:00:00", 1, True),
        ("COMPLETING", None, "2026-01-01T00:00:00", 1, False),
    ],
)
def test_a_job_whose_stage_ends_in_the_grace_time_of_a_preemption_is_put_back(
    monkeypatch, tmp_path, state, killed, preempted, restarts, requeued
) -> None:
    """Also if SIGTERM ended only its ranks, on several nodes.

    Not one that is cancelled, out of time, whose stage fails, or that something ends each time.
    """
    executable(tmp_path, "squeue", f"echo '7|{state}|node1|1:00'")
    executable(tmp_path, "scontrol", f'echo "$*" >>{tmp_path}/asked; echo "JobId=7 PreemptTime={preempted}"')
    environment = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    environment |= {"SLURM_RESTART_COUNT": str(restarts), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(slurm_job_steps.time, "sleep", lambda _: None)
    monkeypatch.setattr(JobScheduler, "schedule", lambda _: False)
    slurm_job_steps.requeue_preempted(SimpleNamespace(main=False))
    assert JobScheduler.schedule(SimpleNamespace(_user_kill=killed)) is False
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    assert ("requeue 5_2" in asked) == requeued


def test_an_interrupt_also_cancels_a_job_that_is_being_submitted(monkeypatch, tmp_path) -> None:
    """It is in the queue when sbatch ends, and Snakemake no longer hears of it."""
    executor, ended = Jobs([]), tmp_path / "ended"
    executor.run_uuid, executor._job_submission_executor = "uuid", ThreadPoolExecutor(1)
    for command in (f"sleep 0.5; echo submitted >>{ended}", f"echo submitted again >>{ended}"):
        executor._job_submission_executor.submit(slurm_executor.subprocess.run, command, shell=True, check=True)
    monkeypatch.setattr(
        slurm_executor.plugin.Executor, "cancel", lambda self: self._job_submission_executor.shutdown(), raising=False
    )
    executable(tmp_path, "scancel", f'echo "$*" >>{ended}')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    executor.cancel()
    assert ended.read_text().splitlines() == ["submitted", "--name=uuid"]


@pytest.mark.parametrize(("seconds", "program"), [(300, "squeue"), (120, "sacct"), (None, "sacct")])
def test_squeue_is_asked_if_it_shows_ended_jobs_for_longer_than_the_longest_wait(monkeypatch, seconds, program) -> None:
    """Else a job that has completed between two questions would count as lost. SLURM is asked until it answers."""
    asked = []
    executor = Jobs([])
    monkeypatch.setattr(slurm_executor.Executor, "get_status_command", lambda _: "squeue")
    monkeypatch.setattr(slurm_executor.shutil, "which", lambda _: "/usr/bin/sacct")
    monkeypatch.setattr(slurm_executor.job_status_query, "get_min_job_age", lambda: asked.append(1) or seconds)
    assert [executor._status_program() for _ in range(3)] == [program] * 3
    assert len(asked) == (1 if seconds else 3)


def test_squeue_is_asked_while_sacct_does_not_answer(monkeypatch, tmp_path) -> None:
    """Else a run would wait forever on a cluster that keeps no records and soon forgets ended jobs."""
    executor = Jobs([])
    executor.status_rate_limiter = nullcontext()
    executable(tmp_path, "sacct", "echo Slurm accounting storage is disabled >&2; false")
    executable(tmp_path, "squeue", "echo '7|COMPLETED None'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(executor, "_status_program", lambda: "sacct")
    assert asyncio.run(Executor._ask(executor)) == ({"7": "COMPLETED None"}, False)


def test_a_command_of_slurm_that_hangs_is_ended_and_said_once(monkeypatch, tmp_path) -> None:
    """The run goes on, with no more of them at each question."""
    executor, lines = Jobs([]), list[str]()
    executor.logger = SimpleNamespace(warning=lines.append, debug=lambda _: None)
    executor.status_rate_limiter = nullcontext()
    (tmp_path / "began").touch()
    executable(tmp_path, "squeue", f"echo $$ >>{tmp_path}/began; exec sleep 600")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(slurm_commands, "PATIENCE", 1.0)
    monkeypatch.setattr(executor, "_status_program", lambda: "squeue")
    monkeypatch.setattr(executor, "_ask", lambda: Executor._ask(executor))
    assert active(executor, job_info("7")) == active(executor, job_info("7")) == ["7"]
    [line] = lines
    assert line.startswith("SLURM does not answer")
    assert all(has_ended(int(number)) for number in (tmp_path / "began").read_text().split())


def test_a_login_node_that_can_start_no_more_processes_does_not_end_the_run(monkeypatch, tmp_path) -> None:
    """An error in the thread that asks would. Nor do letters that are not UTF-8, such as in the reason of a job."""
    executor = Jobs([])
    executor.status_rate_limiter = nullcontext()
    executable(tmp_path, "squeue", "printf '7|RUNNING \\344\\n'")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(executor, "get_status_command", lambda: "squeue")
    assert asyncio.run(Executor._ask(executor)) == ({"7": "RUNNING \ufffd"}, True)

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(slurm_executor.subprocess, "Popen", refuse)
    assert asyncio.run(Executor._ask(executor)) == (None, False)


@pytest.mark.parametrize(
    ("sacct", "states"),
    [
        ("", {"7_1": "RUNNING None", "7_2": "PENDING QOSMaxGRESPerUser"}),
        ("6|COMPLETED\n7_1|PENDING", {"6": "COMPLETED", "7_1": "RUNNING None", "7_2": "PENDING QOSMaxGRESPerUser"}),
    ],
)
def test_jobs_in_the_queue_are_as_squeue_shows_them_and_others_as_sacct_does(
    monkeypatch, tmp_path, sacct, states
) -> None:
    """While SLURM's database lags, a job that runs would count as lost, and a second one would do its work."""
    executor = Jobs([])
    executor.status_rate_limiter = nullcontext()
    executable(tmp_path, "sacct", f"printf '{sacct}'")
    executable(tmp_path, "squeue", "printf '7_1|RUNNING None\n7_2|PENDING QOSMaxGRESPerUser\n'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(executor, "_status_program", lambda: "sacct")
    assert asyncio.run(Executor._ask(executor)) == (states, True)


@pytest.mark.parametrize(
    ("printed", "number"),
    [("7\\n", "7"), ("7;cluster\\n", "7"), ("Welcome to the cluster\\nSubmitted job 7\\n", "7"), ("none\\n", None)],
)
def test_the_number_of_an_array_is_found_in_what_sbatch_prints(tmp_path, printed, number) -> None:
    """A site may print more than `--parsable` asks for."""
    executor = Jobs([])
    executor.slurm_logdir, executor.format_job_exec = tmp_path, lambda job: "true"
    executor.logger.info = executor.note
    jobs = [SimpleNamespace(name="rollout", jobid=index) for index in range(2)]
    sbatch = f"printf '{printed}' #"
    if number is None:
        with pytest.raises(WorkflowError, match="No valid SLURM job ID"):
            slurm_executor.submit_array(executor, sbatch, jobs)
        return
    assert [job.external_jobid for job in slurm_executor.submit_array(executor, sbatch, jobs)] == [
        f"{number}_1",
        f"{number}_2",
    ]


def test_each_task_of_an_array_runs_its_own_command() -> None:
    lines = list(slurm_executor.script(["first 'one'", "second"]))
    assert lines == [
        "#!/bin/sh",
        "case $SLURM_ARRAY_TASK_ID in",
        "1)",
        "first 'one'",
        ";;",
        "2)",
        "second",
        ";;",
        "esac",
    ]


def test_snakemake_starts_without_pandas_and_a_report_of_efficiency_has_it() -> None:
    code = """if True:
        import sys, snakemake_executor_plugin_rloo_slurm
        assert "pandas" not in sys.modules
        from snakemake_executor_plugin_slurm import efficiency_report
        assert efficiency_report.pd.isna(None)
    """
    subprocess.run([sys.executable, "-c", code], check=True)
