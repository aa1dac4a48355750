"""The rows of a table on their way through one reward function, and what becomes of rows that fail or take too long.

A call is made with the K completions of a prompt (`batch: rows` or `group`) or with the whole table (`all`), whatever
the number of workers, so that no result depends on that. Where a call of `batch: rows` is over its deadline, raises, or
takes its process down, its rows are tried one by one.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.errors import UserError, did_you_mean
from rloo_pipeline.scoring.calls import OWN_ARGUMENTS, Scores, Signature, rows_text
from rloo_pipeline.scoring.messages import Done, Failed, Work

if TYPE_CHECKING:
    from rloo_pipeline.config import Reward

LEAST_SECONDS, CHUNK_SECONDS = 0.005, 0.1
"""Work that is handed to a worker at once, as far as can be told from the calls before. It makes the calls one by one
all the same.
"""
MOST_ROWS = 8192
"""Rows that are handed to a worker at once, at most."""


class Pace(NamedTuple):
    """How fast a function is, as far as it is known."""

    rows: int = 0
    """That were scored."""
    seconds: float = 0.0


class WorkerError(Exception):
    """A traceback from a worker process, for the log."""


class Whole:
    """A call that raised and whose rows are tried one by one to find which."""

    def __init__(self, rows: range, what: str) -> None:
        self.rows, self.what, self.left = rows, what, len(rows)


class Piece(NamedTuple):
    """Neighbouring rows for one call."""

    first: int
    end: int
    alone: bool = False
    """Not beside other async calls: one of several took the process down, and it is to be seen which."""
    whole: Whole | None = None

    @property
    def rows(self) -> range:
        """The rows of the table."""
        return range(self.first, self.end)


class Job:
    """All calls of one reward function."""

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self.who = f"reward '{reward.column}' ({reward.function})"
        self.offered: Mapping[str, list[Any]] = {}
        self.facts: dict[str, Any] = {}
        self.advance: Callable[[int], object] = int
        self.scores: Scores = []
        self.errors: list[str | None] = []
        """Why a row has no score where the function failed; notes: where the function itself said why."""
        self.notes: list[str | None] = []
        self.seconds: list[float] = []
        self.waiting: list[Piece] = []
        """In the order of the table, so that the first row that fails is the one that is named."""
        self.under_way: dict[int, Piece] = {}
        self.signature: Signature | None = None
        self.late = 0
        self._number = 1
        self.pace = Pace()

    def add(
        self,
        offered: Mapping[str, list[Any]],
        samples: Sequence[int],
        facts: Mapping[str, Any],
        advance: Callable[[int], object],
    ) -> None:
        """Takes in the rows of the table.

        Args:
            offered: their columns.
            samples: how many neighbouring rows each prompt has.
            facts: further arguments, the same for all rows.
            advance: is told of rows that are done.
        """
        ends = list(accumulate(samples, initial=0))
        self.offered, self.facts, self.advance = offered, dict(facts), advance
        for column in (self.scores, self.errors, self.notes):
            column.extend([None] * ends[-1])
        self.seconds += [0.0] * ends[-1]
        if self.reward.batch == "all":
            ends = [0, ends[-1]]
        self.waiting += [Piece(first, end) for first, end in pairwise(ends) if first < end]

    def learn(self, signature: Signature) -> None:
        """Takes note of what the function takes.

        Raises:
            UserError: it needs something that is not there, or an option that it does not take.
        """
        for option in self.reward.options:
            if option not in signature.named:
                near = did_you_mean(option, signature.named)
                raise UserError(f"{self.who} takes no option '{option}'{near}")
        for name in signature.required:
            if not any(name in known for known in (self.offered, self.reward.options, self.facts)):
                if name == "completion_ids":
                    raise UserError(
                        f"{self.who} takes token ids and there are none; give a --tokenizer, or --completions with a "
                        "column 'completion_ids'"
                    )
                columns = [column for column in self.offered if column not in OWN_ARGUMENTS]
                near = did_you_mean(name, columns, 0.8) or f"; there are {', '.join(sorted(columns))}"
                raise UserError(f"{self.who} needs a column '{name}', which the dataset lacks{near}")
        self.signature = signature

    @property
    def asynchronous(self) -> bool:
        """Whether calls run beside each other in one process."""
        return self.signature is not None and self.signature.asynchronous

    def take(self, workers: int) -> Work:
        """The next calls for one of so many workers."""
        at_once = 1
        alone = next((place for place, piece in enumerate(self.waiting) if piece.alone), None)
        if self.asynchronous and alone is not None:
            first, end = alone, alone + 1
        elif self.asynchronous:
            first, end = 0, self._neighbours(len(self.waiting))
            at_once = max(1, self.reward.concurrency // max(len(piece.rows) for piece in self.waiting[:end]))
        else:
            first, end = 0, self._neighbours(self._chunk(workers))
        pieces = self.waiting[first:end]
        del self.waiting[first:end]
        return self._work(pieces, at_once)

    def _chunk(self, workers: int) -> int:
        """How many calls to hand over: about CHUNK_SECONDS of work, and less towards the end, so that all workers end
        at about the same time.
        """
        rows, seconds = self.pace
        if not rows:
            return 1
        calls_a_second = rows / (len(self.waiting[0].rows) * max(seconds, 1e-9))
        share = max(len(self.waiting) // (2 * workers), int(LEAST_SECONDS * calls_a_second))
        most = min(CHUNK_SECONDS * calls_a_second, MOST_ROWS / len(self.waiting[0].rows))
        return max(1, int(min(share, most)))

    def _neighbours(self, most: int) -> int:
        """How many of the pieces that wait, `most` of them, are without a gap between their rows."""
        for place, (one, other) in enumerate(pairwise(self.waiting[:most]), 1):
            if one.end != other.first:
                return place
        return most

    def _work(self, pieces: list[Piece], at_once: int) -> Work:
        assert self.signature
        first, end, number = pieces[0].first, pieces[-1].end, self._number
        self._number += len(pieces)
        self.under_way.update(zip(range(number, self._number), pieces, strict=True))
        names = [name for name in self.signature.takes(self.offered) if name not in self.reward.options]
        columns = {name: self.offered[name][first:end] for name in names}
        counts = [piece.end - piece.first for piece in pieces]
        return Work(number, first, counts, [*map(self._deadline, counts)], columns, self.facts, at_once)

    def _deadline(self, rows: int) -> float:
        return self.reward.timeout * (1 if self.reward.batch == "rows" else rows)

    def put_back(self, numbers: Sequence[int], alone: bool) -> None:
        """Calls that were handed over and not made, or not blamed, wait again."""
        for number in numbers:
            piece = self.under_way.pop(number)
            insort(self.waiting, piece._replace(alone=alone or piece.alone), key=attrgetter("first"))

    def settle(self, done: Done) -> None:
        """Takes in the scores of calls.

        Raises:
            UserError: the rows of a call that failed were scored one by one, and the configuration does not let that
                pass.
        """
        for number, seconds, scores in zip(done.numbers, done.seconds, done.scores, strict=True):
            piece = self.under_way.pop(number)
            self.scores[piece.first : piece.end] = scores
            self._count_time(piece, seconds)
            if piece.whole:
                self._is_over_one_of(piece.whole)
        for row, note in done.notes.items():
            self.notes[row] = f"{self.reward.column} {note}"
        made = sum(map(len, done.scores))
        self.pace = Pace(self.pace.rows + made, self.pace.seconds + sum(done.seconds))
        self.advance(made)

    def _count_time(self, piece: Piece, seconds: float) -> None:
        share = seconds / (piece.end - piece.first)
        for row in range(piece.first, piece.end):
            self.seconds[row] += share

    def settle_failed(self, failed: Failed) -> None:
        """Takes in a call that gave no scores.

        Raises:
            UserError: the output is bad, or the configuration does not let the failure pass.
        """
        piece = self.under_way.pop(failed.number)
        self._count_time(piece, failed.seconds)
        if failed.bad is not None:
            raise UserError(f"{self.who} {failed.bad}")
        if failed.late:
            self._is_late(piece)
        else:
            self._has_failed(piece, str(failed.raised), failed.traceback)

    def _is_over_one_of(self, whole: Whole) -> None:
        whole.left -= 1
        if whole.left == 0 and self.reward.on_error == "fail":
            raise UserError(
                f"{self.who} {whole.what} for {rows_text(whole.rows)} together and for none of them alone; "
                "mend the function, or set its batch to group where it compares completions"
            )

    def _is_late(self, piece: Piece) -> None:
        if self._splits(piece):
            self._split(piece, None)
            return
        what = f"took over {self._deadline(len(piece.rows)):g} s"
        if self.reward.on_timeout == "fail":
            raise UserError(
                f"{self.who} {what} for {rows_text(piece.rows)}; raise its timeout, or set its on_timeout to none or "
                "value"
            )
        self.late += len(piece.rows)
        self._unscored(piece, what, self.reward.timeout_value if self.reward.on_timeout == "value" else None)

    def _has_failed(self, piece: Piece, what: str, traceback: str) -> None:
        if self._splits(piece):
            self._split(piece, Whole(piece.rows, what))
            return
        if self.reward.on_error == "fail":
            raise UserError(
                f"{self.who} {what} for {rows_text(piece.rows)}; mend the function, or set its on_error to none to "
                "leave such rows unscored"
            ) from WorkerError(traceback or what)
        self._unscored(piece, what, None)

    def _unscored(self, piece: Piece, what: str, score: float | None) -> None:
        for row in piece.rows:
            self.scores[row], self.errors[row] = score, f"{self.reward.column} {what}"
        self.advance(len(piece.rows))
        if piece.whole:
            self._is_over_one_of(piece.whole)

    def _splits(self, piece: Piece) -> bool:
        return self.reward.batch == "rows" and len(piece.rows) > 1

    def _split(self, piece: Piece, whole: Whole | None) -> None:
        for row in piece.rows:
            insort(self.waiting, Piece(row, row + 1, piece.alone, whole), key=attrgetter("first"))
