"""Stage hosts and warm workers on the nodes of a SLURM job, for `rloo submit --nodes N`.

Snakemake starts a step on each node (`start`) that shares the node's resources with all other steps. The step starts
the workers there (`host`), as `manager.start` does on Snakemake's machine, and runs the node's stages
(`node_stages.py`). It ends when its standard input ends, however Snakemake ends. The sockets are in a folder
`NAME@NODE` on each node. A stage that srun runs puts its node's name into RLOO_WORKERS (`snakemake_ext/steps.py`).
"""

import asyncio
import atexit
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from rloo_pipeline.cluster import node_stages, slurm, step_client
from rloo_pipeline.config import JSON
from rloo_pipeline.config.loading import load
from rloo_pipeline.runtime import controller_watch, devices, ranks, scratch
from rloo_pipeline.runtime.environment import set_until_end
from rloo_pipeline.workers import client, gpu_shares, manager

PATIENCE = 90.0
"""Seconds to wait until the workers on all nodes listen. After that, each stage waits for its node's host."""
LISTENING = "the workers listen"

_steps: dict[str, subprocess.Popen[bytes]] = {}
"""Host process of each node."""


def start(
    config: Path, logs: Path, stages: Set[str], runs: int, without: Set[str], program: Sequence[str], gpu_stages: int
) -> None:
    """Starts workers on all nodes of this job, and the router for its stages.

    Sets RLOO_WORKERS and RLOO_ROUTER.

    Args:
        config: config.yaml of the run; in an experiment, of the first run.
        logs: folder for the workers' logs.
        stages: names of the stages that will run.
        runs: number of concurrent runs.
        without: roles that get no worker.
        program: command that runs `rloo`, for example inside an image.
        gpu_stages: number of GPU stages that a node can run at the same time.
    """
    folder = f"{tempfile.gettempdir()}/rloo-workers-{slurm.own_job()}-{uuid.uuid4().hex[:8]}"
    plan = {"config": str(config), "folder": folder, "logs": str(logs), "stages": sorted(stages), "runs": runs}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_MEM_PER_")}
    cpus = os.environ.get("SLURM_CPUS_PER_TASK", "1")
    logs.mkdir(parents=True, exist_ok=True)
    names, over_nodes = slurm.node_names(), gpu_shares.over_nodes(load(config))
    if devices.has_gpu():
        environment[devices.WARM] = " ".join(sorted(over_nodes - without))
    for name in names:
        # an update runs on the first node, where the trainer of the last one is
        here = plan | {"without": sorted({*without, *over_nodes, *(["trainer"] if name != names[0] else [])})}
        sizes = ["--nodes=1", "--ntasks=1", f"--nodelist={name}", f"--cpus-per-task={cpus}", "--mem=0"]
        srun = ["srun", "--quiet", "--overlap", *sizes]
        _start_host(name, [*srun, *program, "worker-host", json.dumps(here)], logs / f"{name}.log", environment)
    _wait()
    if devices.has_gpu():  # for stages without a worker that share the GPU with idle engines
        set_until_end(devices.WARM, gpu_shares.idle(devices.IDLE.keys() - without, load(config)))
    first = Path(f"{folder}@{os.environ.get('SLURMD_NODENAME', names[0])}")
    set_until_end(client.FOLDER, str(first))
    if over_nodes and first.is_dir():  # their workers run next to this process, where srun is available
        without = without | {*client.ROLES.values()} - over_nodes
        manager.start(load(config), int(cpus) * len(names), logs, stages, runs, without, folder=first)
    _start_router(int(cpus), gpu_stages)


def start_here(logs: Path, program: Sequence[str]) -> None:
    """Starts a host in the image on this machine, so that stages do not start the image anew. Sets RLOO_ROUTER.

    Args:
        logs: folder for the host's log.
        program: command that runs `rloo` in the image.
    """
    logs.mkdir(parents=True, exist_ok=True)
    _start_host(os.environ.get("SLURMD_NODENAME", ""), [*program, "worker-host", "null"], logs / "host.log", os.environ)
    _wait()
    _start_router(0, 0)  # unlimited, since Snakemake counts cores and GPUs


def _start_host(name: str, command: Sequence[str], log_file: Path, environment: Mapping[str, str]) -> None:
    """Starts a node's host, which ends with this process."""
    with log_file.open("a") as log:
        _steps[name] = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=0,  # unbuffered, because `select` would not see buffered lines
            start_new_session=True,  # Ctrl-C must reach only Snakemake, which waits for its jobs
        )
    atexit.register(end)


def _start_router(cores: int, gpu_stages: int) -> None:
    """Starts the router in a thread of this process."""
    folder = Path(tempfile.mkdtemp(prefix="rloo-router-"))  # accessible only to this user
    scratch.claim(folder)
    listener = socket.socket(socket.AF_UNIX)
    client.with_short_path(listener.bind, str(folder / "router.sock"))
    listener.listen(1000)
    serving = node_stages.Router(_steps, cores, gpu_stages).serve(listener)
    threading.Thread(target=asyncio.run, args=(serving,), daemon=True).start()
    set_until_end(step_client.ROUTER, str(folder / "router.sock"))


def _wait() -> None:
    """Waits until the workers on each node listen or their step has ended."""
    deadline = time.monotonic() + PATIENCE
    for step in _steps.values():
        assert step.stdout
        while select.select([step.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (line := step.stdout.readline()) or LISTENING in line.decode():
                break


def end() -> None:
    """Ends the workers on all nodes."""
    for step in _steps.values():
        assert step.stdin
        with contextlib.suppress(OSError):
            step.stdin.close()
    for step in _steps.values():
        with contextlib.suppress(subprocess.TimeoutExpired):
            step.wait(10)
    _steps.clear()


def host(text: str) -> None:
    """Starts this node's workers, and runs its stages until standard input ends.

    Args:
        text: the plan from `start`, as JSON; null on Snakemake's machine, whose workers are already running.
    """
    if plan := json.loads(text):
        _start_workers(plan)
    print(LISTENING, flush=True)
    asyncio.run(node_stages.Host().serve())


def _start_workers(plan: JSON) -> None:
    name = os.environ["SLURMD_NODENAME"]
    folder = Path(f"{plan['folder']}@{name}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)  # fails if the folder exists, since it could be another user's
    scratch.claim(folder)
    if (store := os.environ.get(scratch.EXCHANGE)) and not Path(store).exists():  # the controller has made its own
        Path(store).mkdir(mode=0o700)
        scratch.claim(Path(store))
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", len(os.sched_getaffinity(0))))
    program = [sys.executable, "-m", "rloo_pipeline"]
    where = Path(plan["logs"]) / name
    stages, without = set(plan["stages"]), set(plan["without"])
    manager.start(load(Path(plan["config"])), cores, where, stages, plan["runs"], without, program, folder)
    os.environ |= {ranks.STEP: "1", controller_watch.VARIABLE: controller_watch.name()}
