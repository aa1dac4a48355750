"""Which worker process calls which reward function when, until every row of a table is scored.

Functions come in the order of the configuration, and each has workers of its own, so that none finds what another left
behind. Every function's first worker starts at once: a function that cannot be used is known early. Async functions
wait more than they compute: they have one worker each, which is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import wait

from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.job import Job
from rloo_pipeline.rewards.pool import GRACE, Worker, fate
from rloo_pipeline.rewards.worker import Broken, Done, Ready

IMPORT_SECONDS = 600.0
"""In which a function must be loaded."""
LOOK_SECONDS = 1.0
"""At least so often it is looked whether processes still live."""


def run(jobs: Sequence[Job], limit: int) -> None:
    """Does all jobs, with at most `limit` processes computing at a time.

    Raises:
        UserError: a function cannot be loaded or used, or fails.
    """
    schedule = Schedule(jobs, limit)
    try:
        while schedule.step():
            pass
    finally:
        schedule.end()


class Schedule:
    """The workers of each job."""

    def __init__(self, jobs: Sequence[Job], limit: int) -> None:
        self.limit = limit
        self.crews: dict[Job, list[Worker]] = {job: [_worker(job)] for job in jobs if job.waiting}
        self.dismissed: list[Worker] = []

    def step(self) -> bool:
        """Hands out what can be done, waits for news and takes it in; False when there is nothing left."""
        self._hand_out()
        workers = [(job, worker) for job, crew in self.crews.items() for worker in crew]
        if not workers:
            return False
        soonest = min(worker.next_end(_grace(job)) for job, worker in workers) - time.monotonic()
        wait([worker.connection for _, worker in workers], max(0.0, min(LOOK_SECONDS, soonest)))
        for job, worker in workers:
            self._hear(job, worker)
        return True

    def _hand_out(self) -> None:
        for job in list(self.crews):
            crew = self.crews[job]
            for worker in crew:
                if job.waiting and worker.idle and (job.asynchronous or self._free()):
                    worker.give(*job.take(self.limit))
            if job.waiting and (not crew or (not job.asynchronous and self._free() and len(crew) < self.limit)):
                crew.append(_worker(job))
            if not job.waiting and not job.under_way:
                for worker in self.crews.pop(job):
                    worker.dismiss()
                    self.dismissed.append(worker)

    def _free(self) -> bool:
        """Whether one more process may compute; one that is being started counts."""
        return self.limit > sum(
            worker.signature is None or (bool(worker.calls) and not job.asynchronous)
            for job, crew in self.crews.items()
            for worker in crew
        )

    def _hear(self, job: Job, worker: Worker) -> None:
        messages = worker.messages()
        for message in messages or ():
            if isinstance(message, Ready):
                job.learn(message.signature)
            elif isinstance(message, Broken):
                raise UserError(f"{job.who} cannot be loaded: {message.message}")
            elif isinstance(message, Done):
                job.settle(message)
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
            job.settle(Done(guilty, seconds, raised=what, late=what is None))

    def end(self) -> None:
        """Ends all processes: those that are at work at once, the others by themselves."""
        for crew in self.crews.values():
            for worker in crew:
                worker.kill()
        for worker in self.dismissed:
            worker.end()


def _worker(job: Job) -> Worker:
    return Worker(job.reward.function, job.reward.options, dict(job.facts))


def _grace(job: Job) -> float:
    """An async call stops itself at its deadline, unless it does not let go of the loop."""
    return GRACE if job.asynchronous else 0.0
