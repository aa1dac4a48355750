"""Reads the data for the live view of a run: a row per round, held-out accuracy, the time left."""

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Self

from rloo_pipeline.config import Config
from rloo_pipeline.config.loading import read_mapping
from rloo_pipeline.config.run_jobs import jobs_of_round
from rloo_pipeline.config.run_set import EXPERIMENT
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging import run_files
from rloo_pipeline.judging.run_files import RunFiles
from rloo_pipeline.report import run_progress
from rloo_pipeline.report.jobs import STAGES_OF_ROUND, TOOK

Values = Mapping[int, float]
"""Values by round."""
COLUMNS = ("round", "reward", "held-out", "KL", "length", "tokens/s", "seconds")


class Row(NamedTuple):
    """The values of one round; None if not measured."""

    round: int | None = None
    reward: float | None = None
    held_out: float | None = None
    """Accuracy on held-out prompts, from 0 to 1."""
    kl: float | None = None
    """KL from the reference policy, nats per token."""
    length: float | None = None
    """Mean length of a completion in tokens."""
    tokens_per_second: float | None = None
    """Completion tokens per second of the round."""
    seconds: float | None = None
    """Seconds from the start of the round's first job to the end of its last."""

    def cells(self) -> tuple[str, ...]:
        """The values as text; empty strings if not measured."""
        formats = ("d", ".3f", ".1%", "z.4f", ".0f", ".0f", ".1f")
        return tuple("" if value is None else f"{value:{form}}" for value, form in zip(self, formats, strict=True))


class LiveRun:
    """The progress of a run, as of the last `read`."""

    def __init__(self, run: RunFiles, since: float | None = None) -> None:
        """Reads held-out accuracies.

        Args:
            run: the run's files.
            since: start of the current round in seconds since 1970; None for the end of the previous round.
        """
        self.run, self.accuracies = run, run.accuracies()
        self._since = since
        self._seconds: dict[int, float | None] = {}
        self.pace = self._pace()
        """Seconds per round; None until the first round is done."""

    @classmethod
    def of_call(cls, config: Config, folder: Path) -> Self:
        """A run that this process starts to work on now. Unreadable files count as missing."""
        try:
            return cls(run_files.read(folder, config), time.time())
        except (UserError, OSError):
            return cls(RunFiles(folder, config, []), time.time())

    @property
    def rounds_left(self) -> int:
        """Number of remaining rounds."""
        return self.run.config.rounds - len(self.run.rounds)

    def seconds_left(self) -> float | None:
        """Estimated seconds for the remaining rounds, from finished ones; None before the first is finished. The
        estimate counts down during a round, but not below that of the next round.
        """
        if not self.pace or not self.rounds_left:
            return None
        since = run_progress.end_of(self.run, len(self.run.rounds)) if self._since is None else self._since
        passed = 0.0 if since is None else time.time() - since
        return self.pace * self.rounds_left - min(max(passed, 0.0), self.pace)

    def rows(self, most: int) -> list[Row]:
        """The latest rounds, at most `most`. Round 0 is policy 0, if it was evaluated."""
        numbers = range(0 if 0 in self.accuracies else 1, len(self.run.rounds) + 1)
        return [self.row(number) for number in numbers[-most:]]

    def row(self, number: int) -> Row:
        """The row of a finished round, or of policy 0."""
        if number == 0:
            return Row(0, held_out=self.accuracies[0])
        metrics = self.run.rounds[number - 1]
        if number not in self._seconds:
            self._seconds[number] = self._seconds_of(number)
        seconds, tokens = self._seconds[number], metrics.get("num_completion_tokens")
        speed = tokens / seconds if tokens is not None and seconds else None
        kl, length = metrics.get("kl"), metrics.get("completions/mean_length")
        return Row(number, metrics.get("reward"), self.accuracies.get(number), kl, length, speed, seconds)

    def read(self) -> None:
        """Reads what the run has written since; nothing if a file is just being replaced."""
        before = len(self.run.rounds)
        try:
            run = run_files.read(self.run.folder, self.run.config)
            self.run, self.accuracies, self._seconds = run, run.accuracies(), {}
            self.pace = self._pace()
        except (UserError, OSError):
            return
        if len(run.rounds) != before:
            self._since = time.time()

    def _pace(self) -> float | None:
        done = len(self.run.rounds)
        return run_progress.seconds_per_round(self.run) or (self.row(done).seconds if done else None)

    def _seconds_of(self, number: int) -> float | None:
        """Seconds from the start of a round's first job to the end of its last; None without logs."""
        began, ended = list[datetime](), list[datetime]()
        logs = (self.run.folder / job.log for job in jobs_of_round(self.run.config, number))
        for log in (log for log in logs if log.parent.name in STAGES_OF_ROUND and log.exists()):
            for match in TOOK.finditer(log.read_text(encoding="utf-8", errors="replace")):
                ended.append(datetime.fromisoformat(match["ended"]))
                began.append(ended[-1] - timedelta(seconds=float(match["seconds"])))
        return max((max(ended) - min(began)).total_seconds(), 0.1) if ended else None


class CurvesOfRun(NamedTuple):
    """The curves of a run, or the means over the seeds of an arm."""

    name: str
    rounds: str
    """Numbers of rounds done and planned, over all seeds, as text."""
    reward: Values
    """Mean reward by round."""
    held_out: Values
    """Held-out accuracy by the round of the policy."""
    is_finished: bool
    final: float | None
    """Accuracy of the final policies on all held-out prompts, if all runs are finished."""

    @property
    def latest(self) -> Row:
        """The latest value of each kind."""
        reward, held_out = (values[max(values)] if values else None for values in (self.reward, self.held_out))
        return Row(reward=reward, held_out=held_out)


def curves_of(folders: Iterable[Path]) -> list[CurvesOfRun]:
    """Reads the curves of runs, and of each arm of experiments.

    Raises:
        UserError: a folder has neither a run nor an experiment, or a file is damaged.
    """
    curves = []
    for folder in folders:
        if not (folder / EXPERIMENT).exists():
            curves.append(_mean(folder.name, [run_files.read(folder)]))
            continue
        about = read_mapping(folder / EXPERIMENT)
        for arm in about["arms"]:
            seeds = [folder / arm / str(seed) for seed in about["seeds"]]
            curves.append(_mean(arm, [run_files.read(seed) for seed in seeds if (seed / "config.yaml").exists()]))
    return curves


def _mean(name: str, runs: Sequence[RunFiles]) -> CurvesOfRun:
    """The mean over runs, at each round that all of them have."""
    rewards = [
        {number: value for number, metrics in enumerate(run.rounds, 1) if (value := metrics.get("reward")) is not None}
        for run in runs
    ]
    finished = bool(runs) and all(run_files.is_finished(run.folder, run.config) for run in runs)
    done, planned = sum(len(run.rounds) for run in runs), sum(run.config.rounds for run in runs)
    rounds = f"{done} of {planned}" if runs else "not begun"
    held_out = _over([run.accuracies() for run in runs])
    last = [run.evaluations().get(run.config.rounds) for run in runs] if finished else []
    final = fmean(each["accuracy"] for each in last if each) if last and all(last) else None
    return CurvesOfRun(name, rounds, _over(rewards), held_out, finished, final)


def _over(curves: Sequence[Values]) -> Values:
    """The mean over curves, at each round that all of them have."""
    rounds = set(curves[0]).intersection(*curves[1:]) if curves else set[int]()
    return {number: fmean(curve[number] for curve in curves) for number in sorted(rounds)}


def seconds_left_of(runs: Sequence[LiveRun]) -> float | None:
    """Seconds until all these runs have finished their rounds; None if an unfinished one has not finished any yet."""
    seconds = [run.seconds_left() for run in runs if run.rounds_left]
    known = [each for each in seconds if each is not None]
    return max(known, default=None) if len(known) == len(seconds) else None


def header(config: Config, run: Path, log: str | None) -> list[tuple[str, str]]:
    """Lines at the top of the view, as names and values: run, model, data, rounds, paths of the page and of Snakemake's
    log.
    """
    model, train = config.model, config.dataset.train
    rollout = config.rollout
    rounds = f"{config.rounds} of {rollout.generation_batch_size} completions, {rollout.num_generations} a prompt"
    lines = [
        ("run", config.run),
        ("model", model.name_or_path or model.build or ""),
        ("data", train.path or train.name or train.generator or ""),
        ("rounds", rounds),
        ("page", str(run / "report.html")),
    ]
    return [*lines, ("Snakemake's log", log)] if log else lines


def outcome(summary: Mapping[str, Any]) -> str:
    """The gain of a finished run in one line, from its summary.json."""
    before, after = summary["warmstart"]["accuracy"], summary["final"]["accuracy"]
    low, high = summary["gain_ci95"]
    return (
        f"held-out pass@1 {before:.1%} -> {after:.1%}: gain {100 * summary['gain']:+.1f} points (95% "
        f"interval {100 * low:+.1f} to {100 * high:+.1f})"
    )


def sentence(row: Row, rounds: int, seconds_left: float | None) -> str:
    """Describes a round in one line of plain text."""
    cells = zip(COLUMNS[1:], row.cells()[1:], strict=True)
    values = ", ".join(f"{name} {cell}" for name, cell in cells if cell)
    rest = f"; about {clock(seconds_left)} until the last round is done" if seconds_left is not None else ""
    return f"round {row.round} of {rounds}: {values}{rest}"


def clock(seconds: float) -> str:
    """Formats seconds as h:mm:ss."""
    return str(timedelta(seconds=round(seconds)))
