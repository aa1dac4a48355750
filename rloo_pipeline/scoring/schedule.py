"""Which worker process calls which reward function when, until every row of a table is scored.

Functions come in the order of the configuration, and each has workers of its own, so that none finds what another left
behind. Every function's first worker starts at once: a function that cannot be used is known early. Async functions
wait more than they compute: they have one worker each, which is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from rloo_pipeline.errors import UserError
from rloo_pipeline.scoring.job import Job
from rloo_pipeline.scoring.messages import Broken, Done, Failed, Ready
from rloo_pipeline.scoring.pool import GRACE, Worker, fate

if TYPE_CHECKING:
    from rloo_pipeline.config import Reward

IMPORT_SECONDS = 600.0
"""In which a function must be loaded."""
LOOK_SECONDS = 1.0
"""At least so often it is looked whether processes still live."""


class WorkerPools:
    """The workers of some reward functions. They start as soon as this is made, and are at their imports while the
    caller still reads its tables; leaving the block ends them all.
    """

    def __init__(self, rewards: Sequence[Reward], limit: int) -> None:
        """Starts workers; at most `limit` threads of them will compute at a time."""
        self.limit = limit
        self.rewards = list(rewards)
        self.dismissed: list[Worker] = []
        self.jobs = [Job(reward) for reward in self.rewards]
        self.started = [[_worker(reward)] for reward in self.rewards]
        main = next((place for place, reward in enumerate(self.rewards) if _most(reward, self.limit) > 1), None)
        if main is not None:
            more = max(0, (self.limit - len(self.rewards)) // self.rewards[main].threads)
            self.started[main] += [_worker(self.rewards[main]) for _ in range(more)]

    def __enter__(self) -> WorkerPools:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Ends all workers: those whose work is done by themselves, and the others at once."""
        for worker in self.dismissed:
            worker.end()
        for crew in self.started:
            for worker in crew:
                worker.kill()

    def run(self) -> None:
        """Does the functions' jobs, in their order.

        Raises:
            UserError: a function cannot be loaded or used, or fails.
        """
        schedule = Schedule(self.jobs, self.started, self.limit, self.dismissed)
        while schedule.step():
            pass


class Schedule:
    """The workers of each job."""

    def __init__(self, jobs: Sequence[Job], crews: Sequence[list[Worker]], limit: int, dismissed: list[Worker]) -> None:
        """Args: the jobs, the workers of each, how many may compute, and where workers go whose job is done."""
        self.limit, self.dismissed = limit, dismissed
        self.crews = dict(zip(jobs, crews, strict=True))

    def step(self) -> bool:
        """Hands out what can be done, waits for news and takes it in; False when there is nothing left."""
        self._hand_out()
        workers = [(job, worker) for job, crew in self.crews.items() for worker in crew]
        if not workers:
            return False
        soonest = min(worker.next_end(_grace(job)) for job, worker in workers) - time.monotonic()
        wait([worker.line.file for _, worker in workers], max(0.0, min(LOOK_SECONDS, soonest)))
        for job, worker in workers:
            self._hear(job, worker)
        return True

    def _hand_out(self) -> None:
        for job in list(self.crews):
            crew = self.crews[job]
            for worker in crew:
                if job.waiting and worker.idle and (job.asynchronous or self._free(job)):
                    worker.give(job.take(_most(job.reward, self.limit)))
            if self._needs_one_more(job, crew):
                crew.append(_worker(job.reward))
            if not job.waiting and not job.under_way:
                del self.crews[job]
                self._dismiss(crew)

    def _dismiss(self, crew: list[Worker]) -> None:
        for worker in crew:
            worker.dismiss()
        self.dismissed += crew
        crew.clear()

    def _needs_one_more(self, job: Job, crew: list[Worker]) -> bool:
        without_work = sum(not worker.calls for worker in crew)
        if not crew or job.asynchronous or len(job.waiting) <= without_work:
            return bool(job.waiting) and not crew
        return self._free(job) and len(crew) < _most(job.reward, self.limit)

    def _free(self, job: Job) -> bool:
        """Whether one more process of this function may compute; one that is being started counts."""
        busy = sum(
            other.reward.threads
            for other, crew in self.crews.items()
            for worker in crew
            if worker.signature is None or (worker.calls and not other.asynchronous)
        )
        return not busy or busy + job.reward.threads <= self.limit

    def _hear(self, job: Job, worker: Worker) -> None:
        messages = worker.messages()
        for message in messages or ():
            if isinstance(message, Ready):
                job.learn(message.signature)
            elif isinstance(message, Broken):
                raise UserError(f"{job.who} cannot be loaded: {message.message}")
            elif isinstance(message, Done):
                job.settle(message)
            elif isinstance(message, Failed):
                job.settle_failed(message)
        if messages is None:
            self._is_dead(job, worker)
        elif worker.signature is None and time.monotonic() - worker.since > IMPORT_SECONDS:
            raise UserError(f"{job.who} was not imported within {IMPORT_SECONDS / 60:g} minutes; see what it waits for")
        elif worker.overdue(_grace(job)):
            self._lose(job, worker, None)

    def _is_dead(self, job: Job, worker: Worker) -> None:
        what = fate(worker.kill())
        if worker.signature is None:
            raise UserError(f"{job.who} {what} while it was imported; import it in Python and see")
        self._lose(job, worker, what)

    def _lose(self, job: Job, worker: Worker, what: str | None) -> None:
        """Kills a worker, blames the call that it was at, and has the others wait again.

        Of several async calls it is not known which one it was: those that had begun are made again one by one.
        """
        worker.kill()
        self.crews[job].remove(worker)
        begun = worker.began() or dict.fromkeys(list(worker.calls)[:1], worker.since)
        suspects = begun if len(begun) > 1 else {}
        guilty = next(iter(begun), None) if not suspects else None
        job.put_back([number for number in worker.calls if number not in begun], alone=False)
        job.put_back(list(suspects), alone=True)
        if guilty is not None:
            seconds = time.monotonic() - begun[guilty]
            job.settle_failed(Failed(guilty, seconds, raised=what, late=what is None))


def _worker(reward: Reward) -> Worker:
    return Worker(reward.function, reward.options, reward.threads)


def _most(reward: Reward, limit: int) -> int:
    """Processes of a function that may compute at a time, of so many threads. A model on a GPU is loaded once."""
    return 1 if reward.batch == "all" or reward.gpus else max(1, limit // reward.threads)


def _grace(job: Job) -> float:
    """An async call stops itself at its deadline, unless it does not let go of the loop."""
    return GRACE if job.asynchronous else 0.0
