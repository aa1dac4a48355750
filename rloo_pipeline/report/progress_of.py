"""How far a run is, from its files alone: stages done, running and to come, the time a round takes, a completion.

A job's log appears when it starts and its output when it ends, whole; so a log without the output is a job at work, one
that failed (its last line says so), or one that was killed (its log stays silent).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rloo_pipeline.diagnosis.run_files import RunFiles
from rloo_pipeline.errors import UserError

SILENT = 300.0
"""Seconds after which a log that says nothing is pointed at."""
ORDER = (
    *("assets", "prompts", "warmstart", "probe", "checks", "rollout", "score", "reference", "update", "evaluate"),
    *("distance", "harness", "report"),
)
LAST_LINES = 4096
"""Bytes at a log's end in which its last line is looked for."""


class Job(NamedTuple):
    """One job of the DAG."""

    stage: str
    output: str
    """Relative to the run's folder."""
    log: str


class Working(NamedTuple):
    """A job that has begun and not ended."""

    job: Job
    last_line: str
    silent: float
    """Seconds since its log's last line."""
    failed: bool


class Stage(NamedTuple):
    """The jobs of a stage."""

    name: str
    done: int
    working: int
    total: int


class Sample(NamedTuple):
    """A completion of the latest scored round."""

    round: int
    prompt: str
    completion: str
    reward: float | None


class Progress(NamedTuple):
    """How far a run is."""

    stages: list[Stage]
    working: list[Working]
    seconds_a_round: float | None
    """Median of the latest rounds; None before two are done."""
    finished: bool

    def left(self, rounds: int) -> float | None:
        """Seconds that so many rounds would take."""
        return None if self.seconds_a_round is None else self.seconds_a_round * rounds


def progress_of(run: RunFiles, now: float | None = None) -> Progress:
    """How far the run is at a time, which is now where not given."""
    now = time.time() if now is None else now
    past, shards = len(run.rounds), run.config.rollout.shards
    a_round = {"rollout": shards, "reference": shards if run.config.uses_reference else 0, "score": shards, "update": 1}
    evaluated = len(run.config.evaluated)
    single = {"assets": 1, "prompts": 1, "warmstart": 1, "probe": 1, "checks": 1, "evaluate": evaluated}
    single |= {"distance": evaluated - 1, "report": 1}
    if run.config.evaluation.harness:
        single["harness"] = evaluated
    total = {stage: run.config.rounds * count for stage, count in a_round.items() if count} | single
    done = {stage: past * a_round.get(stage, 0) for stage in total}
    working = []
    for job in _jobs(run, past + 1):
        if (run.folder / job.output).exists():
            done[job.stage] += 1
        elif found := _working(run.folder, job, now):
            working.append(found)
    busy = [found.job.stage for found in working if not found.failed]
    stages = [Stage(name, done[name], busy.count(name), total[name]) for name in ORDER if name in total]
    return Progress(stages, working, _pace(run), (run.folder / "report.html").exists() and past == run.config.rounds)


def _jobs(run: RunFiles, current: int) -> Iterator[Job]:
    """Jobs outside of rounds, and those of one round: in the rounds before it all is done, behind it nothing is."""
    yield Job("assets", "assets/assets.json", "logs/stage_assets.log")
    yield Job("prompts", "prompts/counts.json", "logs/prompts.log")
    yield Job("warmstart", "policies/00000", "logs/warmstart.log")
    yield Job("probe", "warmstart/probe.parquet", "logs/probe.log")
    yield Job("checks", "warmstart/checks.json", "logs/checks.log")
    if current <= run.config.rounds:
        name = f"{current:05d}"
        for table, stage in (("rollouts", "rollout"), ("scores", "score"), ("reference", "reference")):
            if stage != "reference" or run.config.uses_reference:
                for shard in range(run.config.rollout.shards):
                    yield Job(
                        stage, f"rounds/{name}/{table}/{shard:03d}.parquet", f"logs/{stage}/{name}-{shard:03d}.log"
                    )
        yield Job("update", f"rounds/{name}/metrics.json", f"logs/update/{name}.log")
    for name in run.config.evaluated:
        yield Job("evaluate", f"evaluation/{name}/summary.json", f"logs/evaluate/{name}.log")
        if name != "warmstart":
            yield Job("distance", f"evaluation/{name}/distance.json", f"logs/distance/{name}.log")
        if run.config.evaluation.harness:
            yield Job("harness", f"evaluation/{name}/harness.json", f"logs/harness/{name}.log")
    yield Job("report", "report.html", "logs/report.log")


def _working(run: Path, job: Job, now: float) -> Working | None:
    """The job, if it has begun: its log is there."""
    try:
        with (run / job.log).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LAST_LINES))
            lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
        changed = (run / job.log).stat().st_mtime
    except OSError:
        return None
    said = [line for line in lines if " rloo" in line] or lines
    last = said[-1] if said else ""
    line = last.partition(": ")[2] if " INFO rloo: " in last or " ERROR rloo: " in last else last
    if "rloo.time: took" in last:
        return None  # of an earlier run of the job, whose output has been taken away
    return Working(job, line, max(0.0, now - changed), ": error: " in last)


def _pace(run: RunFiles) -> float | None:
    """Median seconds a round, by the times of the latest metrics.json."""
    times = []
    for number in range(max(1, len(run.rounds) - 10), len(run.rounds) + 1):
        try:
            times.append((run.folder / "rounds" / f"{number:05d}" / "metrics.json").stat().st_mtime)
        except OSError:
            return None
    steps = [after - before for before, after in pairwise(times) if after > before]
    return sorted(steps)[len(steps) // 2] if steps else None


def sample_of(run: RunFiles) -> Sample | None:
    """A completion of the latest round with scores, chosen by seed; None where there is none (or no pyarrow)."""
    for number in (len(run.rounds) + 1, len(run.rounds)):
        try:
            return _sample(run, number) if number else None
        except (UserError, OSError, ImportError):
            continue
    return None


def _sample(run: RunFiles, number: int) -> Sample:
    from rloo_pipeline.artifacts import tables
    from rloo_pipeline.artifacts.prompt_set import PromptSet

    folder = run.folder / "rounds" / f"{number:05d}"
    scored = tables.read(folder / "scores" / "000.parquet", "scores", ["prompt_id", "reward"])
    place = random.Random(f"{run.config.seed} {number}").randrange(len(scored))
    rolled = tables.read(folder / "rollouts" / "000.parquet", "rollouts", ["prompt_id", "completion"])
    prompt_id = rolled["prompt_id"][place].as_py()
    prompt = PromptSet(run.folder / "prompts" / "train").by_id([prompt_id])[prompt_id]["prompt"]
    return Sample(number, _text(prompt), rolled["completion"][place].as_py(), scored["reward"][place].as_py())


def _text(prompt: Any) -> str:
    """A prompt's last message, or the prompt."""
    return str(prompt[-1]["content"]) if isinstance(prompt, list) and prompt else str(prompt)
