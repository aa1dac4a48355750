"""Runs short commands, such as git and nvidia-smi, for what they print."""

import subprocess


def output_of(*command: str, seconds: float = 30, with_errors: bool = False) -> str | None:
    """Standard output of a command; None if it cannot be started, fails, or takes longer than `seconds`.

    Args:
        command: the program and its arguments.
        seconds: time limit.
        with_errors: include its standard error.
    """
    errors = subprocess.STDOUT if with_errors else subprocess.PIPE
    try:
        process = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, check=True, timeout=seconds)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout
