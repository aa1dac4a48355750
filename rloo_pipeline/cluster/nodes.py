"""Runs a stage as ranks on several nodes of a SLURM job: `launch` starts them with srun, and each calls `take_rank` and
`join`.

srun runs outside the image, which does not contain it, and starts the image once per rank. Rank 0 listens on a free
port that the system chooses and writes it to a file that all ranks see, so that ports of different jobs cannot collide.
If a rank is missing after five minutes, the stage fails and names the nodes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rloo_pipeline.cluster import slurm
from rloo_pipeline.cluster.step_client import IMAGE as IMAGE
from rloo_pipeline.errors import UserError, one_line
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.runtime.ranks import FAILED, RENDEZVOUS, refuse_failed

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

PATIENCE = 300.0
"""Seconds for which ranks wait for each other: a node may read the image for the first time."""
BOUND = {"SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_BIND", "SLURM_NTASKS_PER_GPU"}
"""Variables of a job that was submitted with such options: srun would show each rank its own GPU only, and ranks choose
theirs by their number on the node. The last one contradicts `--ntasks-per-node`.
"""
KILLED = re.compile(
    rb"srun: error: ([^\s:]+): tasks? ([\d,-]+): "
    rb"(Killed|Out Of Memory|Segmentation fault|Bus error|Exited with exit code 1(?:35|37|39))"
)
"""Line of srun about ranks that a signal has ended; Apptainer may exit with 128 plus the signal's number instead. srun
then ends the other ranks by SIGTERM.
"""


def program(apptainer_options: Sequence[str] = ()) -> list[str]:
    """The command `rloo` for a process outside the image. It enters the image if stages run in one."""
    if image := os.environ.get(IMAGE):
        return ["apptainer", "exec", "--home", os.getcwd(), *apptainer_options, image, "rloo"]
    return [sys.executable, "-m", "rloo_pipeline"]


class RankLayout(NamedTuple):
    """Number of nodes, ranks, and CPUs per rank."""

    nodes: int
    processes: int
    """Number of ranks, a multiple of `nodes`."""
    threads: int
    """CPUs per rank."""


class RankStep(NamedTuple):
    """A step of this SLURM job that runs ranks, and its files."""

    command: list[str]
    environment: dict[str, str]
    rendezvous: Path
    """File through which the ranks find each other."""
    failed: Path
    """File for the error of the first rank that fails."""

    def remove_files(self) -> None:
        """Removes both files."""
        self.rendezvous.unlink(missing_ok=True)
        self.failed.unlink(missing_ok=True)


def require_job(nodes: int) -> None:
    """Raises UserError if ranks on this many nodes would need a SLURM job, and this process is in none."""
    if nodes > 1 and slurm.own_job() is None:
        raise UserError(
            f"deepspeed.nodes is {nodes}, but this is not a SLURM job: use `snakemake --profile profiles/slurm`, or "
            f"`rloo submit --nodes {nodes}`"
        )


def prepare(layout: RankLayout, output: Path, arguments: Sequence[str], options: Sequence[str] = ()) -> RankStep:
    """Builds the step that runs `rloo ARGUMENTS` as ranks on several nodes of this SLURM job.

    Args:
        layout: nodes, ranks and CPUs.
        output: the stage's output; ranks find each other through a file in its folder.
        arguments: arguments of `rloo`.
        options: additional options of srun.

    Raises:
        UserError: this is not a SLURM job.
    """
    nodes, processes, threads = layout
    require_job(nodes)
    rendezvous = output.parent / f".{output.name}.{uuid.uuid4().hex[:8]}.tmp"
    rendezvous.parent.mkdir(parents=True, exist_ok=True)
    rendezvous.touch()
    failed = rendezvous.with_name(f"{rendezvous.stem}-failed.tmp")
    sizes = [f"--nodes={nodes}", f"--ntasks={processes}", f"--ntasks-per-node={processes // nodes}"]
    sizes += [f"--cpus-per-task={threads}", "--kill-on-bad-exit=1", *options]
    files = {RENDEZVOUS: str(rendezvous.absolute()), FAILED: str(failed.absolute())}
    # without ALL, srun withholds these files from the ranks of a job that sbatch started with --export=NONE
    every = dict.fromkeys(("SLURM_EXPORT_ENV", "SRUN_EXPORT_ENV"), "ALL")
    inherited = {name: value for name, value in os.environ.items() if name not in BOUND}
    environment = {**inherited, **files, "SUBMITIT_EXECUTOR": "slurm", **every}
    return RankStep(["srun", *sizes, *program(), *arguments], environment, rendezvous, failed)


def launch(layout: RankLayout, output: Path, arguments: Sequence[str]) -> None:
    """Runs `rloo ARGUMENTS` as ranks on several nodes of this SLURM job, and waits. Arguments are as for `prepare`.

    Raises:
        UserError: this is not a SLURM job, or a rank failed.
    """
    step, none = prepare(layout, output, arguments), subprocess.DEVNULL
    try:
        with subprocess.Popen(step.command, env=step.environment, stdin=none, stderr=subprocess.PIPE) as srun:
            killed = None
            try:
                for line in srun.stderr or ():
                    os.write(2, line)
                    killed = killed or KILLED.match(line)
            except BaseException:  # Ctrl-C, or nobody reads the log
                srun.kill()
                srun.wait()
                raise
        if killed:  # the errors of other ranks only report that it is gone
            node, rank, how = (part.decode() for part in killed.groups())
            step.failed.write_text(f"rank {rank} on {node}: {how}; if memory ran out, give the job more")
        refuse_failed(f"{layout.processes} ranks on {layout.nodes} nodes", step.failed, srun.returncode)
    except FileNotFoundError:
        raise UserError("no srun on the PATH of this job's first node") from None
    finally:
        step.remove_files()


def is_outside_image() -> bool:
    """True if the run's stages have an image and this process runs outside of it."""
    return IMAGE in os.environ and "APPTAINER_CONTAINER" not in os.environ


def take_rank() -> None:
    """Sets RANK, WORLD_SIZE and LOCAL_RANK in a process that `launch` started; does nothing in others."""
    if RENDEZVOUS not in os.environ or "RANK" in os.environ:
        return
    # submitit reads the variables of the job, which may have more nodes than this step, so they get those of the step
    for job, step in (("JOB_NUM_NODES", "NUM_NODES"), ("JOB_NODELIST", "NODELIST"), ("NTASKS", "NUM_TASKS")):
        if f"SLURM_STEP_{step}" in os.environ:
            os.environ[f"SLURM_{job}"] = os.environ[f"SLURM_STEP_{step}"]
    import submitit

    submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)


def join(patience: float = PATIENCE) -> None:
    """Creates torch's process group in a process that `launch` started; does nothing in others.

    Args:
        patience: seconds to wait for the other ranks.

    Raises:
        UserError: a rank is missing after that time.
    """
    if RENDEZVOUS not in os.environ:
        return
    import torch

    if torch.distributed.is_initialized():  # an earlier stage made it, if these ranks stay alive
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    deadline = time.monotonic() + patience
    try:
        store = _store(rank, world, deadline)
        store.set(f"rank {rank}", _node_name())
        _wait_for_all(store, world, deadline)
        nodes = sorted({store.get(f"rank {other}").decode() for other in range(world)})
    except (torch.distributed.DistError, RuntimeError, TimeoutError) as error:
        reason = one_line(error)
        raise UserError(
            f"the {world} ranks did not meet within {patience:.0f} s (rank {rank} on {_node_name()}: {reason}); nodes: "
            f"{os.environ.get('SLURM_JOB_NODELIST', 'unknown')}; check that they reach each other by these names"
        ) from None
    if rank == 0:
        say(f"{world} ranks on {', '.join(nodes)}")
    torch.distributed.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=30),
    )


def _store(rank: int, world: int, deadline: float) -> TCPStore:
    """The key-value store that rank 0 serves. Other ranks read its address from the file."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    rendezvous = Path(os.environ[RENDEZVOUS])
    if rank == 0:
        address = os.environ["MASTER_ADDR"]
        store = TCPStore(address, 0, world, True, _time_left(deadline), wait_for_workers=False)
        rendezvous.write_text(f"{address} {store.port}\n")
    else:
        while not (line := rendezvous.read_text()).endswith("\n"):
            if time.monotonic() > deadline:
                raise TimeoutError("rank 0 did not say where it listens")
            time.sleep(0.2)
        address, port = line.split()
        store = TCPStore(address, int(port), world, False, _time_left(deadline), wait_for_workers=False)
    os.environ["MASTER_PORT"] = str(store.port)
    return store


def _wait_for_all(store: TCPStore, world: int, deadline: float) -> None:
    missing = list(range(world))
    while missing := [rank for rank in missing if not store.check([f"rank {rank}"])]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no sign of rank {', '.join(map(str, missing))}")
        time.sleep(0.1)


def _time_left(deadline: float) -> timedelta:
    return timedelta(seconds=max(1.0, deadline - time.monotonic()))


def _node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename
