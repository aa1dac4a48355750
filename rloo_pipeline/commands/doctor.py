"""doctor: checks that a node has everything that a run needs; prints a line for each, with advice if it is missing."""

from collections.abc import Iterator
from pathlib import Path

from rloo_pipeline.before_run import estimate, gpus, image, model_inputs, node_checks, slurm_checks
from rloo_pipeline.before_run.findings import Finding, show
from rloo_pipeline.before_run.memory import RunMemory
from rloo_pipeline.cluster import containers
from rloo_pipeline.config import Config
from rloo_pipeline.config.loading import ConfigArguments
from rloo_pipeline.errors import UserError, counted
from rloo_pipeline.runtime.console import Terminal


def doctor(arguments: ConfigArguments, project: Path, profile: Path | None, with_image: bool) -> None:
    """Checks this node and prints the findings.

    Args:
        arguments: configuration of the planned run.
        project: folder with workflow/ and containers/.
        profile: Snakemake profile whose partitions are checked; None without SLURM.
        with_image: True if stages will run in the image.

    Raises:
        UserError: a check found a problem.
    """
    problems = show(_findings(arguments, project, profile, with_image), Terminal())
    if problems:
        raise UserError(f"{counted(problems, 'problem')}, see above for what to do")


def _findings(arguments: ConfigArguments, project: Path, profile: Path | None, with_image: bool) -> Iterator[Finding]:
    config = arguments.config
    yield from node_checks.architecture()
    vllm_cache = None
    if with_image:
        name = containers.image(config.container, project)
        yield from image.findings(name)
        vllm_cache = containers.compiled_folder(name) / containers.COMPILED["VLLM_CACHE_ROOT"]
    yield from gpus.findings(config, with_image, vllm_cache)
    # with the options of the run itself: without --sdm, a run in the image would rerun `stage-assets`
    call = f"{arguments.run_command} --sdm apptainer" if with_image else arguments.run_command
    yield from node_checks.findings(config, _bytes_written(config), f"{call} -- results/{config.run}/assets")
    if profile is None:
        yield from node_checks.machine(config)
    else:
        yield from slurm_checks.findings(profile, project / "workflow" / "rules", config)


def _bytes_written(config: Config) -> float | None:
    """Bytes that the run will write, as estimated by `rloo plan`; None if the model's size is unknown."""
    try:
        return float(sum(estimate.disk(RunMemory(config, model_inputs.shape(config))).values()))
    except UserError:
        return None
