"""The ranks of a training job: the rank of this process, reports of failures to the launcher, and torchrun, which
starts the ranks on one machine. On several nodes, `cluster.nodes.launch` starts them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from rloo_pipeline.errors import UserError, ending
from rloo_pipeline.runtime import controller_watch, progress

T = TypeVar("T")

RENDEZVOUS = "RLOO_MEETING"
"""Environment variable: path of the file through which ranks on several nodes find each other (cluster/nodes.py)."""

STEP = "RLOO_STEP"
"""Environment variable, set for stages that are steps of one SLURM job of several nodes (snakemake_ext/steps.py)."""

FAILED = "RLOO_FAILED"
"""Environment variable: path of the file to which the first rank that fails writes its error. The errors of later
ranks are dropped: they only report that the first one is gone.
"""


class Rank(NamedTuple):
    """The rank of this process in its job."""

    number: int
    world: int
    local: int

    @property
    def first(self) -> bool:
        """True if this is rank 0, which writes the files."""
        return self.number == 0


def current() -> Rank:
    """The rank of this process, from RANK, WORLD_SIZE and LOCAL_RANK; rank 0 of 1 if they are not set."""
    env = os.environ
    return Rank(int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1")), int(env.get("LOCAL_RANK", "0")))


def on_node() -> tuple[int, int]:
    """The index of this process among the ranks on its node, and their number."""
    return current().local, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_rank() -> bool:
    """True if a launcher started this process as one of several ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ or RENDEZVOUS in os.environ


def gathered(value: T) -> list[T]:
    """The value of each rank, on every rank; all connected ranks call this at once."""
    import torch

    values = [value] * current().world
    if len(values) > 1:
        torch.distributed.all_gather_object(values, value)
    return values


def use_single_process() -> None:
    """Sets the variables that DeepSpeed reads, for a process without a launcher; it listens on a port that the system
    picks.
    """
    if "RANK" not in os.environ:
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
        )


def tell_launcher(message: str) -> None:
    """Reports why this rank failed to the process that launched it; does nothing in a process that is not a rank."""
    if is_rank() and FAILED in os.environ:
        with contextlib.suppress(OSError), open(os.environ[FAILED], "x") as file:
            file.write(message)


def refuse_failed(ranks: str, failed: Path, code: int) -> None:
    """Checks the exit code of a launcher.

    Args:
        ranks: description of the ranks, for the message.
        failed: file to which the first rank that fails writes its error.
        code: the exit code.

    Raises:
        UserError: a rank failed.
    """
    if code:
        error = failed.read_text() if failed.exists() else ""
        if code < 0:
            end = f"their launcher was {ending(128 - code)}"
        else:
            end = ending(code) if code > 128 else f"exit code {code}"
        raise UserError(f"one of the {ranks} failed: {error or f'{end}; see the log'}")


def torchrun(processes: int, arguments: Sequence[str]) -> None:
    """Runs `rloo ARGUMENTS` as `processes` ranks on this machine and waits for them.

    Rank 0 shows its progress on the terminal of this process (progress.TERMINAL); the others write to the log only. The
    ranks end with this process, even if it is killed.

    Raises:
        UserError: a rank failed.
    """
    terminal = f"/proc/{os.getpid()}/fd/{progress.console.file.fileno()}"
    with tempfile.TemporaryDirectory(prefix="rloo-ranks-") as folder:
        environment = os.environ | torchrun_environment(Path(folder))
        environment |= {progress.TERMINAL: terminal, progress.RUN: progress.run}
        environment[controller_watch.VARIABLE] = controller_watch.name()
        outcome = subprocess.run(torchrun_command(processes, arguments), env=environment, check=False)
        refuse_failed(f"{processes} ranks", Path(environment[FAILED]), outcome.returncode)


def torchrun_command(processes: int, arguments: Sequence[str]) -> list[str]:
    """The command that runs `rloo ARGUMENTS` as `processes` ranks on this machine."""
    launcher = [sys.executable, "-m", __name__, "--standalone", f"--nproc-per-node={processes}"]
    return [*launcher, "-m", "rloo_pipeline", *arguments]


def main() -> None:
    """Runs torchrun. If a signal kills a rank, replaces the errors of the others, which have lost their connection."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    failed = Path(os.environ[FAILED])
    try:
        run.main()
    except SignalException as error:
        if not failed.exists():
            failed.write_text(f"their launcher was {ending(128 + error.sigval)}")
        raise
    except ChildFailedError as error:
        killed = [one for one in error.failures.items() if one[1].exitcode == -signal.SIGKILL]
        rank, failure = next(iter([*killed, *error.failures.items()]))  # torchrun itself ends others by SIGTERM
        said = failed.read_text() if failed.exists() else ""
        if failure.exitcode < 0 and not (failure.exitcode == -signal.SIGABRT and said):
            earlier = said and f"; the first error was: {said}"  # perhaps its own, and the signal ended its exit
            after = "; if memory ran out, give the job more" if killed else earlier
            failed.write_text(f"rank {rank} was {ending(128 - failure.exitcode)}{after}")
        raise


def torchrun_environment(folder: Path) -> dict[str, str]:
    """Variables for `torchrun_command`: temporary files and the first failing rank's error go to `folder`."""
    return {"TMPDIR": str(folder), FAILED: str(folder / "failed")}


if __name__ == "__main__":
    main()
