"""What the states that SLURM shows mean for the jobs of a run."""

import pytest

from rloo_pipeline.snakemake_ext.slurm_states import (
    BEYOND_LIMITS_FOR,
    FORGOTTEN_AFTER,
    FORGOTTEN_WITHOUT_RECORDS,
    PUT_BACK_WITHIN,
    JobStates,
    Outcome,
)


def outcomes(job: str, *answers: tuple[float, dict[str, str]]) -> list[Outcome]:
    """The outcome of a job after each of SLURM's answers, which come at these seconds."""
    states = JobStates()
    return [states.judge(job, answer, seconds).outcome for seconds, answer in answers]


@pytest.mark.parametrize(
    ("state", "outcome"),
    [
        ("PENDING", Outcome.ACTIVE),
        ("PENDING Resources", Outcome.ACTIVE),
        ("PENDING (null)", Outcome.ACTIVE),
        ("COMPLETED None", Outcome.SUCCEEDED),
        ("FAILED NonZeroExitCode", Outcome.FAILED),
        ("RUNNING", Outcome.ACTIVE),
        ("COMPLETING", Outcome.ACTIVE),
        ("SUSPENDED", Outcome.ACTIVE),
        ("COMPLETED", Outcome.SUCCEEDED),
        ("FAILED", Outcome.FAILED),
        ("TIMEOUT", Outcome.FAILED),
        ("OUT_OF_MEMORY", Outcome.FAILED),
        ("DEADLINE", Outcome.FAILED),
        ("CANCELLED", Outcome.CANCELLED),
        ("CANCELLED by 0", Outcome.CANCELLED),
        ("CANCELLED+", Outcome.CANCELLED),
    ],
)
def test_a_state_says_how_a_job_is(state, outcome) -> None:
    assert outcomes("7", (0, {"7": state, "8": "RUNNING"})) == [outcome]


@pytest.mark.parametrize("state", ["PREEMPTED", "NODE_FAIL", "BOOT_FAIL"])
def test_a_job_that_slurm_requeues_is_active_and_one_that_it_does_not_has_failed(state) -> None:
    requeued = outcomes("7", (0, {"7": state}), (100, {"7": "PENDING"}), (200, {"7": state}), (201, {"7": "COMPLETED"}))
    assert requeued == [Outcome.ACTIVE] * 3 + [Outcome.SUCCEEDED]
    not_requeued = outcomes("7", (0, {"7": state}), (PUT_BACK_WITHIN, {"7": state}))
    assert not_requeued == [Outcome.ACTIVE, Outcome.FAILED]


def test_a_job_that_its_partition_does_not_allow_waits_only_for_a_while() -> None:
    """It may have been submitted as a larger attempt, and the partition may be in the course of a change."""
    stuck, waits = {"7_[3-4]": "PENDING PartitionTimeLimit"}, {"7_[3-4]": "PENDING Priority"}
    late = BEYOND_LIMITS_FOR
    assert outcomes("7_3", (0, stuck), (late, stuck)) == [Outcome.ACTIVE, Outcome.NEVER]
    assert outcomes("7_3", (0, stuck), (10, waits), (late, stuck)) == [Outcome.ACTIVE] * 3
    nodes_down = {"7": "PENDING BadConstraints"}
    assert outcomes("7", (0, nodes_down), (late, nodes_down)) == [Outcome.ACTIVE] * 2


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("QOSMaxWallDurationPerJobLimit", "does not allow"),
        ("AssocMaxCpuPerJobLimit", "does not allow"),
        ("QOSMaxGRESPerJob", "does not allow"),
        ("QOSMinGRES", "does not allow"),
        ("InvalidAccount", "slurm_account"),
        ("QOSNotAllowed", " qos under default-resources"),
    ],
)
def test_a_job_beyond_a_limit_of_jobs_ends_the_run_with_the_reason(reason, words) -> None:
    states = JobStates()
    stuck = {"7": f"PENDING {reason}"}
    assert states.judge("7", stuck, 0).outcome is Outcome.ACTIVE
    verdict = states.judge("7", stuck, BEYOND_LIMITS_FOR)
    assert verdict.outcome is Outcome.NEVER
    assert reason in verdict.message
    assert words in verdict.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("PENDING launch failed requeued held", "scontrol release 7"),
        ("PENDING JobHeldAdmin", "is held by an administrator, who alone can release it (JobHeldAdmin)"),
        ("PENDING JobHeldUser", "is held (JobHeldUser)"),
        ("REQUEUE_HOLD None", "is held (REQUEUE_HOLD)"),
        ("SPECIAL_EXIT None", "is held (SPECIAL_EXIT)"),
        ("PENDING AssocGrpCPUMinutesLimit", "hours are used up"),
        ("PENDING BadConstraints", "sinfo -R"),
        ("PENDING PartitionConfig", "the cluster does not have (PartitionConfig)"),
        ("PENDING ReqNodeNotAvail, UnavailableNodes:n1", "sinfo -R"),
        ("PENDING Priority", ""),
        ("PENDING Resources", ""),
        ("RUNNING None", ""),
    ],
)
def test_why_a_job_waits_for_a_person_is_said_once(text, words) -> None:
    states = JobStates()
    first, second = (states.judge("7", {"7": text}, now) for now in (0, 1e6))
    assert (first.outcome, second.outcome) == (Outcome.ACTIVE, Outcome.ACTIVE)
    assert words in first.message
    assert bool(first.message) == bool(words)
    assert second.message == ""


def test_a_job_beyond_a_limit_has_its_ten_minutes_after_it_has_waited_for_others() -> None:
    states, late = JobStates(), BEYOND_LIMITS_FOR
    waits = [(0.0, "QOSMaxJobsPerUserLimit"), (late, "QOSMaxJobsPerUserLimit"), (late + 1, "PartitionTimeLimit")]
    verdicts = [states.judge("7", {"7": f"PENDING {reason}"}, now) for now, reason in waits]
    assert {verdict.outcome for verdict in verdicts} == {Outcome.ACTIVE}
    assert states.judge("7", {"7": "PENDING PartitionTimeLimit"}, 2 * late + 1).outcome is Outcome.NEVER


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("QOSMaxJobsPerUserLimit", "user, account or QOS end (QOSMaxJobsPerUserLimit); if no others run"),
        ("AssocGrpCpuLimit", "user, account or QOS end (AssocGrpCpuLimit); if no others run"),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", "sinfo -R"),
    ],
)
def test_a_job_that_waits_long_for_others_or_for_nodes_says_so_once(reason, words) -> None:
    """It may exceed a limit of all jobs alone, or a controller's own job may be the only one that the limit allows."""
    states, answer = JobStates(), {"7_[1-2]": f"PENDING {reason}"}
    late = BEYOND_LIMITS_FOR
    verdicts = [states.judge(job, answer, now) for now in (0, late, late + 1) for job in ("7_1", "7_2")]
    assert {verdict.outcome for verdict in verdicts} == {Outcome.ACTIVE}
    said = [verdict.message for verdict in verdicts]
    assert words in said.pop(2)
    assert set(said) == {""}


def test_a_job_that_slurm_no_longer_lists_has_failed_after_a_while() -> None:
    listed, other = {"7": "RUNNING"}, {"8": "RUNNING"}
    late = outcomes(
        "7", (0, other), (FORGOTTEN_AFTER - 1, other), (FORGOTTEN_AFTER, listed), (FORGOTTEN_AFTER + 1, other)
    )
    assert late == [Outcome.ACTIVE] * 4, "an accounting database lags"
    unlisted = outcomes("7", (0, listed), (10, other), (10 + FORGOTTEN_AFTER, other))
    assert unlisted == [Outcome.ACTIVE, Outcome.ACTIVE, Outcome.FAILED]
    states, late = JobStates(), (0, FORGOTTEN_AFTER, FORGOTTEN_WITHOUT_RECORDS)
    without_records = [states.judge("7", other, now, has_records=False).outcome for now in late]
    assert without_records == [Outcome.ACTIVE, Outcome.ACTIVE, Outcome.FAILED], "squeue may have forgotten it"


def test_tasks_of_an_array_have_their_own_states() -> None:
    """Those that wait share a line, and none takes the state of another."""
    answer = {"7_1": "COMPLETED", "7_2": "FAILED", "7_[3-4]": "PENDING", "70_3": "FAILED"}
    assert outcomes("7_1", (0, answer)) == [Outcome.SUCCEEDED]
    assert outcomes("7_2", (0, answer)) == [Outcome.FAILED]
    assert outcomes("7_3", (0, answer), (FORGOTTEN_AFTER, answer)) == [Outcome.ACTIVE] * 2
    assert outcomes("7_3", (0, {"7": "COMPLETED"})) == [Outcome.ACTIVE], "the whole array's line is no task's"


@pytest.mark.parametrize(("state", "resource"), [("TIMEOUT", "runtime"), ("OUT_OF_MEMORY", "mem_mb")])
def test_a_job_that_needs_more_names_the_resource(state, resource) -> None:
    verdict = JobStates().judge("7", {"7": state}, 0.0)
    assert verdict.outcome is Outcome.FAILED
    assert f"ended as {state}; if no retry helps, set {resource} of its rule" in verdict.message
