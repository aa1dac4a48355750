"""`rloo submit`, `rloo status` and `rloo cancel`: a whole run, or its controller, as one job of SLURM.

The job is made by submitit and works as `allocation.py` says. What was submitted is noted in the run's folder, under
logs/submit/, beside submitit's files and the job's own words.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rloo_pipeline.artifacts import files
from rloo_pipeline.cluster import allocation, slurm
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError

FOLDER = Path("logs/submit")
NOTE = "job.json"


class Request(NamedTuple):
    """What is asked of SLURM."""

    time: str
    nodes: int
    gpus_per_node: int
    cpus_per_node: int
    sbatch: dict[str, Any]
    """Further options of sbatch by name, without dashes; True for those without a value."""


def submit(config: Config, plan: allocation.Plan, request: Request) -> str:
    """Puts a run into the queue; returns the job's id.

    Raises:
        UserError: a job of this run waits or runs already, there is no SLURM, or SLURM refuses.
    """
    folder = plan.folder
    known = _note(folder)
    at_it = slurm.job(known["job"]) if known else None
    if known and at_it:
        raise UserError(
            f"{config.run}: job {known['job']} is at it already ({at_it.state}); `rloo cancel {config.run}` ends it"
        )
    import submitit

    try:
        executor = submitit.SlurmExecutor(folder=folder)
    except RuntimeError:
        raise UserError("no srun on the PATH: call this where SLURM's commands are") from None
    options = {"time": request.time, "requeue": True, **request.sbatch}
    if request.gpus_per_node:
        options.setdefault("gres", f"gpu:{request.gpus_per_node}")
    # submitit's own signal before the end would kill stages; this one does nothing
    options["signal"] = "CONT"
    executor.update_parameters(
        job_name=f"rloo-{config.run}",
        nodes=request.nodes,
        ntasks_per_node=1,
        cpus_per_task=request.cpus_per_node,
        use_srun=False,
        stderr_to_stdout=True,
        additional_parameters=options,
    )
    (folder / allocation.OUTCOME).unlink(missing_ok=True)
    try:
        with submitit.helpers.clean_env():  # where this is a job itself
            job = executor.submit(allocation.work, plan)
    except submitit.core.utils.FailedJobError as error:
        words = " ".join(str(error.__cause__ or error).split())
        raise UserError(f"SLURM refuses the job: {words[-300:]}") from None
    files.write_json(folder / NOTE, {"job": job.job_id, "controller": plan.controller, "log": str(job.paths.stdout)})
    return str(job.job_id)


def status(run: Path) -> Iterator[str]:
    """Lines on a submitted run: its job, how far it is, where its words are.

    Raises:
        UserError: it was not submitted, or SLURM does not answer.
    """
    known = _known(run)
    outcome = run / FOLDER / allocation.OUTCOME
    ended = files.read_json(outcome) if outcome.exists() else {}
    job = slurm.job(known["job"])
    if job is not None:
        place = f"on {job.reason}, {job.left} left" if job.state == "RUNNING" else job.reason
        yield f"{run.name}: job {known['job']} {job.state} ({place}), allocation {job.restarts + 1}"
    elif ended.get("job") == known["job"] and ended["outcome"] != "requeued":
        count = ended["allocations"]
        yield f"{run.name}: {ended['outcome']} in allocation {count} of job {known['job']}: {ended['why']}"
    else:
        yield f"{run.name}: job {known['job']} is gone without a word; submit it again to go on"
    yield f"rounds done: {len(list(run.glob('rounds/*/metrics.json')))} of {_rounds(run)}"
    yield f"log: {known['log']}"


def cancel(run: Path, patience: float = 90.0) -> str:
    """Ends a submitted run; a controller first cancels the jobs of its stages. Returns a line about it.

    Raises:
        UserError: it was not submitted, or SLURM does not answer.
    """
    known = _known(run)
    number = known["job"]
    job = slurm.job(number)
    if job is None:
        return f"{run.name}: job {number} has ended already"
    if known["controller"] and job.state == "RUNNING":
        (run / FOLDER / allocation.STOP).touch()
        deadline = time.monotonic() + patience
        while slurm.job(number) and time.monotonic() < deadline:
            time.sleep(1)
    if slurm.job(number):
        slurm.cancel(number)
    return f"{run.name}: job {number} is cancelled; what was finished stays, `rloo submit` goes on from there"


def _note(folder: Path) -> dict[str, Any] | None:
    path = folder / NOTE
    return files.read_json(path) if path.exists() else None


def _known(run: Path) -> dict[str, Any]:
    note = _note(run / FOLDER)
    if note is None:
        raise UserError(f"{run}: nothing was submitted from here; `rloo submit` does it")
    return note


def _rounds(run: Path) -> str:
    """The number of rounds that the run is to have, as far as it is known."""
    import yaml

    path = run / "config.yaml"
    return str(yaml.safe_load(path.read_text())["rounds"]) if path.exists() else "?"
