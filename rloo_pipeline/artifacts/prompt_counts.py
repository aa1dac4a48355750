"""Tables of how often completions of each prompt were right: for policy 0, and as known after a round.

One row per prompt that has been sampled. A completion without a score is neither right nor wrong. The footer has the
round after which the counts are known: 0 for policy 0.
"""

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from rloo_pipeline.artifacts import tables

SCHEMA = pa.schema(
    [
        tables.required("prompt_id", pa.string()),
        tables.required("right", pa.float64()),
        tables.required("samples", pa.float64()),
    ]
)


class Counts(NamedTuple):
    """Scored completions of a prompt; those of earlier rounds may count in part."""

    right: float = 0.0
    samples: float = 0.0

    @property
    def pass_rate(self) -> float:
        """Share of right completions; NaN if none has a score."""
        return self.right / self.samples if self.samples else nan


def write(path: Path, counts: Mapping[str, Counts], round_: int, **about: object) -> None:
    """Writes the counts by prompt_id.

    Args:
        path: the file.
        counts: counts in the order of the rows.
        round_: the round after which they are known.
        about: further facts for the footer.
    """
    rows = [{"prompt_id": prompt_id, **counted._asdict()} for prompt_id, counted in counts.items()]
    tables.write(path, rows, SCHEMA, "pass_rates", round=round_, **about)


def read(files: Sequence[Path], round_: int) -> dict[str, Counts]:
    """The counts by prompt_id, from all shards of a table.

    Args:
        files: the shards, in order.
        round_: the round after which they are known.

    Raises:
        UserError: a file is missing or damaged, or belongs to a different round or shard.
    """
    table = tables.read_all(files, "pass_rates", round=round_)
    ids, right, samples = (table[name].to_pylist() for name in SCHEMA.names)
    return {prompt_id: Counts(*pair) for prompt_id, *pair in zip(ids, right, samples, strict=True)}
