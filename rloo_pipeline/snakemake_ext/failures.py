"""Shows failed jobs: name, error, log, and the command that continues the run."""

import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from rloo_pipeline.errors import ending, nearly_full, no_space_left
from rloo_pipeline.snakemake_ext.configfiles import is_snakemake

ERROR = re.compile(r"^(?:\S+ \S+ ERROR rloo: )?rloo \S+: error: (?P<message>.*)$", re.MULTILINE)
REFUSAL = re.compile(r'^WorkflowError in file "[^"\n]*/(?:common\.smk|Snakefile)", line \d+:\n(.*)$', re.MULTILINE)
"""Pattern of the error with which Snakemake's process in a SLURM job ends before it runs the stage."""
COMMAND = "RLOO_COMMAND"
"""Environment variable with the command that the user typed, if it was not `snakemake`."""
RULES = {"update_transient": "update", "update_last": "update"}
"""Rules that differ only in which files they keep → their stage."""


EXIT_STATUS = re.compile(
    r"(?m:^)RuleException:\nCalledProcessError in file .*--log=(?P<log>[^\s']+).*"
    r" (?:returned non-zero exit status (?P<status>\d+)|died with <Signals\.(?P<signal>\w+): \d+>)\.(?m:$)",
    re.DOTALL,
)
"""Pattern of Snakemake's message about a failed command, which it prints in addition to the job's error."""
MOST = 5
"""Maximum number of failed jobs that are named at the end."""
LAST_LINES = 20
"""Lines of a log that are shown where its job failed. SLURM's log begins with 100 lines of Snakemake's call."""


def exit_status(text: str) -> tuple[str, int] | None:
    """Finds Snakemake's message about a failed command, and returns its log and exit status, as a shell reports it;
    None without such a message.
    """
    if match := EXIT_STATUS.search(text):
        return match["log"], 128 + signal.Signals[match["signal"]] if match["signal"] else int(match["status"])
    return None


class Failure(NamedTuple):
    """A job that failed."""

    job: str
    """The job's title."""
    message: str
    logs: Sequence[str]
    """The stage's log and, for a SLURM job, SLURM's log."""


def stage_of(rule: Any) -> str:
    """The stage that a Snakemake rule calls; empty if it calls none."""
    program, stage, *_ = [*str(rule.shellcmd or "").split(), "", ""]
    return stage if program == "rloo" else ""


def title(rule: str, wildcards: Mapping[str, str] | None) -> str:
    """Names a job: `rollout, round 1, shard 0` or `evaluate, final`."""
    values = (
        value if name == "name" else f"{name} {int(value) if value.isdigit() else value}"
        for name, value in (wildcards or {}).items()
    )
    return ", ".join([RULES.get(rule, rule), *values])


def version_of(log: str) -> tuple[int, int] | None:
    """Time and size of a log; None if it does not exist. Compared, never ordered: the clock of the node that writes it
    may differ from this one's, and some file systems keep whole seconds.
    """
    try:
        status = Path(log).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def message_of(logs: Sequence[str], reported: str | None, status: int, before: Mapping[str, object]) -> str:
    """Why a job failed. The first of these that exists: the stage's line `rloo STAGE: error: …`, a refusal of the job's
    Snakemake, the executor's report, a full disk, the last line of the log.

    Args:
        logs: the job's logs.
        reported: the executor's message, such as the state that SLURM gives the job.
        status: exit status of the command; 0 if unknown.
        before: `version_of` logs when the job began. A log that still has it is from another attempt.
    """
    written = [log for log in logs if version_of(log) not in (None, before.get(log))]
    texts = [text for log in written if (text := _text(Path(log)))]
    for text in texts:
        if messages := ERROR.findall(text) or REFUSAL.findall(text):
            return str(messages[-1])
    if reported and reported.strip():
        # SLURM knows only that the job failed; the Snakemake process in the job has written how its command ended
        ends = [ending(found[1]) for text in texts if (found := exit_status(text))]
        killed = [f"Its command was {end}." for end in ends if end.startswith("killed")]
        return " ".join([*reported.split(), *killed])
    for folder in (Path(log).parent for log in logs):
        if folder.exists() and nearly_full(folder):  # on a full disk, the log may lack its end
            return no_space_left(folder)
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    last = f"the last line of its log is: {lines[-1].strip()}" if lines else "its log is empty"
    last = last if written else "it wrote no log"
    return f"{ending(status)}; {last}"


def ends_of(logs: Sequence[str]) -> Iterator[str]:
    """Yields the last lines of each log, below a line that names it."""
    for log in logs:
        if (text := _text(Path(log))) is None:
            yield f"log {log}: cannot be read"
            continue
        lines = text.splitlines()
        last = f", last {LAST_LINES} of {len(lines)} lines" if len(lines) > LAST_LINES else ""
        yield f"log {log}{last}:" if lines else f"log {log}: nothing is in it"
        yield from (f"  {line}" for line in lines[-LAST_LINES:])


def box(failures: Sequence[Failure]) -> RenderableType:
    """The failures as a box, shown last on a terminal."""
    *lines, last = block(failures)
    texts = [*(Text(line, overflow="fold") for line in lines), Text(last, "bold", overflow="fold")]
    return Panel(Group(*texts), title="failed", title_align="left", border_style="red")


def block(failures: Sequence[Failure]) -> list[str]:
    """The failures as plain lines: each message with its jobs and logs, and the command that continues."""
    by_message: dict[str, list[Failure]] = {}
    for failure in failures[:MOST]:
        by_message.setdefault(failure.message, []).append(failure)
    lines = list[str]()
    for message, alike in by_message.items():
        lines.append(f"failed: {'; '.join(failure.job for failure in alike)}: {message}")
        lines += [f"log: {log}" for failure in alike for log in failure.logs]
    if len(failures) > MOST:
        lines.append(f"and {len(failures) - MOST} more jobs failed")
    return [*lines, f"Once that is fixed, {go_on()}"]


def go_on() -> str:
    """The command that continues the run: the same one that started it."""
    return "the same command continues from here" + (f": {command}" if (command := typed_command()) else ".")


def typed_command() -> str:
    """The command that the user typed, from the variable COMMAND or this process's command line; empty if unknown."""
    own = shlex.join(["snakemake", *sys.argv[1:]]) if is_snakemake(sys.argv[0]) else ""
    return os.environ.get(COMMAND, own)


def _text(log: Path) -> str | None:
    try:
        return log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
