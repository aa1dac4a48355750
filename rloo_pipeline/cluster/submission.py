"""`rloo submit`, `rloo status` and `rloo cancel`: a whole run, or its controller, as one SLURM job.

submitit submits the job, which runs `allocation.work`. The run's folder has a record of the job in logs/submit/, with
submitit's files and the job's log.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rloo_pipeline.artifacts import files
from rloo_pipeline.cluster import allocation, slurm
from rloo_pipeline.config.loading import load
from rloo_pipeline.errors import UserError

FOLDER = Path("logs/submit")
RECORD = "job.json"
DEFAULTS = ("account", "partition", "qos", "constraint", "reservation")
"""Options of sbatch for which users set variables such as SBATCH_ACCOUNT."""

ENDINGS = {
    "CANCELLED": "was cancelled",
    "TIMEOUT": "ran out of time before it could requeue itself",
    "OUT_OF_MEMORY": "ran out of memory (`--sbatch mem=…` asks for more)",
}
"""Words for a job that ended before it could record an outcome, by SLURM's state."""


class Resources(NamedTuple):
    """Options of sbatch."""

    time: str
    nodes: int
    gpus_per_node: int
    cpus_per_node: int
    sbatch: dict[str, Any]
    """Other options by name, without dashes; True for options without a value."""


def refuse_second(run: str, folder: Path) -> None:
    """Refuses to submit a run or experiment whose job is still in the queue.

    Args:
        run: name of the run or experiment.
        folder: folder with the record of the job.

    Raises:
        UserError: a job of this run is already waiting or running, or SLURM does not answer.
    """
    record = _read_record(folder)
    running = slurm.job(record["job"]) if record else None
    if record and running:
        raise UserError(
            f"{run}: job {record['job']} is already in the queue ({running.state}); `rloo cancel {run}` ends it"
        )


def defaults() -> dict[str, str]:
    """Options of sbatch from the user's variables, by name. submitit hides the variables from sbatch, where they would
    also override what `--sbatch` says.
    """
    return {name: value for name in DEFAULTS if (value := os.environ.get(f"SBATCH_{name.upper()}"))}


def submit(run: str, plan: allocation.Plan, resources: Resources) -> str:
    """Submits a run or experiment by name. Returns the id of the job.

    Raises:
        UserError: SLURM is missing or refuses the job.
    """
    import submitit

    folder = plan.folder
    if "\n" in str(folder):  # a line break would add lines, and thus sbatch options, to the script
        raise UserError(f"{str(folder)!r}: the folder's name has a line break; rename it")
    try:
        executor = submitit.SlurmExecutor(folder=folder)
    except RuntimeError:
        raise UserError("no srun on the PATH: run this where SLURM's commands are installed") from None
    cluster = {name: value for name, value in os.environ.items() if name == "SLURM_CONF"}
    options = {"time": resources.time, "requeue": True, **defaults(), **resources.sbatch}
    if resources.gpus_per_node:
        options.setdefault("gres", f"gpu:{resources.gpus_per_node}")
    # SIGCONT is harmless, whereas submitit's default signal before the time limit would kill stages
    options["signal"] = "CONT"
    executor.update_parameters(
        job_name=f"rloo-{run}",
        nodes=resources.nodes,
        ntasks_per_node=1,
        cpus_per_task=resources.cpus_per_node,
        use_srun=False,
        stderr_to_stdout=True,
        additional_parameters=options,
    )
    (folder / allocation.OUTCOME).unlink(missing_ok=True)
    try:
        with submitit.helpers.clean_env():  # in case this process itself runs in a job
            os.environ |= cluster
            job = executor.submit(allocation.work, plan)
    except submitit.core.utils.FailedJobError as error:
        reason = " ".join((str(error) or str(error.__cause__)).split())
        raise UserError(f"SLURM refuses the job: {reason[-300:]}") from None
    files.write_json(folder / RECORD, {"job": job.job_id, "controller": plan.controller, "log": str(job.paths.stdout)})
    return str(job.job_id)


def status(run: Path) -> Iterator[str]:
    """Yields lines about a submitted run: its job, its finished rounds, its log.

    Raises:
        UserError: it was not submitted, or SLURM does not answer.
    """
    record = _record(run)
    outcome = run / FOLDER / allocation.OUTCOME
    ended = files.read_json(outcome) if outcome.exists() else {}
    job = slurm.job(record["job"])
    if job is not None:
        place = f"on {job.reason}, {job.time_left} left" if job.state == "RUNNING" else job.reason
        yield f"{run.name}: job {record['job']} {job.state} ({place}), allocation {job.restarts + 1}"
    elif ended.get("job") == record["job"] and ended["outcome"] != "requeued":
        count = ended["allocations"]
        yield f"{run.name}: {ended['outcome']} in allocation {count} of job {record['job']}: {ended['why']}"
    else:
        how = slurm.ending(record["job"])
        ended_as = ENDINGS.get(how, f"ended as {how}") if how else "has ended, and SLURM no longer knows how"
        yield f"{run.name}: job {record['job']} {ended_as}; `rloo submit` continues the run"
    done = [file for pattern in ("rounds", "*/*/rounds") for file in run.glob(f"{pattern}/*/metrics.json")]
    yield f"rounds done: {len(done)} of {_rounds(run)}"
    yield f"log: {record['log']}"


def may_be_queued(run: Path) -> bool:
    """True if a run was submitted, and its job is waiting or running, or SLURM does not answer."""
    record = _read_record(run / FOLDER)
    return record is not None and slurm.may_be_queued(record["job"])


def cancel(run: Path, patience: float = 90.0) -> str:
    """Cancels a submitted run. A controller first cancels the jobs of its stages.

    Args:
        run: folder of the run.
        patience: seconds that a controller gets to cancel its jobs.

    Returns:
        A line for the user.

    Raises:
        UserError: it was not submitted, or SLURM does not answer.
    """
    record = _record(run)
    number = record["job"]
    job = slurm.job(number)
    if job is None:
        return f"{run.name}: job {number} has already ended"
    if record["controller"] and job.state == "RUNNING":
        (run / FOLDER / allocation.STOP).touch()
        deadline = time.monotonic() + patience
        while slurm.job(number) and time.monotonic() < deadline:
            time.sleep(1)
    if job := slurm.job(number):
        slurm.cancel(number)
        allocation.record(run / FOLDER, "cancelled", job.restarts + 1, number, allocation.CANCELLED)
    return f"{run.name}: job {number} was cancelled; {allocation.CANCELLED}"


def _read_record(folder: Path) -> dict[str, Any] | None:
    path = folder / RECORD
    return files.read_json(path) if path.exists() else None


def _record(run: Path) -> dict[str, Any]:
    record = _read_record(run / FOLDER)
    if record is None:
        raise UserError(f"{run}: nothing was submitted from here; submit it with `rloo submit`")
    return record


def _rounds(run: Path) -> str:
    """The number of rounds of a run, or of all runs of an experiment, according to config.yaml; `?` if there is none
    yet.
    """
    paths = [run / "config.yaml"] if (run / "config.yaml").exists() else run.glob("*/*/config.yaml")
    rounds = [load(path).rounds for path in paths if path.parents[1].name != "shared"]
    return str(sum(rounds)) if rounds else "?"
