"""plan: a configuration → an estimate of what its run needs, printed before anything is queued."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from rloo_pipeline.artifacts import model_dims
from rloo_pipeline.config import Config
from rloo_pipeline.planning import estimate, memory
from rloo_pipeline.planning.memory import GB
from rloo_pipeline.preflight import inputs, model_inputs
from rloo_pipeline.runtime.console import Terminal


def plan_run(config: Config, gpu: str | None, console: Terminal | None = None) -> None:
    """Prints jobs, tokens, disk and memory per stage; with a GPU model also what fits and the GPU-hours.

    Args:
        config: of the run.
        gpu: name of a GPU model, such as `h100:80`.
        console: where to print; by default standard output.

    Raises:
        UserError: the model is not on this machine, the GPU is unknown, or model or data cannot be used.
    """
    console = console or Terminal()
    card = estimate.card_of(gpu) if gpu else None
    shape = model_inputs.shape(config)
    _print_run(config, shape, console)
    if card is None:
        _print_cpu(config, shape, console)
    else:
        _print_gpu(config, card, shape, console)
    for note in inputs.require(config):
        console.print(f"note: {note}", style="yellow")


def _print_run(config: Config, shape: model_dims.ModelDims, console: Terminal) -> None:
    console.print(
        f"{config.run}: {shape.parameters / 1e6:,.1f} million weights in {config.model.dtype} ({shape.source}), "
        f"{config.rounds} rounds of {config.rollout.sampled_prompts} prompts × {config.rollout.num_generations}"
    )
    jobs = estimate.jobs(config)
    _print_rows(console, f"jobs: {sum(jobs.values()):,}", {stage: f"{count:,}" for stage, count in jobs.items()})
    tokens = {name: f"{count:,.0f}" for name, count in estimate.tokens(config).items()}
    _print_rows(console, "tokens, at most", tokens)
    disk = estimate.disk(config, shape)
    sizes = {name: f"{size / GB:,.2f} GB" for name, size in disk.items()}
    _print_rows(console, f"disk: {sum(disk.values()) / GB:,.1f} GB", sizes)


def _print_gpu(config: Config, card: estimate.Card, shape: model_dims.ModelDims, console: Terminal) -> None:
    for fit in estimate.fits(config, shape, card):
        _print_memory(console, f"{fit.stage} on {card.name} ({card.gigabytes:g} GB)", fit.terms)
        if fit.stage == "rollout":
            sequences = estimate.concurrent_sequences(config, shape, fit.terms)
            console.print(f"  the KV cache holds {sequences:,.0f} sequences of full length")
        if not fit.fits:
            console.print(Text.assemble("  ", ("does not fit", "red"), f": {fit.advice}"))
    hours = estimate.hours(config, shape, card)
    rows = {stage: f"{value:,.1f}" for stage, value in hours.items()}
    _print_rows(console, f"GPU-hours: about {sum(hours.values()):,.1f}", rows)
    console.print(f"  assumed: {estimate.ASSUMED}")


def _print_cpu(config: Config, shape: model_dims.ModelDims, console: Terminal) -> None:
    _print_memory(console, "update, each process, on CPUs", memory.update(config, shape, "cpu"))
    if config.uses_reference:
        _print_memory(console, "reference on CPUs", memory.reference(config, shape, "cpu"))
    _print_memory(console, "rollout on CPUs", memory.rollout(config, shape, "cpu"))
    console.print("Name a GPU to see what fits on it and the GPU-hours: --cluster-gpu h100:80")


def _print_memory(console: Terminal, title: str, terms: memory.Terms) -> None:
    rows = {name: f"{size / GB:,.2f} GB" for name, size in terms.items()}
    _print_rows(console, f"{title}: {memory.total(terms) / GB:,.2f} GB", rows)


def _print_rows(console: Terminal, title: str, rows: dict[str, str]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(f"  {name}", value)
    console.print(title, style="bold")
    console.print(table)
