"""What the checks of `rloo check` find out about a run's inputs, for the checks after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.config import Config
from rloo_pipeline.data.rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rloo_pipeline.environments.pool import EnvironmentPool
    from rloo_pipeline.rollout.episode_loop import EpisodeRecord
    from rloo_pipeline.rollout.templating import Templater
    from rloo_pipeline.rollout.tool_calls import CallReader


class DatasetSample(NamedTuple):
    """Rows of a dataset as rewards get them: those that are kept, of all rows or of the first ones."""

    rows: list[Row]
    """With all columns, as the stages read them from prompt sets."""
    prompts: list[Any]
    """Of each row: messages or a string."""
    read: int
    """Number of all rows of the dataset."""
    counts: Mapping[str, int] = {}
    """Numbers of rows templated, kept, and dropped by reason; empty if there is no tokenizer."""
    episodes: Sequence[EpisodeRecord] = ()
    """Of the first rows, if the run has tools."""

    @property
    def is_whole(self) -> bool:
        """Whether all rows were templated, not just the first ones."""
        return self.counts.get("rows", len(self.rows)) == self.read


class EpisodeTrial(NamedTuple):
    """What plays the episodes."""

    config: Config
    pool: EnvironmentPool
    reader: CallReader
    templater: Templater


@dataclass
class RunInputs:
    """The inputs of a run, each once its check has passed; a check that needs a missing one yields nothing."""

    config: Config
    scratch: Path
    """An empty folder, for a model that a function builds."""
    stack: ExitStack
    """Ends the processes of tools and environments."""
    folder: Path | None = None
    """Of the model."""
    tokenizer: PreTrainedTokenizerBase | None = None
    processor: Any = None
    """Of images, in a run with images."""
    trial: EpisodeTrial | None = None
    """Plays episodes, in a run with tools."""
    datasets: dict[str, DatasetSample] = field(default_factory=dict)
    """By their keys in the configuration."""
