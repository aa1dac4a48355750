"""Computes the layout of the SVG in page.dag.j2, which shows the DAG of a run with the time of each stage."""

from collections.abc import Sequence
from typing import NamedTuple

from rloo_pipeline.report.jobs import Cost
from rloo_pipeline.stages.table import PICTURE, ROWS

WIDTH, HEIGHT = 126, 48
STEP = 152
"""Distance between columns."""
MARGIN = 12
PLACES = {rule: (column, y) for rule, (column, y, _) in PICTURE.items()}
"""Column and vertical position of each rule's box. Columns without boxes are skipped."""
IN_ROUNDS = {row.rule for row in ROWS if row.rule in PICTURE and row.phase == "round" and not row.local}
ALWAYS = {row.rule for row in ROWS if row.rule in PICTURE and row.when is None}
"""Rules that are always shown. Other rules are left out if the run had no jobs for them."""
ARROWS = [(before, rule) for rule, (*_, befores) in PICTURE.items() for before in befores]
BY_REFILL = {("score", "update"), ("score", "pass_rates")}
"""Arrows that are left out if a refill comes in between."""


class Box(NamedTuple):
    """The box of a stage."""

    stage: str
    x: float
    """Centre of the box, like `y`."""
    y: float
    cost: Cost | None
    """None if the result came from a cache."""
    share: float
    """Share of the total time of all jobs."""


class Area(NamedTuple):
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float


class Picture(NamedTuple):
    """Boxes and arrows, the latter as SVG paths."""

    boxes: list[Box]
    arrows: list[str]
    rounds: Area
    """Frame around the stages of a round."""
    whole: Area


def picture(costs: Sequence[Cost]) -> Picture:
    """Lays out the DAG of a run in which these stages had jobs."""
    by_stage = {cost.stage: cost for cost in costs}
    total = sum(cost.seconds for cost in costs) or 1.0
    shown = {stage: place for stage, place in PLACES.items() if stage in by_stage or stage in ALWAYS}
    columns = sorted({column for column, _ in shown.values()})
    at = {stage: (70 + STEP * columns.index(column), y) for stage, (column, y) in shown.items()}
    boxes = [
        Box(stage, x, y, by_stage.get(stage), by_stage[stage].seconds / total if stage in by_stage else 0.0)
        for stage, (x, y) in at.items()
    ]
    replaced = BY_REFILL if "refill" in at else set()
    arrows = [_arrow(*at[a], *at[b]) for a, b in ARROWS if {a, b} <= at.keys() and (a, b) not in replaced]
    rounds = _around([box for box in boxes if box.stage in IN_ROUNDS], MARGIN)
    return Picture(boxes, arrows, rounds, _around(boxes, 2 * MARGIN))


def _around(boxes: Sequence[Box], margin: float) -> Area:
    left, right = min(box.x for box in boxes) - WIDTH / 2, max(box.x for box in boxes) + WIDTH / 2
    top, bottom = min(box.y for box in boxes) - HEIGHT / 2, max(box.y for box in boxes) + HEIGHT / 2
    return Area(left - margin, top - margin, right - left + 2 * margin, bottom - top + 2 * margin)


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """SVG path from the edge of one box to that of another: horizontal if they are side by side, otherwise vertical.
    Over several columns it turns only after the boxes in between, so that it does not pass behind them.
    """
    if abs(to_x - x) > WIDTH:
        turn, end = to_x + WIDTH / 2 - STEP, to_x - WIDTH / 2 - 3
        middle = (turn + end) / 2
        return f"M{x + WIDTH / 2:g} {y:g} H{turn:g} C{middle:g} {y:g} {middle:g} {to_y:g} {end:g} {to_y:g}"
    down = 1 if to_y > y else -1
    return f"M{x:g} {y + down * HEIGHT / 2:g} L{to_x:g} {to_y - down * (HEIGHT / 2 + 3):g}"
