"""plan --gpus N: prints the best settings for N GPUs, the alternatives, and what does not fit."""

import yaml
from rich.table import Column, Table

from rloo_pipeline.artifacts.model_dims import ModelDims
from rloo_pipeline.before_run import estimate, exchange, layouts, memory, speeds
from rloo_pipeline.before_run.cards import Card
from rloo_pipeline.before_run.layouts import GpuLayout
from rloo_pipeline.config import JSON, Config, nest
from rloo_pipeline.config.loading import flow
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.console import Terminal

ALTERNATIVES = 2


def plan_gpus(config: Config, shape: ModelDims, card: Card, gpus: int) -> None:
    """Prints a block of YAML for N GPUs, alternatives with their hours, and why other layouts do not fit.

    Args:
        config: the run's configuration.
        shape: the model's dimensions.
        card: the GPU.
        gpus: number of GPUs.

    Raises:
        UserError: the run does not fit.
    """
    console, found = Terminal(), layouts.layouts(config, shape, card, gpus)
    fitting, others = [layout for layout in found if not layout.problem], [layout for layout in found if layout.problem]
    shown, one_fits = fitting[: 1 + ALTERNATIVES], layouts.one_fits(found, config)
    machine = f"{gpus} × {card.name} ({card.gigabytes:g} GB)"
    if not one_fits:
        problem = others[0].problem if others else layouts.refusal(config, gpus)
        console.print(f"does not fit on {machine}: {problem}", style="red", soft_wrap=True)
        more = layouts.fewest(config, shape, card, gpus)
        larger = f"It fits on {more} of these GPUs: rloo plan --gpus {more} says how."
        console.print(larger if more else "It does not fit on more of these GPUs either.", style="bold")
    else:
        console.print(f"{config.run} on {machine}: set", style="bold")
        console.print(written(fitting[0]), soft_wrap=True)
    if fitting:
        console.print(_table(shown))
    for layout in shown[1:]:
        console.print(f"  {layout.name}: {written(layout, fitting[0])}")
    for layout in shown:
        if host := memory.total(memory.RunMemory(layout.config, shape).offloaded()):
            processes = min(layout.config.deepspeed.processes, layouts.PER_NODE)
            console.print(f"  {layout.name}: needs {host * processes / memory.GB:,.0f} GB of a node's memory")
    for line in exchange.lines(fitting[0].config, shape, fitting[0].seconds["typical"]) if fitting else ():
        console.print(line)
    if others:
        console.print("\nDo not fit:", style="bold")
    for layout in others:
        console.print(f"  {layout.name}: {layout.problem}")
    console.print(f"\nAssumed: {estimate.ASSUMED}. Without warm start, scoring and evaluations.", style="dim")
    if card.name != speeds.CARD.lower():
        console.print(f"No speed was measured on {card.name}: its speeds come from its data sheet.", style="dim")
    if not one_fits:
        raise UserError(f"{config.run} does not fit on {machine}, see above")


def _table(shown: list[GpuLayout]) -> Table:
    """A table of layouts with hours, GPU-hours, and the parts of a round."""
    names = ("hours", "GPU-hours", "a round", "sampling", "training")
    numbers = (Column(name, justify="right") for name in names)
    table = Table("", *numbers, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for layout in shown:
        hours = f"{_short(layout.hours())} ({_short(layout.hours('fast'))}–{_short(layout.hours('slow'))})"
        seconds = (layout.seconds["typical"], layout.sides.sampling, layout.sides.training)
        table.add_row(layout.name, hours, _short(layout.gpu_hours), *(f"{part:,.0f} s" for part in seconds))
    return table


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def written(layout: GpuLayout, against: GpuLayout | None = None) -> str:
    """The keys of a layout as YAML. If `against` is given, only those that differ from it, on one line."""
    flat = _keys(layout)
    if against is not None:
        others = _keys(against)
        flat = {key: value for key, value in flat.items() if others.get(key) != value}
        return flow(flat)[1:-1]  # without the braces
    text = yaml.safe_dump(nest(flat), default_flow_style=None, sort_keys=False)
    return "\n".join(f"  {line}" for line in text.rstrip().splitlines())


def _keys(layout: GpuLayout) -> JSON:
    """The keys that a layout sets, each written as `section.key`."""
    values, flat = layout.config.model_dump(mode="json", exclude_none=True), {}
    for key in layouts.KEYS:
        section, _, name = key.partition(".")
        value = values[section].get(name)
        if value is not None and not (key in ("deepspeed.nodes", "deepspeed.sequence_parallel") and value == 1):
            flat[key] = {one: value[one] for one in ("r", "lora_alpha")} if name == "lora" else value
    return flat
