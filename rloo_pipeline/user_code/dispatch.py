"""Dispatches calls of reward functions to worker processes until every row of a table is scored.

Functions run in the order of the configuration. Each has its own workers, so that nothing one function leaves in its
process affects another. The first worker of every function starts at once, so a function that cannot be loaded is
reported early. An async function mostly waits for a service: it has one worker, which does not count as busy.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain
from multiprocessing.connection import wait
from threading import Thread
from types import MappingProxyType
from typing import Any, Self, TypeVar

from rloo_pipeline.config import Reward
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.progress import counting
from rloo_pipeline.user_code.job import ScoringJob
from rloo_pipeline.user_code.messages import Broken, Done, Failed, Ready
from rloo_pipeline.user_code.score_batch import FunctionScores, RewardBatch
from rloo_pipeline.user_code.worker_process import (
    EXIT_SECONDS,
    REST_SECONDS,
    WorkerProcess,
    adopt_orphans,
    describe_exit,
    end_orphans,
    reap_orphans,
)

T = TypeVar("T")
IMPORT_SECONDS = 600.0
"""Time limit for importing a function."""
Elsewhere = Callable[..., FunctionScores | None]
"""Calls a reward model in another process, with the arguments of `WorkerPools.score`; None if no other process can."""
POLL_SECONDS = 1.0
"""Maximum wait for messages before checking for dead processes."""


class WorkerPools:
    """The worker processes of all reward functions. Assigns calls to them and handles their messages.

    They start in the constructor and import their functions while the caller reads its tables. Leaving the `with` block
    ends them all, except those that are kept.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        limit: int,
        kept: list[WorkerProcess] | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """Starts the workers.

        Args:
            rewards: the functions.
            limit: maximum number of threads that compute at the same time, over all workers.
            kept: workers of earlier stages that rest; None keeps none. Leaving the `with` block adds those of this
                stage whose function is a reward model.
            elsewhere: calls reward models, which get workers of their own once it has returned None.
        """
        self.others = adopt_orphans()
        self.limit = limit
        self.rewards = list(rewards)
        self.kept = kept
        self.elsewhere = [elsewhere if reward.is_model else None for reward in self.rewards]
        self.started = [
            [] if other else self._take_kept(reward) or [WorkerProcess(reward)]
            for reward, other in zip(self.rewards, self.elsewhere, strict=True)
        ]
        """The workers of each function."""
        several = (place for place, reward in enumerate(self.rewards) if reward.most_processes(limit) > 1)
        main = next((place for place in several if self.started[place]), None)
        if main is not None:
            wanted = 1 + max(0, (self.limit - len(self.rewards)) // self.rewards[main].threads)
            missing = wanted - len(self.started[main])
            self.started[main] += [WorkerProcess(self.rewards[main]) for _ in range(missing)]
        self.workers: dict[ScoringJob, list[WorkerProcess]] = {}
        """The workers of each unfinished job."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        """Ends all workers that are not kept, and the processes that they started: waits for dismissed workers, kills
        the others.
        """
        now = time.monotonic()
        for worker in chain(*self.started):
            if self.kept is not None and failed is None and worker.has_rested(now + REST_SECONDS):
                self.kept.append(worker)
            else:
                worker.end(now + EXIT_SECONDS)
        end_orphans(self.others | {worker.process.pid for worker in self.kept or ()})

    def _take_kept(self, reward: Reward) -> list[WorkerProcess]:
        """Removes the resting workers of a function from `kept`."""
        kept = self.kept or []
        fitting = [worker for worker in kept if worker.fits(reward)]
        for worker in fitting:
            kept.remove(worker)
        return fitting

    def score(
        self,
        batch: RewardBatch,
        samples: Sequence[int],
        constants: Mapping[str, Any] = MappingProxyType({}),
        more: bool = False,
    ) -> list[FunctionScores]:
        """Scores all rows with every function.

        Args:
            batch: the rows.
            samples: number of consecutive rows of each prompt, which share a call.
            constants: extra arguments, the same for all rows, for functions that name them; options override them.
            more: True if another batch follows, so workers are kept.

        Raises:
            UserError: a function cannot be found, needs a column that does not exist, or does not return one finite
                number or None per completion; or it fails or times out and `on_error` or `on_timeout` is `fail`.
        """
        asked = {
            place: other
            for place, other in enumerate(self.elsewhere)
            if other and batch.completions and not self.started[place]
        }
        own = [place for place in range(len(self.rewards)) if place not in asked]
        answers = _in_thread(  # one model after the other, beside the stage's own functions
            lambda: {place: ask(self.rewards[place], batch, samples, dict(constants)) for place, ask in asked.items()}
        )
        if any(not self.rewards[place].gpus for place in asked) or any(self.rewards[place].gpus for place in own):
            answers.result()  # they would compete for cores, or for a GPU
        found: dict[int, FunctionScores | None] = {}
        try:
            found |= self._score_own(own, batch, samples, constants, more, answers)
        except Exception:
            answers.exception()  # a worker would otherwise run its next stage beside these calls
            raise
        found |= answers.result()
        if missing := [place for place, results in found.items() if results is None]:
            found |= self._score_own(missing, batch, samples, constants, more, answers)
        return [results for _, results in sorted(found.items()) if results]

    def _score_own(
        self,
        places: Sequence[int],
        batch: RewardBatch,
        samples: Sequence[int],
        constants: Mapping[str, Any],
        more: bool,
        beside: Future[Any],
    ) -> dict[int, FunctionScores]:
        """Scores with the functions at these places, in processes of this one, unless calls beside it fail. The other
        arguments are as for `score`.
        """
        with counting("scores", len(places) * len(batch.completions)) as counter:
            offered = batch.arguments()
            jobs = [ScoringJob(self.rewards[place], offered, samples, constants, counter.advance) for place in places]
            self.workers = dict(zip(jobs, [self.started[place] for place in places], strict=True))
            for job, workers in self.workers.items():
                for worker in workers:
                    if worker.signature is not None:
                        job.check_signature(worker.signature)
            while self._step(more):
                if beside.done():
                    beside.result()
        reap_orphans(self.others | {worker.process.pid for worker in chain(*self.started)})
        return {place: job.results for place, job in zip(places, jobs, strict=True)}

    def _step(self, more: bool) -> bool:
        """Assigns calls, waits for messages and handles them. Returns False once every job is finished."""
        self._assign(more)
        pairs = [(job, worker) for job, workers in self.workers.items() for worker in workers]
        if not pairs:
            return False
        soonest = min(worker.next_end() for _, worker in pairs) - time.monotonic()
        wait([worker.file for _, worker in pairs], max(0.0, min(POLL_SECONDS, soonest)))
        for job, worker in pairs:
            self._handle_messages(job, worker)
        return True

    def _assign(self, more: bool) -> None:
        for job in list(self.workers):
            workers = self.workers[job]
            for worker in workers:
                if job.waiting and worker.idle and (job.asynchronous or self._has_capacity(job)):
                    worker.assign(job.take(job.reward.most_processes(self.limit)))
            if self._needs_worker(job, workers):
                workers.append(WorkerProcess(job.reward))
            if not job.waiting and not job.under_way:
                del self.workers[job]
                for worker in () if more else workers:
                    if self.kept is not None and worker.idle and job.reward.is_model:
                        worker.rest()
                    else:
                        worker.dismiss()

    def _needs_worker(self, job: ScoringJob, workers: list[WorkerProcess]) -> bool:
        if not workers:
            return bool(job.waiting)
        without_calls = sum(not worker.calls for worker in workers)
        if job.asynchronous or len(job.waiting) <= without_calls:
            return False
        return self._has_capacity(job) and len(workers) < job.reward.most_processes(self.limit)

    def _has_capacity(self, job: ScoringJob) -> bool:
        """True if one more process of this function may compute. A process that is still starting counts as busy."""
        busy = sum(
            other.reward.threads
            for other, workers in self.workers.items()
            for worker in workers
            if worker.signature is None or (worker.calls and not other.asynchronous)
        )
        return not busy or busy + job.reward.threads <= self.limit

    def _handle_messages(self, job: ScoringJob, worker: WorkerProcess) -> None:
        messages = worker.messages()
        for message in messages or ():
            if isinstance(message, Ready):
                job.check_signature(message.signature)
            elif isinstance(message, Broken):
                raise UserError(f"{job.label} cannot be loaded: {message.message}")
            elif isinstance(message, Done):
                job.record(message)
            elif isinstance(message, Failed):
                job.record_failure(message)
        if messages is None:
            cause = worker.fault or describe_exit(worker.kill())
            if worker.signature is None:
                raise UserError(f"{job.label} {cause} while it was imported; import it in Python to see why")
            self._remove(job, worker, cause)
        elif worker.signature is None and time.monotonic() - worker.since > IMPORT_SECONDS:
            raise UserError(
                f"{job.label} was not imported within {IMPORT_SECONDS / 60:g} minutes; import it in Python to see why"
            )
        elif worker.next_end() < time.monotonic():
            self._remove(job, worker, None)

    def _remove(self, job: ScoringJob, worker: WorkerProcess, cause: str | None) -> None:
        """Kills a worker, fails the call in progress, and requeues its other calls.

        If it is unknown which call is at fault, all are retried one by one: when several async calls were in progress,
        or when the function corrupted the connection so that no more results arrived.

        Args:
            job: the worker's job.
            worker: a worker that is dead or past its deadline.
            cause: how it died; None if its call is late.
        """
        worker.kill()
        self.workers[job].remove(worker)
        begun = {} if worker.disturbed else worker.began()
        if worker.disturbed or cause is None or not worker.answered:  # otherwise it died between two calls
            begun = begun or dict.fromkeys(worker.calls, worker.since)
        job.put_back([number for number in worker.calls if number not in begun], alone=False)
        if len(begun) == 1:
            [(guilty, began)] = begun.items()
            job.record_failure(Failed(guilty, time.monotonic() - began, raised=cause, late=cause is None))
        else:
            job.put_back(list(begun), alone=True)


def _in_thread(call: Callable[[], T]) -> Future[T]:
    """Calls a function in a thread that does not delay the end of the process, as after Ctrl-C."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # also IncompatibleEngine
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future
