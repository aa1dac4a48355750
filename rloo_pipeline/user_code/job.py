"""Plans the calls of one reward function on a table, and handles rows that fail or time out.

A call covers the K completions of a prompt (`batch: rows` or `group`) or the whole table (`all`). This does not depend
on the number of workers, so neither do scores. A call with `batch: rows` that exceeds its deadline, raises, or kills
its process is retried row by row.
"""

from bisect import insort
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise, starmap, takewhile
from operator import attrgetter
from typing import Any, NamedTuple

from rloo_pipeline.config import Reward
from rloo_pipeline.errors import UserError, did_you_mean
from rloo_pipeline.user_code.messages import CallBatch, Done, Failed, TimedCall
from rloo_pipeline.user_code.reward_call import OF_TRAINER, OTHERS, OWN_ARGUMENTS, Signature, rows_text
from rloo_pipeline.user_code.score_batch import FunctionScores
from rloo_pipeline.user_code.worker_process import WorkerProcess

LEAST_SECONDS, BATCH_SECONDS = 0.005, 0.1
"""Estimated seconds of work sent to a worker at once. It still makes the calls one by one."""
MOST_ROWS = 8192
"""Maximum number of rows sent to a worker at once."""


class WorkerError(Exception):
    """A traceback from a worker process, for the log."""


class SplitCall:
    """A call that raised, and whose rows are retried one by one."""

    def __init__(self, rows: range, failure: str) -> None:
        self.rows, self.failure, self.remaining = rows, failure, len(rows)


class PlannedCall(NamedTuple):
    """A call still to be made, on consecutive rows of the table."""

    rows: range
    alone: bool = False
    """Send without other calls: one of several killed the process, and this shows which."""
    split_from: SplitCall | None = None


class ScoringJob:
    """All calls of one reward function."""

    def __init__(
        self,
        reward: Reward,
        offered: Mapping[str, list[Any]],
        samples: Sequence[int],
        constants: Mapping[str, Any],
        workers: list[WorkerProcess],
    ) -> None:
        """Plans the calls.

        Args:
            reward: the function.
            offered: arguments with one entry per row.
            samples: number of consecutive rows of each prompt.
            constants: extra arguments, the same for all rows.
            workers: the function's processes, which the dispatcher adds to and removes from.
        """
        self.reward = reward
        self.label = f"reward '{reward.column}' ({reward.function})"
        self.offered, self.constants, self.workers = offered, dict(constants), workers
        ends = list(accumulate(samples, initial=0))
        missing = [None] * ends[-1]
        self.results = FunctionScores([*missing], [*missing], [*missing], [0.0] * ends[-1])
        if reward.batch == "all":
            ends = [0, ends[-1]]
        self.waiting = [PlannedCall(rows) for rows in starmap(range, pairwise(ends)) if rows]
        """Calls in the order of the table, so that errors name the first row that fails."""
        self.under_way: dict[int, PlannedCall] = {}
        self.signature: Signature | None = None
        self._number = 1
        self._scored, self._seconds = 0, 0.0
        """Rows that were scored so far, and the seconds that they took."""

    def check_signature(self, signature: Signature) -> None:
        """Checks and stores the function's parameters.

        Raises:
            UserError: a required parameter has no argument, an option is not a parameter, or a judge has no parameter
                for the other completions.
        """
        if OTHERS in self.offered and OTHERS not in signature.named:
            raise UserError(f"{self.label} has no parameter '{OTHERS}', so it compares nothing; a judge needs it")
        for option in self.reward.options:
            if option not in signature.named:
                hint = did_you_mean(option, signature.named)
                raise UserError(f"{self.label} takes no option '{option}'{hint}")
        for name in signature.required:
            if not any(name in source for source in (self.offered, self.reward.options, self.constants)):
                if name == "completion_ids":
                    raise UserError(
                        f"{self.label} takes token ids and there are none; give a --tokenizer, or --completions with a "
                        "column 'completion_ids'"
                    )
                if name in OF_TRAINER:
                    raise UserError(
                        f"{self.label} needs '{name}', which only TRL's trainer passes; give the parameter the default "
                        "None, and write the function so that it works without"
                    )
                columns = [column for column in self.offered if column not in OWN_ARGUMENTS]
                similar = did_you_mean(name, [*columns, *OWN_ARGUMENTS], 0.8)
                hint = similar or f"; there are {', '.join(sorted(columns))}"
                raise UserError(f"{self.label} needs a column '{name}', which the dataset lacks{hint}")
        self.signature = signature

    @property
    def asynchronous(self) -> bool:
        """True if several calls run concurrently in one process."""
        return self.signature is not None and self.signature.asynchronous

    def take(self, workers: int) -> CallBatch:
        """Removes the next calls for one of `workers` workers from `waiting`."""
        most = len(self.waiting) if self.asynchronous else self._batch_size(workers)
        calls = list(takewhile(lambda call: not call.alone, self.waiting[:most])) or self.waiting[:1]
        del self.waiting[: len(calls)]
        return self._batch(calls)

    def _batch_size(self, workers: int) -> int:
        """Number of calls to send at once: about BATCH_SECONDS of work, less near the end so that workers finish
        together.
        """
        if not self._scored:
            return 1
        calls_per_second = self._scored / (len(self.waiting[0].rows) * max(self._seconds, 1e-9))
        share = max(len(self.waiting) // (2 * workers), int(LEAST_SECONDS * calls_per_second))
        most = min(BATCH_SECONDS * calls_per_second, MOST_ROWS / len(self.waiting[0].rows))
        return max(1, int(min(share, most)))

    def _batch(self, calls: list[PlannedCall]) -> CallBatch:
        assert self.signature
        rows = [row for call in calls for row in call.rows]
        numbered = dict(enumerate(calls, self._number))
        self._number += len(calls)
        self.under_way |= numbered
        names = [name for name in self.signature.takes(self.offered) if name not in self.reward.options]
        columns = {name: [self.offered[name][row] for row in rows] for name in names}
        timed = {number: TimedCall(call.rows, self._deadline(len(call.rows))) for number, call in numbered.items()}
        at_once = max(1, self.reward.concurrency // max(len(call.rows) for call in calls))
        return CallBatch(timed, columns, self.constants, at_once)

    def _deadline(self, rows: int) -> float:
        return self.reward.timeout * (1 if self.reward.batch == "rows" else rows)

    def put_back(self, numbers: Sequence[int], alone: bool) -> None:
        """Requeues calls of a dead worker that neither finished nor failed."""
        for number in numbers:
            call = self.under_way.pop(number)
            self._wait(call._replace(alone=alone or call.alone))

    def record(self, done: Done) -> int:
        """Records the scores of calls. Returns the number of rows that are done.

        Raises:
            UserError: a call failed although each of its rows can be scored alone, and `on_error` is `fail`.
        """
        for number, seconds, scores in zip(done.numbers, done.seconds, done.scores, strict=True):
            call = self.under_way.pop(number)
            self.results.scores[call.rows.start : call.rows.stop] = scores
            self._finish(call, seconds)
        for row, note in done.notes.items():
            self.results.notes[row] = f"{self.reward.column} {note}"
        rows = sum(map(len, done.scores))
        self._scored += rows
        self._seconds += sum(done.seconds)
        return rows

    def _finish(self, call: PlannedCall, seconds: float) -> None:
        for row in call.rows:
            self.results.seconds[row] += seconds / len(call.rows)
        if call.split_from:
            self._count_split(call.split_from)

    def record_failure(self, failed: Failed) -> int:
        """Records a call without scores, or splits it into rows. Returns the number of rows that are done.

        Raises:
            UserError: the output is bad, or `on_error` or `on_timeout` is `fail`.
        """
        call = self.under_way.pop(failed.number)
        if failed.bad is not None:
            raise UserError(f"{self.label} {failed.bad}")
        failure = f"took over {self._deadline(len(call.rows)):g} s" if failed.late else str(failed.raised)
        if self.reward.batch == "rows" and len(call.rows) > 1:
            split = None if failed.late else SplitCall(call.rows, failure)
            for row in call.rows:
                self._wait(PlannedCall(range(row, row + 1), call.alone, split))
                self.results.seconds[row] += failed.seconds / len(call.rows)
            return 0
        if failed.late:
            outcome, advice = self.reward.on_timeout, "raise its timeout, or set its on_timeout to none or a score"
        else:
            outcome = self.reward.on_error
            advice = "fix the function, or set its on_error to none to leave such rows unscored"
        if outcome == "fail":
            cause = None if failed.late else WorkerError(failed.traceback or failure)
            raise UserError(f"{self.label} {failure} for {rows_text(call.rows)}; {advice}") from cause
        for row in call.rows:
            self.results.scores[row] = None if isinstance(outcome, str) else outcome
            self.results.errors[row] = f"{self.reward.column} {failure}"
        self._finish(call, failed.seconds)
        return len(call.rows)

    def _count_split(self, split: SplitCall) -> None:
        split.remaining -= 1
        if split.remaining == 0 and self.reward.on_error == "fail":
            raise UserError(
                f"{self.label} {split.failure} for {rows_text(split.rows)} together and for none of them alone; "
                "fix the function, or set its batch to group if it compares completions"
            )

    def _wait(self, call: PlannedCall) -> None:
        insort(self.waiting, call, key=attrgetter("rows.start"))
