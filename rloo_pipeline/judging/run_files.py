"""Reads what a run has written so far: finished, stopped, in flight or killed. Writes nothing.

Snakemake deletes a file only when the job that makes it again begins. So while a run is trained again or extended,
files of the earlier training run are still there. They are older than the files that they would now be made from.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

from rloo_pipeline.artifacts import lineage
from rloo_pipeline.artifacts.files import TIMESTAMP, check_facts, read_artifact
from rloo_pipeline.artifacts.manifest import MANIFEST
from rloo_pipeline.artifacts.model_files import policy_folder
from rloo_pipeline.checks.history import Metrics
from rloo_pipeline.config import JSON, Config
from rloo_pipeline.config.loading import load
from rloo_pipeline.config.run_set import EXPERIMENT
from rloo_pipeline.errors import UserError, naming, raise_unless_missing
from rloo_pipeline.judging.diagnosis import STOPPED, Symptom, diagnose, monitors_of
from rloo_pipeline.runtime import late_files

NO_MEMORY = (
    *("out of memory", "memoryerror", "cannot allocate memory", "no available memory for the cache"),
    *("oom-kill", "oom_kill", "oom kill"),
)
"""Lower-case phrases of lines that report a lack of memory. Searching for these takes a tenth of the time of a
regular expression, which counts for the logs of a thousand rounds.
"""
TAIL = 200_000
"""Bytes at a log's end that are searched for `NO_MEMORY`."""
EVIDENCE_LENGTH = 160
"""Maximum number of characters shown of such a line."""
ROUND = re.compile(r"\d{5,}")
"""Matches the beginning of the name of a round's log."""
Result = TypeVar("Result")
BY_SEED = ("evaluate_chosen", "prove_chosen")
"""Stages that work on chosen policies; their logs are named by the seed."""


class RunFiles(NamedTuple):
    """A run, with everything that it has finished so far."""

    folder: Path
    config: Config
    rounds: list[Metrics]
    """metrics.json of the finished rounds of this training, from the first on without a gap."""

    @property
    def ended_by_gate(self) -> bool:
        """True if a gate ended the run after the last finished round, and it has not continued since."""
        return bool(self.rounds) and stopped_after(self.folder) == len(self.rounds)

    def is_current(self, file: Path, policy: int | None) -> bool:
        """True if a file exists and was made from this training run's policy `policy`, not from an earlier one's.

        `policy` is None for a file that is made without a policy.
        """
        if not policy:
            return _not_older(file, _before_rounds(self.folder) if policy == 0 else ())
        return policy <= len(self.rounds) and _not_older(file, [metrics_of(self.folder, policy)])

    def evaluations(self) -> dict[int, JSON]:
        """The evaluations by the policy's number, without those of an earlier `evaluation.every`."""
        return {
            number: read_evaluation(self.folder, name)
            for name, number in self.config.evaluated.items()
            if self.is_current(self.folder / "evaluation" / name / "summary.json", number)
        }

    def held_out(self) -> list[JSON]:
        """held_out.json of all rounds and of the next one; rounds without one are skipped."""
        rounds = range(1, min(len(self.rounds) + 1, self.config.rounds) + 1)
        policy_of = self.config.rollout.policy_of
        return read_held_out(
            self.folder,
            (number for number in rounds if self.is_current(held_out_of(self.folder, number), policy_of(number))),
        )

    def accuracies(self) -> dict[int, float]:
        """Held-out accuracy by the policy's number: from the problems of each round, or else from the evaluations,
        which have other problems.
        """
        by_round = {measured["policy"]: measured["accuracy"] for measured in of_same_prompts(self.held_out())}
        return by_round or {number: evaluation["accuracy"] for number, evaluation in self.evaluations().items()}

    def out_of_memory(self) -> dict[int, str]:
        """Maps rounds to the last out-of-memory line in their stages' logs. An unfinished round counts as the latest,
        and so does a stage outside of rounds.
        """
        lines, latest, logs = dict[int, str](), len(self.rounds), self.folder / "logs"
        for file in sorted(logs.rglob("*.log")):
            name = file.relative_to(logs).with_suffix("").as_posix()
            of_round = round_of(file)
            if of_round is None:
                number, policy = (self.config.rounds, self.config.rounds) if file.stem == "final" else (0, None)
            else:
                number, policy = of_round, max(of_round - 1 - self.config.rollout.lag, 0)
                name = f"{file.parent.name} of round {number}"
            # what workers print is also in the logs of the jobs that use them
            if file.parent.name == "workers" or number > self.config.rounds or not self.is_current(file, policy):
                continue
            if line := _out_of_memory_line(file):
                lines[latest if of_round is None else min(number, latest)] = f"{name}: {line}"
        return lines

    def symptoms(self, evaluations: Mapping[int, JSON] | None = None, since: int = 0) -> list[Symptom]:
        """The symptoms of rounds from `since` on, found in metrics, evaluations and logs.

        Args:
            evaluations: by the policy's number; None reads those of the run.
            since: the first round that is judged.
        """
        return diagnose(
            self.rounds,
            self.config.gates,
            monitors=monitors_of(self.config.rewards),
            evaluations=self.evaluations() if evaluations is None else evaluations,
            out_of_memory=self.out_of_memory(),
            planned=self.config.rounds,
            since=since,
        )


def read(folder: Path, config: Config | None = None) -> RunFiles:
    """Reads the run in a folder, without rounds that are older than the rounds before them.

    Args:
        folder: the run's folder.
        config: the run's configuration; read from the folder if None.

    Raises:
        UserError: the folder has no run, or a file of it is damaged.
    """
    config = config or read_config(folder)
    return RunFiles(folder, config, metrics_until(folder, _rounds_of_training(folder, config.rounds)))


def why_no_round(folder: Path) -> str:
    """Explains why `read` finds no round of a run."""
    if metrics_of(folder, 1).exists():
        return "round 1 is older than its inputs, so it would run again; if the run was copied, call `rloo adopt` first"
    return "no round is done yet"


def stopped_after(folder: Path) -> int | None:
    """The round after which a gate ended the run; None if none did."""
    try:
        return int(read_artifact(folder / STOPPED)["round"])
    except (UserError, OSError) as error:
        raise_unless_missing(error, folder)  # else the run would go on
        return None


def is_finished(folder: Path, config: Config) -> bool:
    """True if there is a summary that is up to date with all rounds and evaluations."""
    evaluations = (folder / "evaluation" / name / "summary.json" for name in config.evaluated)
    made_from = [metrics_of(folder, config.rounds), *evaluations]
    return _not_older(folder / "summary.json", made_from) and (
        _rounds_of_training(folder, config.rounds) == config.rounds
    )


def _before_rounds(folder: Path) -> list[Path]:
    """Existing files from which the first round is made; a copy of a run may lack weights.

    Of a folder, the file that Snakemake touches after the job comes first: the time of the others is by the clock of
    the node that wrote them.
    """
    made = (folder / "assets/assets.json", folder / "prompts/counts.json", policy_folder(folder, 0) / MANIFEST)
    files = [[path.with_name(TIMESTAMP), path] for path in made]
    return [next(filter(Path.exists, either)) for either in files if any(map(Path.exists, either))]


def _rounds_of_training(run: Path, last: int) -> int:
    """The last round of this training, from 1 to `last`; 0 if an input of the first round is newer than it."""
    first = metrics_of(run, 1)
    kinds = ("rollouts", "scores", "reference", "teacher")
    tables = (file for kind in kinds for file in (first.parent / kind).glob("*.parquet"))
    return in_order_of_time(run, 1, last) if _not_older(first, [*_before_rounds(run), *tables]) else 0


def in_order_of_time(run: Path, first: int, last: int) -> int:
    """The last round, from `first` to `last`, such that each round up to it is newer than the one before.

    When a round is repeated, the older files of later rounds remain until those rounds are repeated too.
    """
    until = first
    while until < last and _not_older(metrics_of(run, until + 1), [metrics_of(run, until)]):
        until += 1
    return until


def round_of(log: Path) -> int | None:
    """The round in the name of a log; None for stages outside of rounds, whose logs may be named by shard or seed."""
    named = ROUND.match(log.stem)
    return int(named[0]) if named and log.parent.name not in BY_SEED else None


def read_config(folder: Path) -> Config:
    """Reads the configuration of the run in a folder.

    Raises:
        UserError: the folder has no config.yaml, or it is not valid.
    """
    file = folder / "config.yaml"
    if not file.exists() and (folder / EXPERIMENT).exists():
        runs = sorted(str(file.parent) for file in folder.glob("*/[0-9]*/config.yaml"))
        example = f", such as {runs[0]}" if runs else ""
        raise UserError(f"{folder}: the folder of an experiment; name one of its runs{example}")
    if not file.exists():
        raise UserError(
            f"{folder}: not the folder of a run, since it has no config.yaml; name one such as results/demo"
        )
    return load(file)


def metrics_of(folder: Path, number: int) -> Path:
    """The path of a round's metrics.json."""
    return lineage.round_folder(folder, number) / "metrics.json"


def read_metrics(folder: Path, number: int) -> JSON:
    """metrics.json of a round.

    Raises:
        UserError: the file is missing, damaged, from a different round, or not from the update that wrote the round's
            table.
    """
    metrics = read_artifact(metrics_of(folder, number), round=number)
    lineage.check_metrics(metrics_of(folder, number), metrics)
    return metrics


def metrics_until(folder: Path, last: int) -> list[Metrics]:
    """metrics.json of rounds 1 to `last`, up to the first round that has none."""
    rounds: list[Metrics] = []
    for number in range(1, last + 1):
        file = metrics_of(folder, number)
        if not late_files.exists(file):
            break
        metrics = _read(file)
        check_facts(file, metrics, {"round": number})
        rounds.append(metrics)
    return rounds


def held_out_of(folder: Path, number: int) -> Path:
    """The path of a round's held_out.json."""
    return metrics_of(folder, number).with_name("held_out.json")


def read_held_out(run: Path, rounds: Iterable[int]) -> list[JSON]:
    """Reads held_out.json of these rounds, the accuracy of the policy that sampled each; skips rounds without one."""
    files = (held_out_of(run, number) for number in rounds)
    measured = [_read(file) for file in files if late_files.exists(file)]
    return [summary for summary in measured if summary["accuracy"] is not None]


def of_same_prompts(measured: Sequence[JSON]) -> list[JSON]:
    """Those of these accuracies that are of as many prompts as the latest; `evaluation.each_round` may have changed."""
    return [summary for summary in measured if summary["prompts"] == measured[-1]["prompts"]]


def read_evaluation(run: Path, name: str, refused: Collection[str] = ()) -> JSON:
    """summary.json of an evaluation, with its `distance` (KL from policy 0) and `harness` (lm-eval), each or None.

    Args:
        run: folder of the run.
        name: name of the evaluation.
        refused: names of those that raise an error if they belong to a different policy. The others then count as None,
            since an earlier training run may have left them.
    """
    folder = run / "evaluation" / name
    evaluation: JSON = read_artifact(folder / "summary.json", evaluated=name)
    for part in ("distance", "harness"):
        file = folder / f"{part}.json"
        content = read_artifact(file) if late_files.exists(file) else None
        if content and part in refused:
            check_facts(file, content, {"policy": evaluation["policy"]})
        evaluation[part] = content if content and content.get("policy") == evaluation["policy"] else None
    return evaluation


def _not_older(file: Path, made_from: Iterable[Path]) -> bool:
    """True if a file and all files that it is made from exist, and none of them is newer."""
    try:
        time = file.stat().st_mtime
        return all(time >= other.stat().st_mtime for other in made_from)
    except OSError:
        return False


def _until_changed(read: Callable[[Path], Result]) -> Callable[[Path], Result]:
    """Reads a file again only if it was written or replaced since; do not change the result."""
    once = lru_cache(maxsize=100_000)(lambda file, _version: read(file))

    def read_cached(file: Path) -> Result:
        status = file.stat()
        return once(file, (status.st_ino, status.st_ctime_ns, status.st_size))

    return read_cached


@_until_changed
def _read(file: Path) -> JSON:
    return read_artifact(file)


@_until_changed
def _out_of_memory_line(log: Path) -> str | None:
    """The last line near a log's end that reports a lack of memory."""
    text = tail_of(log, TAIL)
    lines = reversed(text.splitlines()) if _reports_no_memory(text) else ()
    return next((line.strip()[-EVIDENCE_LENGTH:] for line in lines if _reports_no_memory(line)), None)


def tail_of(log: Path, size: int) -> str:
    """The text of the last `size` bytes of a log."""
    with naming(log), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read().decode("utf-8", errors="replace")


def _reports_no_memory(text: str) -> bool:
    lower_case = text.lower()
    return any(words in lower_case for words in NO_MEMORY)
