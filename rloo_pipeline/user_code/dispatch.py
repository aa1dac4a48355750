"""Dispatches calls of reward functions to worker processes until every row of a table is scored.

Functions run in the order of the configuration. Each has its own workers, so that nothing one function leaves in its
process affects another. The first worker of every function starts at once, so a function that cannot be loaded is
reported early. An async function mostly waits for a service: it has one worker, which does not count as busy.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain
from threading import Thread
from types import MappingProxyType
from typing import Any, Self, TypeVar

from rloo_pipeline.config import Reward
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.progress import counting
from rloo_pipeline.user_code.job import ScoringJob
from rloo_pipeline.user_code.messages import Broken, Done, Failed, Ready
from rloo_pipeline.user_code.orphans import adopt_orphans, end_orphans, reap_orphans
from rloo_pipeline.user_code.process import EXIT_SECONDS, wait_for
from rloo_pipeline.user_code.score_batch import FunctionScores, RewardBatch
from rloo_pipeline.user_code.worker_process import REST_SECONDS, WorkerProcess

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
        for reward, workers in zip(self.rewards, self.started, strict=True):
            if workers and reward.most_processes(limit) > 1:  # the first such function gets the cores that are left
                wanted = 1 + max(0, (limit - len(self.rewards)) // reward.threads)
                workers += [WorkerProcess(reward) for _ in range(wanted - len(workers))]
                break
        self.jobs: list[ScoringJob] = []
        """The unfinished ones."""

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
            jobs = [
                ScoringJob(self.rewards[place], offered, samples, constants, self.started[place]) for place in places
            ]
            for job in jobs:
                for worker in job.workers:
                    if worker.signature is not None:
                        job.check_signature(worker.signature)
            self.jobs = list(jobs)
            while self.jobs:
                if done := self._step(more):
                    counter.advance(done)
                if beside.done():
                    beside.result()
        reap_orphans(self.others | {worker.process.pid for worker in chain(*self.started)})
        return {place: job.results for place, job in zip(places, jobs, strict=True)}

    def _step(self, more: bool) -> int:
        """Assigns calls, waits for messages and handles them. Returns the number of rows that are done."""
        for job in list(self.jobs):
            self._assign(job, more)
        pairs = [(job, worker) for job in self.jobs for worker in job.workers]
        wait_for([worker for _, worker in pairs], POLL_SECONDS if pairs else 0.0)
        return sum(self._handle_messages(job, worker) for job, worker in pairs)

    def _assign(self, job: ScoringJob, more: bool) -> None:
        for worker in job.workers:
            if job.waiting and worker.idle and (job.asynchronous or self._has_capacity(job)):
                worker.assign(job.take(job.reward.most_processes(self.limit)))
        if self._needs_worker(job):
            job.workers.append(WorkerProcess(job.reward))
        if not job.waiting and not job.under_way:
            self.jobs.remove(job)
            for worker in () if more else job.workers:
                if self.kept is not None and worker.idle and job.reward.is_model:
                    worker.rest()
                else:
                    worker.dismiss()

    def _needs_worker(self, job: ScoringJob) -> bool:
        if not job.workers:
            return bool(job.waiting)
        without_calls = sum(not worker.calls for worker in job.workers)
        if job.asynchronous or len(job.waiting) <= without_calls:
            return False
        return self._has_capacity(job) and len(job.workers) < job.reward.most_processes(self.limit)

    def _has_capacity(self, job: ScoringJob) -> bool:
        """True if one more process of this function may compute. A process that is still starting counts as busy."""
        busy = sum(
            other.reward.threads
            for other in self.jobs
            for worker in other.workers
            if worker.signature is None or (worker.calls and not other.asynchronous)
        )
        return not busy or busy + job.reward.threads <= self.limit

    def _handle_messages(self, job: ScoringJob, worker: WorkerProcess) -> int:
        """Handles a worker's messages, or its end. Returns the number of rows that are done."""
        done = 0
        for message in worker.messages():
            if isinstance(message, Done):
                done += job.record(message)
            elif isinstance(message, Failed):
                done += job.record_failure(message)
            elif isinstance(message, Ready):
                job.check_signature(message.signature)
            elif isinstance(message, Broken):
                raise UserError(f"{job.label} cannot be loaded: {message.message}")
        late = worker.next_end() < time.monotonic()
        if worker.signature is None and worker.lost:
            raise UserError(f"{job.label} {worker.lost} while it was imported; import it in Python to see why")
        if worker.signature is None and time.monotonic() - worker.since > IMPORT_SECONDS:
            raise UserError(
                f"{job.label} was not imported within {IMPORT_SECONDS / 60:g} minutes; import it in Python to see why"
            )
        return done + (self._remove(job, worker) if worker.lost or late else 0)

    def _remove(self, job: ScoringJob, worker: WorkerProcess) -> int:
        """Kills a worker that is lost or late, fails the call in progress, and requeues its other calls. Returns the
        number of rows that are done.

        If it is unknown which call is at fault, all are retried one by one: when several async calls were in progress,
        or when the function corrupted the connection so that no more results arrived.
        """
        worker.kill()
        job.workers.remove(worker)
        begun = {} if worker.disturbed else worker.began()
        if worker.disturbed or not worker.lost or not worker.answered:  # otherwise it died between two calls
            begun = begun or dict.fromkeys(worker.calls, worker.since)
        job.put_back([number for number in worker.calls if number not in begun], alone=False)
        if len(begun) != 1:
            job.put_back(list(begun), alone=True)
            return 0
        [(guilty, began)] = begun.items()
        return job.record_failure(Failed(guilty, time.monotonic() - began, raised=worker.lost, late=not worker.lost))


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
