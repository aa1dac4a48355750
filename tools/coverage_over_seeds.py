"""Measures how often the intervals over seeds contain the truth, and writes them into docs/generated/experiments.md.

`python tools/coverage_over_seeds.py` simulates experiments with known truth: the log-odds of a right answer are a
constant plus normal effects of the training and of the prompt; some trainings may collapse to no right answer.
Two arms share the prompts and half of the training's variance, as arms with the same warm start do.
"""

from __future__ import annotations

import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from marks import write_part
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit, ndtri

from rloo_pipeline.judging.across_seeds import compare_arms, summarize_arm

PAGE = Path(__file__).parents[1] / "docs" / "generated" / "experiments.md"
EXPERIMENTS = 500
"""Simulated experiments for each cell."""
SEEDS = (3, 5, 10)
PROMPTS = (50, 200, 1000)
SHARES = (0.0, 0.002, 0.02, 0.1, 0.5, 0.9, 0.98, 0.998, 1.0)
SPREADS = (0.3, 1.0)
"""Standard deviations between trainings, in log-odds."""
OF_PROMPTS = 1.5
"""Standard deviation between prompts, in log-odds."""
COLLAPSED = 0.2
POWER_SEEDS = (6, 8, 10, 12, 16)
EFFECTS = (1.0, 1.5, 2.0)
MANY = 2000
"""Seeds from which the standard deviation of a seed's difference is measured."""

Array = NDArray[np.float64]
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(61)


class Cell(NamedTuple):
    """One kind of experiment."""

    seeds: int
    prompts: int
    share: float
    """True share of right answers of trainings that do not collapse."""
    spread: float
    collapsed: float
    """Probability that a training collapses."""


class Hits(NamedTuple):
    """Numbers of experiments in which an interval contains the truth."""

    mean: int
    iqm: int | None
    """None with too few seeds for an interquartile mean."""
    difference: int
    """Difference between the arm and one whose share is a tenth nearer to 0.5."""
    false_alarms: int
    """Experiments in which two equal arms have a p-value below 5%."""


@cache
def constant(share: float, spread: float) -> float:
    """Log-odds that give a share, averaged over a normal effect."""
    if share in (0.0, 1.0):
        return np.inf if share else -np.inf
    return float(brentq(lambda odds: _average(odds, spread) - share, -60, 60))


def _average(odds: float, spread: float) -> float:
    return float((WEIGHTS * expit(odds + spread * NODES)).sum() / WEIGHTS.sum())


@cache
def middle_half(cell: Cell) -> float:
    """The true interquartile mean of trainings."""
    odds = constant(cell.share, float(np.hypot(cell.spread, OF_PROMPTS)))
    if np.isinf(odds):
        return cell.share
    quantiles = (np.linspace(0.25, 0.75, 401)[:-1] + 0.5 / 800 - cell.collapsed) / (1 - cell.collapsed)
    return float(np.mean([_average(odds + cell.spread * ndtri(place), OF_PROMPTS) for place in quantiles]))


def hits(cell: Cell, experiments: int, draw: np.random.Generator) -> Hits:
    """Simulates experiments of a cell."""
    other = 0.9 * cell.share + 0.05
    odds = [constant(share, float(np.hypot(cell.spread, OF_PROMPTS))) for share in (cell.share, cell.share, other)]
    alive, middle = 1 - cell.collapsed, middle_half(cell)
    counts, has_iqm = np.zeros(4, dtype=int), True
    for _ in range(experiments):
        arm, same, third = _answers(cell, odds, draw)
        summary = summarize_arm(arm)
        apart, alike = compare_arms(arm, third, 1, 0), compare_arms(arm, same, 1, 0)
        has_iqm = summary.iqm is not None
        counts += [
            _contains(summary.mean.ci95, alive * cell.share),
            _contains(summary.iqm and summary.iqm.ci95, middle),
            _contains(apart.ci95, alive * (cell.share - other)),
            _below_5_percent(alike.p),
        ]
    mean, iqm, difference, alarms = map(int, counts)
    return Hits(mean, iqm if has_iqm else None, difference, alarms)


def _answers(cell: Cell, odds: list[float], draw: np.random.Generator) -> list[Array]:
    """Right or wrong answers of arms with these log-odds, each [seeds, prompts]."""
    of_prompts = draw.normal(0, OF_PROMPTS, cell.prompts)
    shared, *own = draw.normal(0, cell.spread * np.sqrt(0.5), (1 + len(odds), cell.seeds, 1))
    tables = []
    for of_arm, of_trainings in zip(odds, own, strict=True):
        right = draw.random((cell.seeds, cell.prompts)) < expit(of_arm + of_prompts + shared + of_trainings)
        tables.append((right & (draw.random((cell.seeds, 1)) >= cell.collapsed)).astype(float))
    return tables


def _contains(interval: tuple[float, float] | None, truth: float) -> bool:
    return interval is not None and interval[0] <= truth <= interval[1]


def _below_5_percent(p: float | None) -> bool:
    return p is not None and p < 0.05


def power(cell: Cell, effect: float, experiments: int, draw: np.random.Generator) -> int:
    """Experiments with p below 5%, if the arms differ by `effect` standard deviations of a seed's difference."""
    odds = [constant(cell.share, float(np.hypot(cell.spread, OF_PROMPTS)))] * 2
    arm, other = _answers(cell._replace(seeds=MANY), odds, draw)
    shift = effect * float((arm - other).mean(axis=1).std())
    pairs = (_answers(cell, odds, draw) for _ in range(experiments))
    return sum(_below_5_percent(compare_arms(arm + shift, other, 1, 0).p) for arm, other in pairs)


def coverage_table(draw: np.random.Generator) -> str:
    """Lowest and highest coverage over all prompts, shares and spreads, by seeds, in Markdown."""
    lines = [
        "| seeds | one training in five collapses | mean | interquartile mean | difference | equal arms with p < 5% |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for seeds, collapsed in product(SEEDS, (0.0, COLLAPSED)):
        cells = [Cell(seeds, *rest, collapsed) for rest in product(PROMPTS, SHARES, SPREADS)]
        measured = [hits(cell, EXPERIMENTS, draw) for cell in cells]
        print(seeds, collapsed, *zip(cells, measured, strict=True), sep="\n", file=sys.stderr)
        columns = [_range(column) for column in zip(*measured, strict=True)]
        lines.append(f"| {seeds} | {'yes' if collapsed else 'no'} | {' | '.join(columns)} |")
    return "\n".join(lines)


def _range(counts: tuple[int | None, ...]) -> str:
    shares = [f"{100 * count / EXPERIMENTS:.0f}" for count in sorted(one for one in counts if one is not None)]
    return f"{' to '.join(dict.fromkeys((shares[0], shares[-1])))}%" if shares else ""


def power_table(draw: np.random.Generator) -> str:
    """Lowest and highest power over all prompts and spreads, by seeds and difference, in Markdown."""
    lines = [
        f"| seeds | {' | '.join(f'difference of {effect:g} s' for effect in EFFECTS)} |",
        f"|---:|{'---:|' * len(EFFECTS)}",
    ]
    for seeds, own in zip(POWER_SEEDS, draw.spawn(len(POWER_SEEDS)), strict=True):
        cells = [Cell(seeds, prompts, 0.5, spread, 0.0) for prompts, spread in product(PROMPTS, SPREADS)]
        counts = [tuple(power(cell, effect, EXPERIMENTS, own) for cell in cells) for effect in EFFECTS]
        print(seeds, EFFECTS, *zip(cells, zip(*counts, strict=True), strict=True), sep="\n", file=sys.stderr)
        lines.append(f"| {seeds} | {' | '.join(map(_range, counts))} |")
    return "\n".join(lines)


def main() -> None:
    """Writes both tables."""
    tables = {"power": power_table, "coverage": coverage_table}
    for name, written in {name: table(np.random.default_rng(0)) for name, table in tables.items()}.items():
        write_part(PAGE, name, written + "\n")


if __name__ == "__main__":
    main()
