"""Layout of the SVG in page.dag.j2: the DAG of a run with the time of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rloo_pipeline.report.jobs import Cost

WIDTH, HEIGHT = 126, 48
PLACES = {
    "stage_assets": (70, 90),
    "prompts": (214, 90),
    "trial_probe": (70, 215),
    "trial_checks": (214, 215),
    "warmstart": (358, 90),
    "probe": (358, 215),
    "checks": (502, 215),
    "difficulty": (545, -12),
    "rollout": (520, 90),
    "score": (672, 55),
    "reference": (672, 125),
    "update": (824, 90),
    "gate": (824, 215),
    "evaluate": (990, 90),
    "distance": (990, 165),
    "harness": (990, 240),
    "report": (1136, 90),
}
"""Centre of each stage's box."""
ARROWS = (
    *(("stage_assets", "prompts"), ("prompts", "warmstart"), ("warmstart", "probe"), ("probe", "checks")),
    *(("stage_assets", "trial_probe"), ("trial_probe", "trial_checks"), ("trial_checks", "warmstart")),
    *(("warmstart", "difficulty"), ("difficulty", "rollout")),
    *(("warmstart", "rollout"), ("rollout", "score"), ("rollout", "reference"), ("score", "update")),
    *(("reference", "update"), ("checks", "update"), ("update", "gate"), ("update", "evaluate")),
    *(("evaluate", "distance"), ("evaluate", "report"), ("distance", "report"), ("harness", "report")),
)
OPTIONAL = {"difficulty", "trial_probe", "trial_checks", "reference", "gate", "harness"}
"""Stages left out if the run had no job of them."""


class Box(NamedTuple):
    """A stage."""

    stage: str
    x: float
    y: float
    cost: Cost | None
    """None if the result came from a cache."""
    share: float
    """Share of the seconds of all jobs."""


class Picture(NamedTuple):
    """Boxes and arrows, the latter as SVG paths."""

    boxes: list[Box]
    arrows: list[str]
    top: int
    """Upper edge of the picture."""


def picture(costs: Sequence[Cost]) -> Picture:
    """The DAG of a run in which these stages had jobs."""
    by_stage = {cost.stage: cost for cost in costs}
    total = sum(cost.seconds for cost in costs) or 1.0
    boxes = [
        Box(stage, x, y, by_stage.get(stage), by_stage[stage].seconds / total if stage in by_stage else 0.0)
        for stage, (x, y) in PLACES.items()
        if stage in by_stage or stage not in OPTIONAL
    ]
    shown = {box.stage for box in boxes}
    arrows = [_arrow(*PLACES[a], *PLACES[b]) for a, b in ARROWS if {a, b} <= shown]
    return Picture(boxes, arrows, -40 if "difficulty" in shown else 0)


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """SVG path from the edge of one box to the edge of another: horizontal if they are side by side, else vertical."""
    if abs(to_x - x) > WIDTH:
        start, end = x + WIDTH / 2, to_x - WIDTH / 2 - 3
        middle = (start + end) / 2
        return f"M{start:g} {y:g} C{middle:g} {y:g} {middle:g} {to_y:g} {end:g} {to_y:g}"
    down = 1 if to_y > y else -1
    return f"M{x:g} {y + down * HEIGHT / 2:g} L{to_x:g} {to_y - down * (HEIGHT / 2 + 3):g}"
