"""The tables of one round, read together: row i of each is about the same completion."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline.artifacts import episodes, lineage, tables
from rloo_pipeline.artifacts.files import REMEDY, check_facts
from rloo_pipeline.config import Config, Rollout
from rloo_pipeline.errors import UserError

REFILL = "refill"
"""Subfolder of a round with the tables of the completions that the refill sampled."""


class RoundFiles(NamedTuple):
    """Parquet files of one round, shards in order."""

    rollouts: Sequence[Path]
    scores: Sequence[Path]
    reference: Sequence[Path] = ()
    teacher: Sequence[Path] = ()
    prompts: Path | None = None
    """Folder that the stage `prompts` wrote; only needed if prompts have images."""

    def used(self, config: Config) -> RoundFiles:
        """The files that an update reads.

        Raises:
            UserError: the run has a teacher, but tables of its log-probs are missing.
        """
        used = self if config.uses_reference else self._replace(reference=())
        if config.algorithm.teacher is None:
            return used._replace(teacher=())
        if not self.teacher:
            raise UserError(
                "--teacher: no tables, but the run has algorithm.teacher; give one for each table of rollouts"
            )
        return used

    def read(self, vocabulary: int | None = None, **expected: object) -> RoundTables:
        """Reads the tables of a round and checks that they belong together.

        Args:
            vocabulary: number of tokens of the policy.
            expected: facts that the rollouts must have in their footers, such as the round and the policy's digest.

        Raises:
            UserError: a file is missing or damaged, is about different completions, or its values do not fit them.
        """
        count = len(self.rollouts)
        for name, paths in (("scores", self.scores), ("reference", self.reference), ("teacher", self.teacher)):
            if len(paths) != count and (paths or name == "scores"):
                raise UserError(f"--{name}: {len(paths)} tables for {count} of rollouts; give one for each")
        lineage.require_one_scoring(self.scores)
        rollouts = [read_rollouts(path, vocabulary, shard=i, **expected) for i, path in enumerate(self.rollouts)]
        scores = [_read_about(table, path, "scores") for table, path in zip(rollouts, self.scores, strict=True)]
        return RoundTables(
            pa.concat_tables(rollouts),
            pa.concat_tables(scores),
            _logps_of_fixed_model(rollouts, self.reference, "reference"),
            _logps_of_fixed_model(rollouts, self.teacher, "teacher"),
            sum(len(table) for table, path in zip(rollouts, self.rollouts, strict=True) if path.parent.name == REFILL),
            self.prompts,
        )

    def read_held_out(self, round_: int, temperature: float) -> RoundTables:
        """The held-out completions of a round, all of one policy, and their scores; no rows if a shard was sampled at
        a different temperature. The errors are the same as for `read`.
        """
        lineage.require_one_scoring(self.scores)
        rollouts = tables.read_shards(self.rollouts, "held_out", round=round_)
        scores = [_read_about(*pair, "held_out_scores") for pair in zip(rollouts, self.scores, strict=True)]
        if any(tables.footer(shard)["sampling_temperature"] != str(temperature) for shard in rollouts):
            return RoundTables(rollouts[0].slice(0, 0), scores[0].slice(0, 0))
        return RoundTables(pa.concat_tables(rollouts), pa.concat_tables(scores))


class RoundTables(NamedTuple):
    """The tables of a round; row i of each is about the same completion."""

    rollouts: pa.Table
    scores: pa.Table
    reference: pa.Table | None = None
    teacher: pa.Table | None = None
    refilled: int = 0
    """Number of rows at the end that the refill sampled."""
    prompts: Path | None = None
    """See `RoundFiles`."""

    def take(self, rows: list[int]) -> RoundTables:
        """The given rows of every table."""
        if rows == list(range(len(self.rollouts))):
            return self
        reference, teacher = (None if table is None else table.take(rows) for table in (self.reference, self.teacher))
        return RoundTables(self.rollouts.take(rows), self.scores.take(rows), reference, teacher, prompts=self.prompts)


def files_of(folder: Path, kind: str, settings: Rollout) -> list[Path]:
    """Existing files of one table of a round: the shards in order, then the refill's.

    If the round was trained on, returns all of them, so that their reader notices if one is missing.

    Args:
        folder: results/<run>/rounds/<round>.
        kind: `rollouts`, `scores`, `reference` or `teacher`.
        settings: the run's settings.
    """
    shards = [folder / kind / f"{shard:03d}.parquet" for shard in range(settings.shards)]
    refill = [folder / REFILL / f"{kind}.parquet"] if settings.refill else []
    files = [file for file in (*shards, *refill) if file.exists()]
    return [*shards, *refill] if files and (folder / "metrics.json").exists() else files


def scores_beside(rollouts: Path) -> Path:
    """The file with the scores of the completions in a file of rollouts."""
    if rollouts.parent.name == REFILL:
        return rollouts.with_name("scores.parquet")
    return rollouts.parent.with_name("scores") / rollouts.name


def _logps_of_fixed_model(rollouts: Sequence[pa.Table], paths: Sequence[Path], kind: str) -> pa.Table | None:
    """The tables of a kind, all of one model, with a log-prob for each sampled token; None without paths."""
    read = [_read_about(*pair, kind) for pair in zip(rollouts, paths, strict=False)]
    for shard_rollouts, table, path in zip(rollouts, read, paths, strict=False):
        check_facts(path, tables.footer(table), {"policy": tables.footer(read[0]).get("policy")})
        _check_lengths(path, shard_rollouts, table[f"{kind}_logps"], f"{kind}_logps")
    return pa.concat_tables(read, promote_options="default") if read else None


def read_held_out_shard(path: Path, rollouts: pa.Table) -> pa.Table:
    """The held-out completions that the job of a shard also sampled; errors are the same as for `RoundFiles.read`."""
    facts = tables.footer(rollouts)
    table = tables.read(path, "held_out", None, **{name: facts[name] for name in ("round", "shard", "policy")})
    _check_lengths(path, table, table["sampling_logps"], "sampling_logps")
    return table


def read_rollouts(path: Path, vocabulary: int | None = None, **expected: object) -> pa.Table:
    """One shard of rollouts; the arguments and errors are the same as for `RoundFiles.read`."""
    table = tables.read(path, "rollouts", None, **expected)
    _check_lengths(path, table, table["sampling_logps"], "sampling_logps")
    for name in ("prompt_ids", "completion_ids"):
        limits = pc.min_max(pc.list_flatten(table[name])).as_py()
        if vocabulary and limits["max"] is not None and not 0 <= limits["min"] <= limits["max"] < vocabulary:
            raise UserError(
                f"{path}: {name} from {limits['min']} to {limits['max']}, but the policy's vocabulary has {vocabulary} "
                f"tokens; {REMEDY}"
            )
    return table


def _read_about(rollouts: pa.Table, path: Path, kind: str) -> pa.Table:
    table = tables.read(path, kind, rollouts=tables.footer(rollouts)[tables.DIGEST])
    tables.check_aligned(rollouts, table, path)
    return table


def _check_lengths(path: Path, rollouts: pa.Table, logps: pa.ChunkedArray, name: str) -> None:
    """Checks that there is a log-prob for each token that the model sampled."""
    expected = np.array(tables.sampled_lengths(rollouts), np.int64)
    episodes.compare(path, episodes.lengths(logps), expected, f"{name} for {{}} tokens")
