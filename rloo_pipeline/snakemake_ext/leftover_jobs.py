"""Cancels SLURM jobs that a killed controller left in the queue.

The next controller submits the same stages again, and their results replace those of the jobs that were left
(artifacts/fence.py). Those would only keep nodes from it, and one that starts late would make a finished file again.
All jobs of a controller have one name, which is recorded beside the run's lock, with the folder of the run.
"""

import shutil
from pathlib import Path

from snakemake.logging import logger

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import slurm_commands
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall

own_names: list[str] = []
"""Names of the jobs that this process submits, from its executors."""


def cancel(call: SnakemakeCall) -> None:
    """Cancels what earlier controllers of the run left in the queue, and records the name of this one's jobs. The
    process must hold the run's lock.
    """
    record = Path(".snakemake") / f"rloo-{call.runs.name}.jobs"
    earlier = record.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if record.exists() else []
    kept = [line for line in earlier if not _cancelled(*line.partition(" ")[::2])]
    if lines := dict.fromkeys([*kept, *(f"{name} {Path.cwd()}" for name in own_names)]):
        record.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogateescape")
    else:
        record.unlink(missing_ok=True)


def _cancelled(name: str, folder: str) -> bool:
    """Cancels the jobs with a name that was recorded in a folder. Returns False if some may still be in the queue."""
    if not _is_here(folder):
        return True  # this folder is a copy of one in which the controller of these jobs may go on
    if shutil.which("squeue") is None:
        return False
    try:  # not those that are ending, such as after Ctrl-C
        jobs = sorted({*slurm_commands.run("squeue", "-h", f"--name={name}", "--states=PD,CF,R,S", "--format=%F")})
        if jobs:
            slurm_commands.run("scancel", *jobs)
            logger.warning(
                f"Cancelled jobs that an earlier call left in SLURM's queue ({', '.join(jobs)}); what this call needs "
                "of them is submitted again."
            )
    except UserError as error:
        logger.warning(f"Jobs of an earlier call may still be in SLURM's queue (scancel --name={name}): {error}.")
        return False
    return True


def _is_here(folder: str) -> bool:
    """True if a path leads to the working folder."""
    try:
        return Path(folder).samefile(".")
    except OSError:  # it does not exist on this machine
        return False
