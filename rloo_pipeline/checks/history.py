"""The metrics of a run up to some round, as the functions of `symptoms` read them."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from math import sqrt
from typing import Any, NamedTuple

Metrics = Mapping[str, float | None]
START = 3
"""Number of rounds that count as the start of a run, and as its latest rounds."""
ERRORS = 4
"""Standard errors that a change exceeds if it is not noise. A gate looks at every round and every monitor: beside a
reward that rises, three monitors that only vary by chance exceed 3 in 15% of runs of 100 rounds and in 25% of 300, and
4 in about 2%.
"""


class RoundHistory(NamedTuple):
    """A run up to and including some round."""

    rounds: Sequence[Metrics]
    """metrics.json of each round."""
    monitors: Sequence[str] = ()
    """Reward functions whose value should not fall."""
    evaluations: Mapping[int, Mapping[str, Any]] = {}
    """summary.json of each evaluation, by the policy's number."""
    planned: int | None = None
    """The run's last round; None if unknown."""

    @property
    def round(self) -> int:
        """The latest round."""
        return int(self.rounds[-1]["round"] or 0)

    def now(self, metric: str) -> float | None:
        """The latest round's value."""
        return self.rounds[-1].get(metric)

    def values(self, metric: str) -> list[float]:
        """The values of all rounds that have one."""
        return [value for metrics in self.rounds if (value := metrics.get(metric)) is not None]

    def start(self, metric: str) -> float | None:
        """Median of the first `START` values; None until there is a later one."""
        present = (value for metrics in self.rounds if (value := metrics.get(metric)) is not None)
        values = [*islice(present, START + 1)]
        return statistics.median(values[:START]) if len(values) > START else None

    def latest(self, metric: str) -> float | None:
        """Mean over the latest `START` rounds."""
        values = [value for metrics in self.rounds[-START:] if (value := metrics.get(metric)) is not None]
        return statistics.fmean(values) if values else None

    def rise(self, metric: str, spread: str) -> float | None:
        """Change of a metric from the start to the latest rounds, in units of the `spread` metric at the start."""
        start, latest, unit = self.start(metric), self.latest(metric), self.start(spread)
        return None if start is None or latest is None or not unit else (latest - start) / unit

    def is_noise(self, metric: str) -> bool:
        """True if the change of a metric from the start to the latest rounds is within its noise from round to round.

        The noise is half the mean squared difference of neighbours (von Neumann 1941), which a slow trend hardly
        changes. A mean of three rounds has 1/3 of this variance, a median of three 0.449 times it.
        """
        start, latest, values = self.start(metric), self.latest(metric), self.values(metric)
        if start is None or latest is None:
            return True
        variance = statistics.fmean((after - before) ** 2 for before, after in pairwise(values)) / 2
        return abs(latest - start) <= ERRORS * sqrt((1 / START + 0.449) * variance)
