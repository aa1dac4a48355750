"""The workers of one Snakemake process: how many of which role, started with it and ended with it.

They are processes of the machine that Snakemake runs on, so they are of use where its jobs are too. Each is a bare
interpreter until a stage asks it for something; one that will train imports its libraries meanwhile.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Set
from pathlib import Path

from rloo_pipeline.config import Config
from rloo_pipeline.runtime import devices
from rloo_pipeline.workers import client
from rloo_pipeline.workers.client import FOLDER

PATIENCE = 60.0
"""Seconds in which a worker, a bare interpreter, starts also where much else is at work."""


def wanted(config: Config, cores: int, stages: Set[str]) -> Mapping[str, int]:
    """How many workers of each role that has one of these stages can be busy at once; none where the engines would
    share a GPU.

    An update of several processes has none: its ranks are started by torchrun.
    """
    if config.workers == "never" or (config.workers == "auto" and devices.has_gpu()):
        return {}

    def at_once(threads: int, jobs: int = config.rollout.shards) -> int:
        return max(1, min(jobs, cores // threads))

    roles = {
        "sampler": at_once(config.vllm.threads),
        "logprobs": at_once(config.deepspeed.threads) if config.uses_reference else 1,
        "scorer": at_once(config.scoring.workers),
    }
    if config.deepspeed.processes == 1:
        roles["trainer"] = 1
    needed = {client.ROLES[stage] for stage in stages & client.ROLES.keys()}
    return {role: count for role, count in roles.items() if role in needed}


def start(config: Config, cores: int, logs: Path, stages: Set[str]) -> bool:
    """Starts the workers for these stages; what they say goes to a file each in `logs`.

    Returns:
        Whether there are any.
    """
    roles = wanted(config, cores, stages)
    if not roles:
        return False
    trainers = {client.ROLES[stage] for stage in stages & {"reference", "update"}}
    folder = Path(tempfile.mkdtemp(prefix="rloo-workers-"))
    logs.mkdir(parents=True, exist_ok=True)
    started: dict[Path, subprocess.Popen[bytes]] = {}
    for role, count in roles.items():
        for number in range(count):
            name = f"{role}-{number}"
            socket = folder / f"{name}.sock"
            command = [sys.executable, "-m", "rloo_pipeline", "worker", "--socket", str(socket)]
            if role in trainers:
                command += ["--preload", str(config.deepspeed.threads)]
            with (logs / f"{name}.log").open("a") as log:
                started[socket] = subprocess.Popen(
                    [*command, "--controller", str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # an interrupt is for Snakemake, which waits for its jobs
                )
    _wait(started)
    os.environ[FOLDER] = str(folder)
    atexit.register(os.environ.pop, FOLDER, None)
    return True


def _wait(started: Mapping[Path, subprocess.Popen[bytes]]) -> None:
    """Until all listen: the first stages of a run that goes on would start engines of their own, and the workers theirs
    a round later.
    """
    deadline = time.monotonic() + PATIENCE
    for socket, process in started.items():
        while not socket.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
