"""Detects user functions that were edited after a run began, so that a run never mixes two versions.

The key `functions` says what to do: stop with an error, keep the run's copies, or take the edited files.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from rloo_pipeline import frozen_functions
from rloo_pipeline.artifacts import function_copies
from rloo_pipeline.config import STAGES, Config
from rloo_pipeline.config.provenance import source_digest
from rloo_pipeline.config.run_set import RunSet
from rloo_pipeline.errors import UserError, counted
from rloo_pipeline.snakemake_ext.failures import RULES, stage_of

Facts = TypeVar("Facts")


class EditedFunctions:
    """The functions of a run or experiment: the current files and the frozen copies."""

    def __init__(self, runs: RunSet, folder: Path, in_job: bool = False) -> None:
        """Selects the copies if nothing was edited or if they are kept, otherwise the files.

        Args:
            runs: the configured runs.
            folder: folder of the run or experiment.
            in_job: True in a job, which always uses the copies.

        Raises:
            UserError: a copy was changed, or the file of a copy is missing.
        """
        self._runs, self._run = runs, folder
        self._copies = function_copies.folder_of(folder)
        self._relative = os.path.relpath(self._copies)
        self.keeps = runs.first.functions == "keep"
        self.edited: list[str] = []
        """Edited files, relative to the working folder."""
        self._stages: dict[str, set[str]] = {}
        frozen_functions.use(None)
        if not in_job:
            function_copies.restore(self._copies)
        if not (self._copies / frozen_functions.INDEX).exists():
            return
        if not in_job:
            function_copies.verify(self._copies)
            self._compare()
        frozen_functions.use(self._copies if in_job or self.keeps or not self.edited else None)

    def _compare(self) -> None:
        before = self._facts_from(self._copies, _files)
        try:
            now = self._facts_from(None, _files)
        except UserError as error:
            if not self.keeps:
                raise UserError(f"{error}; to go on with the copy in {self._relative}, {KEEP}") from None
            self.edited = [os.path.relpath(file) for file in before if not frozen_functions.exists(file)]
            return
        changed = sorted(file for file in before.keys() | now.keys() if before.get(file) != now.get(file))
        self.edited = [os.path.relpath(file) for file in changed]
        if changed and not self.keeps:
            earlier, digests = self._facts_from(self._copies, _digests), self._facts_from(None, _digests)
            for run, stage in digests:
                if digests[run, stage] != earlier[run, stage]:
                    self._stages.setdefault(run, set()).add(stage)

    def _facts_from(self, copies: Path | None, facts_of: Callable[[dict[str, Config]], Facts]) -> Facts:
        """Facts about the functions of the runs, from their copies or, with None, from the files."""
        frozen_functions.use(copies)
        return facts_of(self._runs.by_folder)

    def notice(self) -> str | None:
        """A message about edited functions, for calls that run nothing or keep the copies."""
        if not self.edited:
            return None
        files = ", ".join(self.edited)
        if self.keeps:
            return f"{files}: edited after the run began; jobs use the copies in {self._relative} (functions: keep)"
        return f"{files}: edited after the run began; {self._choice()}"

    def settle(self, workflow: Any = None) -> None:
        """Copies the functions before the first job, unless the user has to choose first. `kept` comes before it.

        Args:
            workflow: Snakemake's workflow, if it already knows its jobs; otherwise None.

        Raises:
            UserError: see `ask`.
        """
        self.ask(workflow)
        function_copies.write(self._copies, self._runs.configs.values())

    def ask(self, workflow: Any) -> None:
        """Ends the call if the user has to choose what to do with edited functions. Changes nothing.

        Args:
            workflow: see `settle`.

        Raises:
            UserError: functions that finished jobs used were edited and the configuration does not say what to do.
        """
        if self.edited and not self.keeps:
            again = list(self._again(workflow)) if workflow else []
            if self._runs.first.functions == "ask" and (again or not workflow):
                raise UserError(
                    f"{', '.join(self.edited)}: edited after the run began; {_count(again)}{self._choice()}"
                )

    def kept(self, workflow: Any) -> str | None:
        """The error message if a file that the functions made before the edit would stay."""
        for stage, needed, file in self._affected(workflow) if self._stages and workflow else ():
            if not needed:
                return (
                    f"{file} was made before {', '.join(self.edited)} was edited, and would stay, so the run would mix "
                    f"two versions ({stage} does not run again, by --rerun-triggers or since .snakemake is not that of "
                    f"the run): {KEEP}, give the run another name, or make all files again with --forceall"
                )
        return None

    def _choice(self) -> str:
        return (
            f"{KEEP} to go on with the functions as they were ({self._relative}), or --config functions=take to run "
            "again what depends on them. Other scores of the same completions: rloo rescore "
            f"{os.path.relpath(self._run)} --rewards FILE --out FOLDER"
        )

    def _again(self, workflow: Any) -> Iterator[str]:
        """Yields the stages of finished jobs that run again because a job used an edited function."""
        if any(needed for _, needed, _ in self._affected(workflow)):
            for job in workflow.dag.needrun_jobs():
                if job.output and all(map(os.path.exists, job.output)):
                    yield RULES.get(job.rule.name, job.rule.name)

    def _affected(self, workflow: Any) -> Iterator[tuple[str, bool, str]]:
        """Yields the finished jobs that used an edited function: stage, True if it runs again, an output."""
        for job in workflow.dag.jobs:
            stage = stage_of(job.rule)
            stages = self._stages.get(getattr(job.wildcards, "run", self._runs.name), ())
            if stage in stages and all(map(os.path.exists, job.output)):
                yield stage, workflow.dag.needrun(job), str(job.output[0])


KEEP = "add --config functions=keep"


def _files(configs: dict[str, Config]) -> dict[Path, str]:
    return {file: digest for config in configs.values() for file, digest in function_copies.files_of(config).items()}


def _digests(configs: dict[str, Config]) -> dict[tuple[str, str], str]:
    return {(run, stage): source_digest(stage, config) for run, config in configs.items() for stage in STAGES}


def _count(again: list[str]) -> str:
    """The first part of a sentence, with the number of jobs that run again."""
    if not again:
        return "`rloo why` says what would run again with the edited file: "
    counts = ", ".join(f"{name} ×{count}" if count > 1 else name for name, count in Counter(again).items())
    return f"with the edited file {counted(len(again), 'finished job')} would run again ({counts}): "
