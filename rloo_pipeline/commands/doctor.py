"""doctor: a node and a configuration → a line for each thing that a run needs, and what to do where it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from rloo_pipeline.cluster import containers
from rloo_pipeline.config import Config
from rloo_pipeline.config.loading import ConfigArguments
from rloo_pipeline.errors import UserError
from rloo_pipeline.planning import estimate
from rloo_pipeline.preflight import Finding, image, inputs, places, show, slurm


def doctor(
    arguments: ConfigArguments, project: Path, profile: Path | None, with_image: bool, console: Console | None = None
) -> None:
    """Looks at this node, prints what it finds.

    Args:
        arguments: the configuration of the run that is to be started.
        project: the folder with workflow/ and containers/.
        profile: of Snakemake, whose partitions are looked at; None where there is no SLURM.
        with_image: whether stages are to run in the image.
        console: where to print; standard output where not given.

    Raises:
        UserError: there is a problem.
    """
    problems = show(_look(arguments, project, profile, with_image), console or Console())
    if problems:
        raise UserError(f"{problems} {'problem' if problems == 1 else 'problems'}: see above what to do about them")


def _look(arguments: ConfigArguments, project: Path, profile: Path | None, with_image: bool) -> Iterator[Finding]:
    config = arguments.config
    if with_image:
        yield from image.look(containers.image(config, project))
    yield from places.look(config, _needed(config), inputs.fetch_all(config, arguments.snakemake_arguments))
    if profile is None and config.model.dtype != "float32":
        yield places.number_format(config.model.dtype)
    if profile is not None:
        yield from slurm.look(profile, project / "workflow" / "rules", config)


def _needed(config: Config) -> float | None:
    """Bytes that the run will write, as `rloo plan` counts them; None where the model's size is not known."""
    try:
        return float(sum(estimate.disk(config, inputs.shape(config)).values()))
    except UserError:
        return None
