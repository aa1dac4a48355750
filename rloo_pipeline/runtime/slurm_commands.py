"""Calls SLURM's commands, whatever the user's shell sets for them."""

import os
import re
import subprocess
from typing import Any

from rloo_pipeline.errors import UserError

OF_SHELL = re.compile("(?:SQUEUE|SCANCEL|SACCT|SINFO|SCONTROL)_(?!(?:ALL|FEDERATION)$)")
"""Variables with which a user's shell changes what these commands print or do, such as SQUEUE_STATES, or
SCANCEL_INTERACTIVE, which makes scancel ask. SQUEUE_ALL and SQUEUE_FEDERATION stay: without them, jobs in hidden
partitions, or on other clusters of a federation, would be missing.
"""

PATIENCE = 60.0
"""Seconds after which a command that does not answer is ended."""
NO_ANSWER = re.compile(
    "Unable to contact slurm controller|Socket timed out|temporarily un(?:able|available)|Zero Bytes were transmitted|"
    "Unexpected message received|in standby mode|Connection refused|not connected|Message (?:receive|send) failure|"
    "[Cc]onnection failure"
)
"""sbatch errors while SLURM's controller is restarting or overloaded, or has as many jobs as it can keep."""
QUEUE_FULL = re.compile(r"(?:QOS|Assoc)(?:Max|Grp)Submit\w+")
"""sbatch errors while the user, account or QOS has as many jobs in the queue as SLURM allows."""


class UnansweredError(UserError):
    """SLURM has not judged what it was asked, but may later."""


def account(resources: Any) -> str:
    """The account that a job's resources name (the first of several); empty if they name none."""
    return (str(resources.get("slurm_account") or "").replace(",", " ").split() or [""])[0]


def run(*command: str, ignored_error: str = "\0", **environment: str) -> list[str]:
    """Output lines of a SLURM command; none if its error contains `ignored_error`.

    Raises:
        UserError: the command is missing, or SLURM refuses; UnansweredError if it may take the same command later.
    """
    environment = {name: value for name, value in os.environ.items() if not OF_SHELL.match(name)} | environment
    try:
        outcome = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=PATIENCE,
        )
    except FileNotFoundError:
        raise UserError(f"no {command[0]} on the PATH: run this where SLURM's commands are installed") from None
    except OSError as error:  # such as too many processes on a login node
        raise UnansweredError(f"`{' '.join(command)}` cannot be started ({error.strerror}); try again later") from error
    except subprocess.TimeoutExpired:
        raise UnansweredError(f"`{' '.join(command)}` gave no answer for {PATIENCE:.0f} s; try again later") from None
    if outcome.returncode and ignored_error not in outcome.stderr:
        reason = " ".join(outcome.stderr.split()) or "failed without a message"
        kind = UnansweredError if NO_ANSWER.search(reason) or QUEUE_FULL.search(reason) else UserError
        raise kind(f"`{' '.join(command)}`: {reason}")
    return [] if outcome.returncode else outcome.stdout.splitlines()
