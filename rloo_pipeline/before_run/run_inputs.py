"""Inputs of a run, as the checks of `rloo check` find them and pass them on to later checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Config
from rloo_pipeline.data.rows import Row

if TYPE_CHECKING:
    from rloo_pipeline.rollout.episode_loop import EpisodeRecord
    from rloo_pipeline.rollout.templating import Templater
    from rloo_pipeline.rollout.tool_calls import CallReader
    from rloo_pipeline.user_code.pool import EnvironmentPool


class DatasetSample(NamedTuple):
    """The kept rows of a dataset as rewards get them, taken from all rows or only from the first ones."""

    rows: list[Row]
    """Rows with all columns, as stages read them from prompt sets."""
    prompts: list[Any]
    """The prompt of each row: messages or a string."""
    read: int
    """Number of rows in the dataset."""
    counts: Mapping[str, int] = {}
    """Numbers of rows templated, kept, and dropped by reason; empty without a tokenizer."""
    episodes: Sequence[EpisodeRecord] = ()
    """Episodes of the first rows, if the run has tools."""

    @property
    def is_whole(self) -> bool:
        """True if all rows were templated, not just the first ones."""
        return self.counts.get("rows", len(self.rows)) == self.read


class EpisodeTrial(NamedTuple):
    """The parts that play episodes."""

    config: Config
    pool: EnvironmentPool
    reader: CallReader
    templater: Templater


@dataclass
class RunInputs:
    """The inputs of a run. Each is set when its check passes; a check that needs an unset one yields nothing."""

    config: Config
    scratch: Path
    """Empty folder for a model that a function builds."""
    stack: ExitStack
    """Ends the processes of tools and environments."""
    model: Policy | None = None
    """The model; its tokenizer can be loaded."""
    processor: Any = None
    """The image processor, in a run with images."""
    trial: EpisodeTrial | None = None
    """Plays episodes, in a run with tools."""
    datasets: dict[str, DatasetSample] = field(default_factory=dict)
    """Datasets by their keys in the configuration."""
