"""Runs short commands, such as git and nvidia-smi, for what they print."""

import subprocess


def output_of(*command: str, seconds: float = 30) -> str | None:
    """Standard output of a command; None if it cannot be started, fails, or takes longer than `seconds`."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds).stdout
    except (OSError, subprocess.SubprocessError):
        return None
