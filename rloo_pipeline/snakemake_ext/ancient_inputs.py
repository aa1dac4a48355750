"""Snakemake finds every job that must run, also behind an `ancient` input.

Once Snakemake 9.27 knows that a job must run, it does not look at the jobs behind it, since they will run because of
it. But a job whose input from it is `ancient` will not, so one that must run for a reason of its own, such as a changed
parameter or an older input, is overlooked, and the call ends as if all were done (snakemake#4166 describes the same).
Here jobs behind an `ancient` input are looked at like all others.

Gates are such inputs: a gate's verdict on a round does not make it sample or train again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any


def find_all_jobs() -> None:
    """Changes Snakemake's DAG in this process."""
    import snakemake.api  # noqa: F401 - snakemake.dag cannot be imported before it
    from snakemake.dag import DAG

    search = DAG.bfs
    if search.__module__ == __name__:
        return

    def bfs(self: Any, direction: Any, *jobs: Any, **options: Any) -> Iterator[Any]:
        # update_needrun asks for the jobs behind one; --omit-from asks the same and means another thing
        if direction is self.depending and not options and not (self.omitrules or self.omitfiles):
            return _jobs_that_follow(direction, *jobs)
        everywhere: Iterator[Any] = search(self, direction, *jobs, **options)
        return everywhere

    DAG.bfs = bfs


def _jobs_that_follow(depending: Any, *jobs: Any) -> Iterator[Any]:
    """These jobs and those that run because of them."""
    queue = deque(jobs)
    visited = set(jobs)
    while queue:
        job = queue.popleft()
        yield job
        for behind, files in depending[job].items():
            if behind not in visited and not all(file.is_ancient for file in files):
                visited.add(behind)
                queue.append(behind)
