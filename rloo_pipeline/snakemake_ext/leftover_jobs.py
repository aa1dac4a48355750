"""Cancels SLURM jobs that a killed controller left in the queue.

The next controller submits the same stages again, and their results replace those of the jobs that were left
(artifacts/fence.py). Those would only keep nodes from it, and one that starts late would make a finished file again.
All jobs of a controller have one name, which is recorded beside the run's lock.
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
    earlier = record.read_text(encoding="utf-8").split() if record.exists() else []
    kept = [name for name in earlier if not _cancelled(name)]
    if names := dict.fromkeys([*kept, *own_names]):
        record.write_text("\n".join(names) + "\n", encoding="utf-8")
    else:
        record.unlink(missing_ok=True)


def _cancelled(name: str) -> bool:
    """Cancels the jobs with a name. Returns False if some may still be in the queue."""
    if shutil.which("squeue") is None:
        return False
    try:
        lines = slurm_commands.run("squeue", "-h", f"--name={name}", "--format=%F %Z")
        # This folder may be a copy of one in which the controller of these jobs goes on.
        jobs = sorted({job for job, _, folder in (line.partition(" ") for line in lines) if Path(folder) == Path.cwd()})
        if jobs:
            slurm_commands.run("scancel", *jobs)
            logger.warning(
                f"Cancelled what an earlier call, which was killed, left in SLURM's queue ({', '.join(jobs)}); its "
                "stages are submitted again."
            )
    except UserError as error:
        logger.warning(f"Jobs of an earlier call may still be in SLURM's queue (scancel --name={name}): {error}.")
        return False
    return True
