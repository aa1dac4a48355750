"""An experiment: a base configuration, arms that change keys of it, and seeds. Each arm × seed is an ordinary run.

The runs of an experiment are in results/<experiment>/<arm>/<seed>/. Files that several runs have in common are made
once, in results/<experiment>/shared/, and used by all of them (`run_set`).
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rloo_pipeline.config.error_messages import checked
from rloo_pipeline.config.evaluation import Select
from rloo_pipeline.config.loading import read_mapping, require_one_run, validate
from rloo_pipeline.config.run import Config
from rloo_pipeline.config.run_keys import RUN_NAME
from rloo_pipeline.config.section import BY_RUN, JSON, Section, flatten, merge, nest
from rloo_pipeline.errors import UserError

RESERVED = ("shared", "logs", "benchmarks", "test", "functions")
"""Names of folders inside an experiment, so no arm can have them."""
OWN = {"run": "it follows from the arm and the seed", "seed": "list the seeds under `seeds`"}
"""Keys that no arm can change, and why."""


class Experiment(Section):
    """Configuration of an experiment."""

    experiment: str = Field(pattern=RUN_NAME.pattern)
    """Name of the experiment. Its files are in results/<experiment>/. Default: the name of its file without suffix."""
    base: str
    """Configuration of a run that all arms start from; a relative path is looked up in the folder of this file."""
    vary: dict[str, list[Any]] = {}
    """Dotted keys of the configuration, each with a list of values. Every combination is an arm."""
    arms: dict[str, Annotated[JSON, BeforeValidator(lambda changes: {} if changes is None else changes)]] = {}
    """Arms by name, each with the keys that it changes; use this or `vary`. In both, the first arm is the baseline."""
    seeds: list[Annotated[int, Field(ge=0)]] = Field([0, 1, 2, 3, 4], min_length=1)
    """Random seeds. Every arm runs once with each of them."""
    select: Select | None = None
    """Selection of an arm, and of a round in each of its runs, like `select` in a run. Default: the base's value."""
    functions: Literal["ask", "keep", "take"] | None = None
    """How to treat edited functions, like `functions` in a run. Default: the base's value."""

    def _problems(self) -> Iterator[str]:
        if len(set(self.seeds)) < len(self.seeds):
            yield "seeds: a seed occurs twice, which would be the same run"
        if self.vary and self.arms:
            yield "`vary` and `arms` both name arms; leave one of the two out"
        for key in (key for key, values in self.vary.items() if not values):
            yield f"vary.{key}: the list is empty; give it a value"
        for key, values in self.vary.items():
            for value in (value for number, value in enumerate(values) if value in values[:number]):
                same = values[values.index(value)]
                yield f"vary.{key}: {same!r} and {value!r} would be the same arm; leave one out"
        names = [name for name, _ in self._named()]
        for name in (name for name in names if names.count(name) > 1):
            yield f"vary: two arms would be named '{name}'; name them under `arms` instead"
        for name, changes in self._named():
            if not RUN_NAME.fullmatch(name) or name in RESERVED:
                yield (
                    f"arms: '{name}' cannot be the name of an arm; use at most 245 letters, digits, '.', '_' and '-', "
                    f"and none of {', '.join(RESERVED)}"
                )
            for key in changes:
                if reason := OWN.get(key.partition(".")[0]):
                    yield f"{key}: an arm cannot change it; {reason}"
            # at all depths, repeated if they are written more than once
            written = (inner for key, value in changes.items() for inner in flatten({key: value}))
            for key, other in itertools.permutations(written, 2):
                if f"{other}.".startswith(f"{key}."):
                    yield f"{key}: arm '{name}' sets it twice; leave one of the two out"

    def arm_changes(self) -> dict[str, JSON]:
        """The arms in order: name → the dotted keys that it changes."""
        return dict(self._named())

    def _named(self) -> Iterator[tuple[str, JSON]]:
        if self.arms or not self.vary:
            yield from (self.arms or {"base": {}}).items()
            return
        for values in itertools.product(*self.vary.values()):
            changes = dict(zip(self.vary, values, strict=True))
            yield "_".join(itertools.starmap(_label, changes.items())), changes


def _label(key: str, value: Any) -> str:
    """The part of an arm's name that stands for a value; it includes the key if the value alone says little."""
    word = str(value).lower() if value is None or isinstance(value, bool) else str(value)
    text = re.sub(r"[^A-Za-z0-9.]+", "-", word).strip("-")
    says_enough = isinstance(value, str) and re.match("[A-Za-z]", value)
    return re.sub(r"[^A-Za-z0-9._-]", "-", str(value)) if says_enough else f"{key.rpartition('.')[2]}-{text}"


def configs_of(experiment: Experiment, folder: Path, origin: str) -> dict[str, Config]:
    """The runs: <arm>/<seed> → configuration, whose `run` is <experiment>-<arm>-<seed>.

    Args:
        experiment: its arms and seeds.
        folder: folder to which the base's path is relative.
        origin: the experiment's file, for messages.

    Raises:
        UserError: the base is missing, or the configuration of an arm is not valid.
    """
    base = read_mapping(folder / experiment.base)
    require_one_run(base, str(folder / experiment.base))
    if experiment.select:
        base["select"] = experiment.select.model_dump()
    if experiment.functions:
        base["functions"] = experiment.functions
    configs: dict[str, Config] = {}
    refusals = []
    for arm, changes in experiment.arm_changes().items():
        raw, place = merge(base, nest(changes)), f"{origin}, arm {arm}"
        raw |= {"run": experiment.experiment, "seed": experiment.seeds[0]}
        try:
            first = validate(raw, place)
        except UserError as error:  # a key of the base may have an effect in other arms only
            first = checked(Config, raw, place, BY_RUN)
            refusals.append(error)
        for seed in experiment.seeds:
            name = f"{experiment.experiment}-{arm}-{seed}"
            configs[f"{arm}/{seed}"] = first.model_copy(update={"run": name, "seed": seed})
    if len(refusals) == len(experiment.arm_changes()):
        raise refusals[0]
    return configs
