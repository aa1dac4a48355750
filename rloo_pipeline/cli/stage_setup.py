"""Set-up that all stage commands share: the run's configuration, and the ranks of stages that train."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from rloo_pipeline.artifacts import fence, function_copies, lineage
from rloo_pipeline.cluster import nodes
from rloo_pipeline.config import Config, Deepspeed
from rloo_pipeline.config.loading import load
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import environment, gpu_claims, ranks, reproducible
from rloo_pipeline.workers import engine_cache
from rloo_pipeline.workers.gpu_shares import role_of

INPUTS = (
    *("assets", "prompts", "policy", "sampler", "start", "trainer", "rollouts", "scores", "reference", "teacher"),
    *("before", "after", "parts", "difficulty", "pass_rates", "earlier", "probed", "completions"),
)
"""Stage arguments that name files of the run to read."""


def stage_config(arguments: argparse.Namespace, stage: str) -> Config:
    """The sections of the configuration that the stage may read.

    Without `--config`, it is the run folder's configuration, with the run's frozen functions; and the fence then makes
    this process the only writer of the output.
    """
    if arguments.config:
        config = load(arguments.config)
        reproducible.prepare(config.reproducible)
        return config.only(stage)
    run = run_folder(arguments)
    fence.acquire(run, arguments.output)
    function_copies.use(run)
    config = load(run / "config.yaml")
    reproducible.prepare(config.reproducible)
    lineage.require_own(config.seed, _inputs(arguments), card_facts(config, stage))
    lineage.require_configured(config, _inputs(arguments))
    return config.only(stage)


def card_facts(config: Config, stage: str) -> dict[str, str]:
    """The fact about the card of a stage's engine in a reproducible run, if it has an engine."""
    role = role_of(stage)
    return reproducible.card(config.reproducible, role) if role in ("sampler", "logprobs", "trainer") else {}


def _inputs(arguments: argparse.Namespace) -> Iterator[Path]:
    """Yields the files and folders of the run that a stage reads."""
    for name in INPUTS:
        value = getattr(arguments, name, None)
        yield from (path for path in (value if isinstance(value, list) else [value]) if isinstance(path, Path))
    if isinstance(held_out := getattr(arguments, "held_out", None), list):  # of `score`: one file to read, one to write
        yield held_out[0]


def whole_config(arguments: argparse.Namespace) -> Config:
    """The run's configuration with all its sections."""
    return load(arguments.config or run_folder(arguments) / "config.yaml")


def run_folder(arguments: argparse.Namespace) -> Path:
    """The folder of the run: the nearest one above the output that has a config.yaml.

    Raises:
        UserError: there is none.
    """
    output: Path = arguments.output
    for folder in output.absolute().parents:
        if (folder / "config.yaml").exists():
            return folder
    raise UserError(f"{output}: no config.yaml in a folder above it; pass the configuration with --configfile")


def runs_here(arguments: argparse.Namespace, section: Deepspeed, processes: int | None = None) -> bool:
    """True if this process runs the stage: as its only process, or as one of its ranks.

    Otherwise passes the arguments to ranks and waits for them. Starts the ranks unless this worker keeps some.

    Args:
        arguments: the command's arguments.
        section: number of processes, nodes and threads.
        processes: overrides the section's number of processes.
    """
    environment.use_threads(section.threads)
    processes = processes or section.processes
    if section.nodes == 1 and not ranks.is_rank():
        gpu_claims.claim(processes, from_the_end=True)
    argv = without_log(arguments.argv)
    if section.nodes > 1 and processes == 1 and nodes.is_outside_image():  # its rule may have started ranks instead
        nodes.launch(nodes.RankLayout(1, 1, section.threads), arguments.output, argv)
        return False
    if processes == 1 or ranks.is_rank():
        nodes.join()
        return True
    layout = nodes.RankLayout(section.nodes, processes, section.threads)
    if engine_cache.is_enabled():
        from rloo_pipeline.cluster.node_ranks import NodeRanks
        from rloo_pipeline.workers import kept_ranks

        over_nodes = partial(NodeRanks, layout, arguments.output)
        kept_ranks.run(processes, argv, over_nodes if section.nodes > 1 else None)
    elif section.nodes > 1:
        nodes.launch(layout, arguments.output, argv)
    else:
        from rloo_pipeline.runtime import torchrun

        torchrun.launch(processes, argv)
    return False


def without_log(argv: Sequence[str]) -> list[str]:
    """The arguments without `--log`: ranks write to the log of the process that starts them."""
    rest = [argument for argument in argv if not argument.startswith("--log=")]
    place = rest.index("--log") if "--log" in rest else len(rest)
    return rest[:place] + rest[place + 2 :]
