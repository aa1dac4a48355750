"""plan: prints an estimate of what a run needs, before anything is queued."""

from collections.abc import Mapping

from rich.table import Column, Table
from rich.text import Text

from rloo_pipeline.artifacts import model_dims
from rloo_pipeline.before_run import (
    checkpointing,
    dataset_inputs,
    estimate,
    exchange,
    inputs,
    memory,
    model_inputs,
    node_checks,
    queueing,
)
from rloo_pipeline.before_run.cards import Card, card_here
from rloo_pipeline.before_run.estimate import GpuEstimate, RewardModelCost
from rloo_pipeline.before_run.memory import GB, RunMemory, Terms, total
from rloo_pipeline.commands.plan_gpus import plan_gpus
from rloo_pipeline.config import Config
from rloo_pipeline.config.run_set import RunSet
from rloo_pipeline.errors import UserError, counted
from rloo_pipeline.runtime import devices
from rloo_pipeline.runtime.console import Terminal

DEFAULT_CARD = "h100"
"""Default card for `--gpus`."""


def plan(runs: RunSet, gpu: str | None, wait: float | None = None, gpus: int | None = None) -> None:
    """Prints the estimate for a run, or for an experiment and each of its arms.

    Raises:
        UserError: as for `plan_run`; or --profile and --gpus are combined, or one of them with an experiment.
    """
    if gpus is not None and wait is not None:
        raise UserError("--profile: the queue is estimated for one layout, but --gpus compares several; leave one out")
    if runs.experiment is None and gpus is not None:
        shape, dtype = model_inputs.shape(runs.first), runs.first.model.dtype
        plan_gpus(runs.first, shape, card_here(gpu or DEFAULT_CARD, dtype), gpus)
        return
    if runs.experiment is None:
        plan_run(runs.first, gpu, wait)
        return
    if option := "--gpus" if gpus is not None else "--profile" if wait is not None else None:
        advice = "pass the configuration of its base"
        raise UserError(f"{option} plans a single run, but {runs.name} is an experiment; {advice}")
    console = Terminal()
    dtypes = {config.model.dtype for config in runs.configs.values()}
    card = card_here(gpu, "bfloat16" if "bfloat16" in dtypes else "float32") if gpu else None
    seeds = len(runs.experiment.seeds)
    arms = {arm: runs.configs[f"{runs.name}/{arm}/{runs.experiment.seeds[0]}"] for arm in runs.experiment.arm_changes()}
    columns = ("jobs", "completion tokens", "disk, GB", *(["GPU-hours"] if card else []))
    numbers = (Column(column, justify="right") for column in columns)
    table = Table(Column("arm", overflow="fold"), *numbers, box=None, padding=(0, 2, 0, 0), header_style="dim")
    sums = [0.0] * len(columns)
    prompts = {arm: _difficulty_prompts(config) or 0 for arm, config in arms.items()}
    for arm, config in arms.items():
        row = [seeds * value for value in _costs(config, card, prompts[arm])]
        sums = [before + value for before, value in zip(sums, row, strict=True)]
        table.add_row(arm, *map(_rounded, row))
    sums[0] += 1 - estimate.jobs_saved(runs)  # plus the page of the experiment
    sums[1] -= estimate.tokens_saved(runs, max(prompts.values()))
    if runs.first.select:  # one choice, and a test and its proof for each seed of the chosen arm
        sums[0] += 1 + 2 * seeds - 3 * len(runs.configs)
    table.add_row("all", *map(_rounded, sums), style="bold")
    console.print(
        f"{runs.name}: {counted(len(arms), 'arm')} × {counted(seeds, 'seed')} = {counted(len(runs.configs), 'run')}"
    )
    console.print(table)
    console.print(
        f"Shared: {counted(len(runs.shared), 'group')} of files, which saves {estimate.jobs_saved(runs):,} jobs."
    )
    for note in dict.fromkeys(note for config in arms.values() for note in inputs.require(config)):
        console.print(f"note: {note}", style="yellow")


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value % 1 == 0 else f"{value:,.1f}"


def _difficulty_prompts(config: Config) -> int | None:
    """Number of training prompts whose pass rate is measured with policy 0; None if unknown, or if it is not
    measured.
    """
    return dataset_inputs.training_rows(config) if config.measures_difficulty else None


def _costs(config: Config, card: Card | None, prompts: int) -> list[float]:
    """Jobs, completion tokens, GB on disk and, if a card is given, GPU-hours of one run.

    Args:
        config: the run's configuration.
        card: the GPU; None for CPUs.
        prompts: number of training prompts that the stage `difficulty` samples.
    """
    shape = model_inputs.shape(config)
    disk = sum(estimate.disk(RunMemory(config, shape)).values()) / GB
    parts = [config, *([estimate.of_difficulty(config, prompts)] if prompts else [])]
    sampled = sum(estimate.tokens(part)["completion tokens"] for part in parts)
    costs = [float(sum(estimate.jobs(config).values())), sampled, disk]
    if card is None:
        return costs
    config = checkpointing.resolve_for(config, shape, "cuda", card.room)
    difficulty = [GpuEstimate(part, shape, card).hours()["rollout"] for part in parts[1:]]
    hours = GpuEstimate(config, shape, card, model_inputs.teacher_shape(config)).hours()
    return [*costs, sum(hours.values()) + sum(difficulty)]


def plan_run(config: Config, gpu: str | None, wait: float | None = None) -> None:
    """Prints jobs, tokens, disk and memory per stage; for a GPU model, also whether stages fit, hours and GPU-hours.

    Args:
        config: the run's configuration.
        gpu: name of a GPU model, such as `h100:80`.
        wait: minutes that a SLURM job waits in the queue; None without SLURM.

    Raises:
        UserError: the model is not on this machine, the GPU is unknown, or model or data cannot be used.
    """
    console = Terminal()
    card = card_here(gpu, config.model.dtype) if gpu else None
    shape, asked = model_inputs.shape(config), config.deepspeed
    room = devices.machine_bytes() / config.deepspeed.processes if card is None else card.room
    reward_model = estimate.reward_model(config, shape, room, card)
    config = checkpointing.resolve_for(config, shape, "cuda" if card else "cpu", room)
    teacher = model_inputs.teacher_shape(config)
    on_gpus = GpuEstimate(config, shape, card, teacher) if card else None
    problem = (on_gpus.problem if on_gpus else "") or (reward_model.problem if reward_model else "")
    if problem and card:
        console.print(f"does not fit on {card.name} ({card.gigabytes:g} GB): {problem}", style="red", soft_wrap=True)
    _print_run(config, shape, console)
    if config.measures_difficulty:
        _print_difficulty(config, shape, card, console)
    if reward_model is not None:
        _print_reward_model(reward_model, card, console)
    if asked.max_tokens_per_micro_batch == "auto" and card:
        console.print(f"deepspeed.max_tokens_per_micro_batch: auto is {config.deepspeed.micro_batch_tokens}")
    if asked.gradient_checkpointing == "auto":
        needed = "on, to fit" if config.deepspeed.gradient_checkpointing else "off, not needed"
        console.print(f"deepspeed.gradient_checkpointing: auto is {needed}")
    keeps_engines, work = config.workers != "never", None
    if on_gpus is None:
        _print_cpu(RunMemory(config, shape, "cpu"), teacher, console)
    else:
        hours = on_gpus.hours(warm=wait is None and keeps_engines)
        _print_gpu(on_gpus, hours, console)
        kept = on_gpus.hours(warm=keeps_engines)  # a single job for the whole run keeps its engines
        work = (_round_seconds(config, hours) * config.rounds, _round_seconds(config, kept) * config.rounds)
    if wait is not None:
        _print_slurm(config, 60 * wait, work, console)
    if config.node_folder is not None:
        console.print(exchange.node_line(config, shape), soft_wrap=True)
        found = node_checks.node_folder(config, RunMemory(config, shape).policy)
        if card is None and not found.ok:
            raise UserError(found.sentence)
    for note in inputs.require(config):
        console.print(f"note: {note}", style="yellow")
    if problem:
        raise UserError(f"{config.run} does not fit, see the first line; --gpus N says what to set with N GPUs")


def _round_seconds(config: Config, hours: Mapping[str, float]) -> float:
    return queueing.side_seconds(config, hours).round_seconds(config.rollout.lag)


def _print_run(config: Config, shape: model_dims.ModelDims, console: Terminal) -> None:
    console.print(
        f"{config.run}: {shape.parameters / 1e6:,.1f} million weights in {config.model.dtype} ({shape.source}), "
        f"{counted(config.rounds, 'round')} of {config.rollout.sampled_prompts} prompts × "
        f"{config.rollout.num_generations}"
    )
    jobs = estimate.jobs(config)
    _print_rows(console, f"jobs: {sum(jobs.values()):,}", {stage: f"{count:,}" for stage, count in jobs.items()})
    tokens = {name: f"{count:,.0f}" for name, count in estimate.tokens(config).items()}
    _print_rows(console, "tokens, at most", tokens)
    run = RunMemory(config, shape)
    disk = estimate.disk(run)
    sizes = {name: f"{size / GB:,.2f} GB" for name, size in disk.items()}
    _print_rows(console, f"disk: {sum(disk.values()) / GB:,.1f} GB in about {estimate.files(run):,} files", sizes)


def _print_difficulty(config: Config, shape: model_dims.ModelDims, card: Card | None, console: Terminal) -> None:
    """Prints the one-time cost of the stage `difficulty`."""
    prompts = _difficulty_prompts(config)
    if prompts is None:
        console.print("difficulty: all training prompts, whose number is not known before they are downloaded")
        return
    sampled = estimate.of_difficulty(config, prompts)
    counts = estimate.tokens(sampled)
    hours = f", about {GpuEstimate(sampled, shape, card).hours()['rollout']:,.1f} GPU-hours" if card else ""
    console.print(
        f"difficulty, once: {prompts:,} prompts × {sampled.rollout.num_generations}, at most "
        f"{counts['completion tokens']:,.0f} completion tokens{hours}"
    )


def _print_reward_model(cost: RewardModelCost, card: Card | None, console: Terminal) -> None:
    """Prints the one-time cost of the stage `reward_model`."""
    tokens = "the preferences, which are not downloaded yet" if cost.tokens is None else f"{cost.tokens:,.0f} tokens"
    hours = "" if cost.hours is None else f", about {cost.hours:,.1f} GPU-hours"
    console.print(f"reward model, once: at most {tokens}{hours}")
    _print_memory(console, f"reward model, each process, on {card.name if card else 'CPUs'}", cost.terms)


def _print_gpu(run: GpuEstimate, hours: Mapping[str, float], console: Terminal) -> None:
    config, card = run.config, run.card
    for fit in run.fits():
        _print_memory(console, f"{fit.stage} on {card.name} ({card.gigabytes:g} GB)", fit.terms)
        if fit.stage == "update" and (host := run.memory.offloaded()):
            _print_memory(console, "  and in the memory of the node, for each process", host)
            if disk := run.memory.on_disk():
                _print_memory(console, "  and on its disk, for each process", disk)
        if fit.stage == "rollout":
            sequences = run.memory.concurrent_sequences(fit.terms)
            console.print(f"  the KV cache holds {sequences:,.0f} sequences of full length")
        if not fit.fits:
            console.print(Text.assemble("  ", ("does not fit", "red"), f": {fit.advise()}"))
    wall, gpus = queueing.wall_seconds(config, hours), queueing.gpus_of(config)
    rows = {
        stage: f"{value:,.1f} GPU-hours on {gpus[stage]} GPUs: {estimate.minutes(wall[stage])}"
        for stage, value in hours.items()
    }
    round_ = _round_seconds(config, hours)
    whole = f"{estimate.minutes(config.rounds * round_)}, {config.rounds:,} × {round_:,.1f} s"
    _print_rows(console, f"GPU-hours: about {sum(hours.values()):,.1f}; wall-clock: about {whole}", rows)
    for line in exchange.lines(config, run.shape, round_):
        console.print(line)
    console.print(f"  assumed: {estimate.ASSUMED}; wall-clock without warm start, scoring, evaluation and queues")
    if config.rollout.refill:
        console.print(f"  not in these hours: up to {config.rollout.refill} refills of a round (rollout.refill)")


def _print_slurm(config: Config, wait: float, work: tuple[float, float] | None, console: Terminal) -> None:
    """Prints jobs, queue time and wall-clock time of each way to run on SLURM.

    Args:
        config: the run's configuration.
        wait: seconds that a job waits in the queue.
        work: seconds that the stages take in each of `queueing.modes`; None if unknown.
    """
    names = ("jobs", "waits", "queue", "wall-clock", "GPUs")
    numbers = (Column(name, justify="right", no_wrap=True) for name in names)
    table = Table(Column(no_wrap=True), *numbers, box=None, padding=(0, 1), header_style="dim")
    for mode, seconds in zip(queueing.modes(config, wait), work or (None, None), strict=True):
        whole = "?" if seconds is None else estimate.minutes(mode.queue + seconds)
        cells = (f"{mode.jobs:,}", f"{mode.waits:,}", estimate.minutes(mode.queue), whole, f"{mode.gpus}")
        table.add_row(mode.command, *cells)
    console.print(f"SLURM, {estimate.minutes(wait)} in the queue for each job (--wait)", style="bold")
    console.print(table)
    console.print(f"  advice: {queueing.advice(config, wait, work)}")
    if work is None:
        console.print("  --gpu adds the wall-clock.")


def _print_cpu(run: RunMemory, teacher: model_dims.ModelDims | None, console: Terminal) -> None:
    _print_memory(console, "update, each process, on CPUs", run.update())
    if run.config.uses_reference:
        _print_memory(console, "reference on CPUs", run.reference())
    if teacher:
        _print_memory(console, "teacher on CPUs", run._replace(shape=teacher).reference())
    _print_memory(console, "rollout on CPUs", run.rollout())
    if models := memory.reward_models(run.config, estimate.own_reward_model(run.config, run.shape), "cpu"):
        several = f", each of up to {run.config.rollout.shards} workers" if run.config.rollout.shards > 1 else ""
        _print_memory(console, f"reward models on CPUs, also between their stages{several}", models)
    console.print("Name a GPU to see what fits on it and the GPU-hours: --gpu h100:80")


def _print_memory(console: Terminal, title: str, terms: Terms) -> None:
    rows = {name: f"{size / GB:,.2f} GB" for name, size in terms.items()}
    _print_rows(console, f"{title}: {total(terms) / GB:,.2f} GB", rows)


def _print_rows(console: Terminal, title: str, rows: dict[str, str]) -> None:
    table = Table.grid(Column(), Column(justify="right"), padding=(0, 2))
    for name, value in rows.items():
        table.add_row(f"  {name}", value)
    console.print(title, style="bold")
    console.print(table)
