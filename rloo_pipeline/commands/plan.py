"""plan: a configuration → what its run will take, printed before anything is queued."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from rloo_pipeline.artifacts import model_dims
from rloo_pipeline.config import Config
from rloo_pipeline.planning import estimate, memory
from rloo_pipeline.planning.memory import GB
from rloo_pipeline.preflight import inputs


def plan_run(config: Config, gpu: str | None, console: Console | None = None) -> None:
    """Prints jobs, tokens, disk, memory a stage, and with a card what fits and the hours; and what of model and data
    cannot work.

    Raises:
        UserError: the model is not on this machine, the card is not known, or something cannot work.
    """
    console = console or Console()
    card = estimate.card_of(gpu) if gpu else None
    shape = inputs.shape(config)
    _print_plan(config, card, shape, console)
    for note in inputs.refuse(config):
        console.print(f"note: {note}", style="yellow", highlight=False, markup=False)


def _print_plan(config: Config, card: estimate.Card | None, shape: model_dims.ModelDims, console: Console) -> None:
    console.print(
        f"{config.run}: {shape.parameters / 1e6:,.1f} million weights in {config.model.dtype} ({shape.source}), "
        f"{config.rounds} rounds of {config.rollout.sampled_prompts} prompts × {config.rollout.num_generations}",
        highlight=False,
    )
    counts = estimate.jobs(config)
    _rows(console, f"jobs: {sum(counts.values()):,}", {stage: f"{count:,}" for stage, count in counts.items()})
    found = {name: f"{count:,.0f}" for name, count in estimate.tokens(config).items()}
    _rows(console, "tokens, at most", found)
    on_disk = estimate.disk(config, shape)
    sizes = {name: f"{size / GB:,.2f} GB" for name, size in on_disk.items()}
    _rows(console, f"disk: {sum(on_disk.values()) / GB:,.1f} GB", sizes)
    if card is None:
        _on_cpu(config, shape, console)
        return
    fits = list(estimate.fits(config, shape, card))
    for fit in fits:
        _terms(console, f"{fit.stage} on {card.name} ({card.gigabytes:g} GB)", fit.terms)
        if fit.stage == "rollout":
            at_once = estimate.concurrent_sequences(config, shape, fit.terms)
            console.print(f"  the KV cache holds {at_once:,.0f} sequences of full length", highlight=False)
        if not fit.fits:
            console.print(f"  [red]does not fit[/]: {fit.advice}", highlight=False)
    spent = estimate.hours(config, shape, card)
    hours = {stage: f"{value:,.1f}" for stage, value in spent.items()}
    _rows(console, f"GPU-hours: about {sum(spent.values()):,.1f}", hours)
    console.print(f"  assumed: {estimate.ASSUMED}", highlight=False)


def _on_cpu(config: Config, shape: model_dims.ModelDims, console: Console) -> None:
    """Memory a stage where there is no GPU."""
    _terms(console, "update, each process, on CPUs", memory.update(config, shape, "cpu"))
    if config.uses_reference:
        _terms(console, "reference on CPUs", memory.reference(config, shape, "cpu"))
    _terms(console, "rollout on CPUs", memory.rollout(config, shape, "cpu"))
    console.print("Name a card for what fits it and the hours: --cluster-gpu h100:80", highlight=False)


def _terms(console: Console, title: str, terms: memory.Terms) -> None:
    rows = {name: f"{size / GB:,.2f} GB" for name, size in terms.items()}
    _rows(console, f"{title}: {memory.total(terms) / GB:,.2f} GB", rows)


def _rows(console: Console, title: str, rows: dict[str, str]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(f"  {name}", value)
    console.print(title, style="bold", highlight=False)
    console.print(table)
