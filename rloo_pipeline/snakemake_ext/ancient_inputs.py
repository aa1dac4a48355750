"""Snakemake finds every job that must run, also behind an `ancient` input.

Once it knows that a job must run, Snakemake (9.27) looks at none of the jobs behind it: they would run because of it.
But a job that has its input as `ancient` does not, so one that must run for a reason of its own, such as a changed
parameter or an older input, is overlooked, and the call ends as if all were done. Here the jobs behind an `ancient`
input are looked at like all others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any


def see_behind() -> None:
    """Makes it so in this process."""
    from snakemake.dag import DAG

    everywhere = DAG.bfs

    def bfs(self: Any, direction: Any, *jobs: Any, **words: Any) -> Iterator[Any]:
        # the jobs behind one, as update_needrun asks for them; leaving out jobs (--omit-from) is another thing
        if direction is self.depending and not words and not (self.omitrules or self.omitfiles):
            return _walk(direction, *jobs)
        found: Iterator[Any] = everywhere(self, direction, *jobs, **words)
        return found

    DAG.bfs = bfs


def _walk(depending: Any, *jobs: Any) -> Iterator[Any]:
    """The jobs that run because of others, and these."""
    queue = deque(jobs)
    visited = set(jobs)
    while queue:
        job = queue.popleft()
        yield job
        for behind, files in depending[job].items():
            if behind not in visited and not all(file.is_ancient for file in files):
                visited.add(behind)
                queue.append(behind)
