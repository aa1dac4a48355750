"""Starts the workers of one Snakemake process; they end with it.

Workers run on Snakemake's machine, so they serve only jobs that run there too (`cluster/node_workers.py` starts them on
the nodes of a SLURM job). If these jobs run in an image, so do the workers, and their sockets are in a folder that the
image sees. Libraries are imported in advance: samplers' while prompts are made, trainers' while the first completions
are sampled.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from rloo_pipeline.config import Config
from rloo_pipeline.runtime import devices
from rloo_pipeline.runtime.environment import set_until_end
from rloo_pipeline.workers import client, gpu_shares

PATIENCE = 60.0
"""Seconds to wait until a worker listens; enough for an interpreter to start on a busy machine."""


def worker_counts(config: Config, cores: int, stages: Set[str], runs: int = 1) -> Mapping[str, int]:
    """Number of workers per role that can be busy at once.

    On a machine with GPUs, the number of GPUs limits the workers of a role; engines of several roles take turns on a
    GPU.

    Args:
        config: the run's configuration.
        cores: number of cores that Snakemake may use.
        stages: stages that will run; only their roles get workers.
        runs: number of concurrent runs.
    """
    if config.workers == "never":
        return {}
    gpus = len(devices.visible_gpus()) if devices.has_gpu() else 0

    def at_once(threads: int, jobs: int = config.rollout.shards) -> int:
        return max(1, min(jobs * runs, cores // threads))

    # with a lag, the refill of a round runs alongside the rollouts of the next one
    samplers = config.rollout.tables if config.rollout.lag else config.rollout.shards
    roles = {
        "sampler": at_once(config.vllm.job_threads, samplers),
        "scorer": at_once(config.scoring.workers),
        "observer": 1,
    }
    in_rounds = config.uses_reference or config.algorithm.teacher is not None
    for role, jobs in (("logprobs", config.rollout.shards if in_rounds else 1), ("trainer", 1)):
        if gpu_shares.can_keep(role, config, on_gpus=gpus > 0):
            roles[role] = at_once(config.deepspeed.threads * gpu_shares.ranks_of(role, config), jobs)
    needed = {client.ROLES[stage] for stage in stages & client.ROLES.keys()}
    if gpus:
        shares = {role: gpu_shares.of_role(role, config) for role in ("sampler", "logprobs", "trainer")}
        roles |= {role: min(roles[role], max(1, gpus // share)) for role, share in shares.items() if role in roles}
    return {role: count for role, count in roles.items() if role in needed}


def start(
    config: Config,
    cores: int,
    logs: Path,
    stages: Set[str],
    runs: int = 1,
    without: Set[str] = frozenset(),
    program: Sequence[str] = (sys.executable, "-m", "rloo_pipeline"),
    folder: Path | None = None,
) -> None:
    """Starts the workers for these stages and sets RLOO_WORKERS; each worker logs to a file in `logs`.

    Args:
        config: the run's configuration; in an experiment, the first run's.
        cores: number of cores that Snakemake may use.
        logs: folder for the workers' logs.
        stages: stages that will run.
        runs: number of concurrent runs.
        without: roles that get no worker.
        program: the command that runs `rloo`, for example in an image.
        folder: folder for the sockets, which only the user can enter; by default a new one in TMPDIR.
    """
    counts = worker_counts(config, cores, stages, runs)
    roles = {role: count for role, count in counts.items() if role not in without}
    if not roles:
        return
    if devices.has_gpu():
        others = os.environ.get(devices.WARM, "").split()  # of ranks over several nodes, which use the same GPUs
        set_until_end(devices.WARM, gpu_shares.idle({*others, *roles}, config))
    preloads = {client.ROLES[stage]: config.deepspeed.threads for stage in stages & {"reference", "teacher", "update"}}
    preloads = {role: threads for role, threads in preloads.items() if gpu_shares.ranks_of(role, config) == 1}
    preloads |= {"sampler": config.vllm.threads}
    if any(name.startswith(devices.SLICE) for name in devices.visible_gpus()):
        preloads = {}  # an import would start CUDA before a stage has chosen its slice
    folder = folder or Path(tempfile.mkdtemp(prefix="rloo-workers-"))
    logs.mkdir(parents=True, exist_ok=True)
    processes: dict[Path, subprocess.Popen[bytes]] = {}
    for role, count in roles.items():
        for number in range(count):
            name = f"{role}-{number}"
            socket = folder / f"{name}.sock"
            command = [*program, "worker", "--socket", str(socket)]
            if role in preloads:
                command += ["--preload", str(preloads[role])]
                command += ["--after", "sampler"] if role != "sampler" and "sampler" in roles else []
            with (logs / f"{name}.log").open("a") as log:
                processes[socket] = subprocess.Popen(
                    [*command, "--controller", str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C goes to Snakemake, which waits for its jobs
                )
    _wait(processes)
    set_until_end(client.FOLDER, str(folder))


def _wait(processes: Mapping[Path, subprocess.Popen[bytes]]) -> None:
    """Waits until all workers listen. Otherwise the first stages of a resumed run would start their own engines, and
    the workers would start theirs one round later.
    """
    deadline = time.monotonic() + PATIENCE
    for socket, process in processes.items():
        while not socket.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
