"""The rows of a table on their way through one reward function, and what becomes of rows that fail or take too long.

A call is made with the K completions of a prompt (`batch: rows` or `group`) or with the whole table (`all`), whatever
the number of workers, so that no result depends on that. Where a call of `batch: rows` is over its deadline, raises, or
takes its process down, its rows are tried one by one.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.errors import UserError, did_you_mean
from rloo_pipeline.rewards.calls import Scores, Signature, rows_text
from rloo_pipeline.rewards.worker import Call, Done

if TYPE_CHECKING:
    from rloo_pipeline.config import Reward

MOST_ROWS = 512
"""Rows that are handed to a worker at once; it calls the function group by group all the same."""


class WorkerError(Exception):
    """A traceback from a worker process, for the log."""


class Whole:
    """A call that raised and whose rows are tried one by one to find which."""

    def __init__(self, rows: tuple[int, ...], what: str) -> None:
        self.rows, self.what, self.left = rows, what, len(rows)


class Piece(NamedTuple):
    """Rows for one call."""

    rows: tuple[int, ...]
    alone: bool = False
    """Not beside other async calls: one of several took the process down, and it is to be seen which."""
    whole: Whole | None = None


class Job:
    """All calls of one reward function."""

    def __init__(
        self,
        reward: Reward,
        offered: Mapping[str, Sequence[Any]],
        groups: Sequence[tuple[int, ...]],
        advance: Callable[[int], None],
        facts: Mapping[str, Any],
    ) -> None:
        count = sum(map(len, groups))
        self.reward, self.offered, self.advance, self.facts = reward, offered, advance, facts
        self.who = f"reward '{reward.column}' ({reward.function})"
        self.scores: Scores = [None] * count
        self.errors: list[str | None] = [None] * count
        self.seconds = [0.0] * count
        whole = tuple(row for rows in groups for row in rows)
        self.waiting = list(map(Piece, [whole] if reward.batch == "all" and whole else groups))
        """In the order of the table, so that the first row that fails is the one that is named."""
        self.under_way: dict[int, Piece] = {}
        self.signature: Signature | None = None
        self.late = 0
        self._numbers = 0

    def learn(self, signature: Signature) -> None:
        """Takes note of what the function takes.

        Raises:
            UserError: it needs something that is not there, or an option that it does not take.
        """
        for name in signature.required:
            if not any(name in known for known in (self.offered, self.reward.options, self.facts)):
                near = did_you_mean(name, self.offered) or f"; there are {', '.join(sorted(self.offered))}"
                raise UserError(f"{self.who} needs a column '{name}', which the dataset lacks{near}")
        for option in self.reward.options:
            if option not in signature.named:
                near = did_you_mean(option, signature.named)
                raise UserError(f"{self.who} takes no option '{option}'{near}")
        self.signature = signature

    @property
    def asynchronous(self) -> bool:
        """Whether calls run beside each other in one process."""
        return self.signature is not None and self.signature.asynchronous

    def take(self, workers: int) -> tuple[list[Call], int]:
        """The next calls for one of so many workers, and how many of them may be under way at once."""
        alone = next((piece for piece in self.waiting if piece.alone), None)
        if self.asynchronous and alone:
            self.waiting.remove(alone)
            return [self._call(alone)], 1
        if self.asynchronous:
            taken, self.waiting = self.waiting, []
            largest = max(len(piece.rows) for piece in taken)
            return [self._call(piece) for piece in taken], max(1, self.reward.concurrency // largest)
        about = len(self.waiting) * len(self.waiting[0].rows)
        left = min(MOST_ROWS, about // (4 * workers))
        count = 1
        while count < len(self.waiting) and (left := left - len(self.waiting[count - 1].rows)) > 0:
            count += 1
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return [self._call(piece) for piece in taken], 1

    def _call(self, piece: Piece) -> Call:
        assert self.signature
        self._numbers += 1
        self.under_way[self._numbers] = piece
        names = [name for name in self.signature.takes(self.offered) if name not in self.reward.options]
        arguments = {name: [self.offered[name][row] for row in piece.rows] for name in names}
        return Call(self._numbers, piece.rows, arguments, self._deadline(piece))

    def _deadline(self, piece: Piece) -> float:
        return self.reward.timeout * (1 if self.reward.batch == "rows" else len(piece.rows))

    def put_back(self, numbers: Sequence[int], alone: bool) -> None:
        """Calls that were handed over and not made, or not blamed, wait again."""
        for number in numbers:
            piece = self.under_way.pop(number)
            insort(self.waiting, piece._replace(alone=alone or piece.alone))

    def settle(self, done: Done) -> None:
        """Takes in what came of a call.

        Raises:
            UserError: the output is bad, or the call failed and the configuration does not let that pass.
        """
        piece = self.under_way.pop(done.number)
        for row in piece.rows:
            self.seconds[row] += done.seconds / len(piece.rows)
        if done.bad is not None:
            raise UserError(f"{self.who} {done.bad}")
        if done.late:
            self._is_late(piece)
        elif done.scores is None:
            self._has_failed(piece, str(done.raised), done.traceback)
        else:
            for row, score in zip(piece.rows, done.scores, strict=True):
                self.scores[row] = score
            self._is_over(piece)

    def _is_over(self, piece: Piece) -> None:
        self.advance(len(piece.rows))
        if piece.whole is None:
            return
        piece.whole.left -= 1
        if piece.whole.left == 0 and self.reward.on_error == "fail":
            raise UserError(
                f"{self.who} {piece.whole.what} for {rows_text(piece.whole.rows)} together and for none of them alone; "
                "mend the function, or set its batch to group where it compares completions"
            )

    def _is_late(self, piece: Piece) -> None:
        if self._splits(piece):
            self._split(piece, None)
            return
        what = f"took over {self._deadline(piece):g} s"
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
        self._is_over(piece)

    def _splits(self, piece: Piece) -> bool:
        return self.reward.batch == "rows" and len(piece.rows) > 1

    def _split(self, piece: Piece, whole: Whole | None) -> None:
        for row in piece.rows:
            insort(self.waiting, Piece((row,), piece.alone, whole))
