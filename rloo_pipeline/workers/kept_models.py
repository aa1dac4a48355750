"""The processes of reward models that a warm worker keeps between stages.

A stage that scores in another worker, or in its own process, lets that worker call them. So each model is loaded once,
and takes the host's memory once.
"""

import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import psutil

from rloo_pipeline.artifacts import function_copies
from rloo_pipeline.config import Config, Reward
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import cost, gpu_claims, reproducible
from rloo_pipeline.user_code.dispatch import Elsewhere, WorkerPools
from rloo_pipeline.user_code.score_batch import FunctionScores
from rloo_pipeline.user_code.worker_process import WorkerProcess
from rloo_pipeline.workers import client, engine_cache

KEPT = "processes of reward models"
"""Name of the list of them in the cache."""


class Calls(NamedTuple):
    """Completions that a stage has another worker score."""

    rewards: list[Reward]
    """All reward functions of the run."""
    model: Reward
    """The one to call."""
    workers: int
    reproducible: bool
    batch: tuple[Any, ...]
    """Arguments of `WorkerPools.score`."""


@contextmanager
def pools(rewards: Sequence[Reward], of_run: Sequence[Reward], limit: int) -> Iterator[WorkerPools]:
    """Processes of reward functions; a warm worker takes those of models that it keeps, and keeps them again.

    Args:
        rewards: the functions to call.
        of_run: all functions of the run; processes of other models end.
        limit: as for `WorkerPools`.
    """
    kept = _kept(of_run)
    with WorkerPools(rewards, limit, kept) as started:
        yield started
    cost.count_processes([psutil.Process(worker.process.pid) for worker in kept or ()])


def _kept(rewards: Sequence[Reward]) -> list[WorkerProcess] | None:
    """The processes that earlier stages in this worker have left; None outside one."""
    kept: list[WorkerProcess] = engine_cache.take(KEPT, None) or []
    fitting = [process for process in kept if any(process.fits(reward) for reward in rewards)]
    for process in kept:
        if process not in fitting:
            process.kill()
    return fitting if engine_cache.keep(KEPT, None, fitting) else None


def elsewhere(config: Config) -> Elsewhere | None:
    """Calls the run's reward models in the warm worker that keeps them; None without such a worker."""
    return partial(_ask, config) if client.listens("scorer") else None


def _ask(config: Config, model: Reward, *batch: Any) -> FunctionScores | None:
    """The results of a reward model's calls; None if no worker can make them, or it dies.

    Raises:
        UserError: as for `WorkerPools.score`.
    """
    calls = Calls(config.rewards, model, config.scoring.workers, config.reproducible, batch)
    command = [client.CALL_MODEL, "--output", f"results/{config.run}"]
    command += ["--only", model.column] if model.gpus else []
    # a folder that both see, and nobody else; it may be full, or gone with the workers
    with suppress(OSError), NamedTemporaryFile(dir=os.environ[client.FOLDER]) as file:
        pickle.dump(calls, file)
        file.flush()
        with gpu_claims.lent() if model.gpus else nullcontext():
            code = client.run_stage([*command, "--calls", file.name])
        if code != 0:
            return None
        file.seek(0)
        outcome: FunctionScores | UserError
        outcome, cause, seconds = pickle.load(file)
        cost.add(seconds)
        if isinstance(outcome, UserError):
            raise outcome from cause
        return outcome
    return None


def answer(run: Path, file: Path) -> None:
    """Makes the calls in a file that another stage has written, and replaces it by their results, or the error with its
    cause, and CPU seconds.
    """
    calls: Calls = pickle.loads(file.read_bytes())
    function_copies.use(run)
    reproducible.prepare(calls.reproducible)
    gpu_claims.claim(calls.model.gpus, patience=client.PATIENCE["scorer"])  # the stage may have lent others
    outcome: FunctionScores | UserError
    cause = None
    try:
        with pools([calls.model], calls.rewards, calls.workers) as started:
            [outcome] = started.score(*calls.batch)
    except UserError as error:
        outcome, cause = error, error.__cause__
    file.write_bytes(pickle.dumps((outcome, cause, cost.cpu_seconds())))
