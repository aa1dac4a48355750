"""The picture of a run's DAG has every stage of which the run had a job."""

import re
from itertools import combinations

import pytest
from helpers import ROOT

from rloo_pipeline.report.dag import ALWAYS, ARROWS, HEIGHT, IN_ROUNDS, PLACES, WIDTH, picture
from rloo_pipeline.report.jobs import Cost

NOT_DRAWN = {"report_so_far", "experiment"}
"""Stages that the page leaves out, and those of an experiment."""


def drawn(*stages: str) -> dict[str, tuple[float, float]]:
    """Centres of the boxes of a run with jobs of these stages."""
    boxes = picture([Cost(stage, 1, 1.0, None, 0.0, None) for stage in stages]).boxes
    return {box.stage: (box.x, box.y) for box in boxes}


def test_every_stage_with_a_log_has_a_place() -> None:
    rules = "".join(file.read_text() for file in (ROOT / "workflow" / "rules").glob("*.smk"))
    assert set(re.findall(r"/logs/(\w+)[./]", rules)) - NOT_DRAWN == PLACES.keys()


def test_stages_that_only_some_runs_have_are_drawn_where_the_run_had_them() -> None:
    assert drawn().keys() == ALWAYS
    for stage in PLACES.keys() - ALWAYS:
        assert drawn(stage).keys() == {*ALWAYS, stage}


@pytest.mark.parametrize("stages", [PLACES.keys(), PLACES.keys() - {"refill", "refill_reference"}, ALWAYS])
def test_boxes_lie_apart_in_the_picture_and_those_of_a_round_in_its_frame(stages) -> None:
    at = drawn(*stages)
    for (x, y), (other_x, other_y) in combinations(at.values(), 2):
        assert abs(x - other_x) > WIDTH or abs(y - other_y) > HEIGHT
    drawing = picture([Cost(stage, 1, 1.0, None, 0.0, None) for stage in stages])
    for stage, (x, y) in at.items():
        for area in (drawing.whole, *([drawing.rounds] if stage in IN_ROUNDS else [])):
            assert area.x < x - WIDTH / 2 < x + WIDTH / 2 < area.x + area.width
            assert area.y < y - HEIGHT / 2 < y + HEIGHT / 2 < area.y + area.height


def test_every_stage_is_on_an_arrow_and_arrows_go_to_the_right_or_straight_up_or_down() -> None:
    assert {stage for arrow in ARROWS for stage in arrow} == PLACES.keys()
    assert all(PLACES[a][0] <= PLACES[b][0] for a, b in ARROWS)


@pytest.mark.parametrize("others", [set(), {"reference"}, {"refill", "refill_reference", "pass_rates"}])
def test_no_arrow_passes_behind_a_box(others) -> None:
    drawing = picture([Cost(stage, 1, 1.0, None, 0.0, None) for stage in (*ALWAYS, *others)])
    points = [list(map(float, re.findall(r"-?[\d.]+", arrow))) for arrow in drawing.arrows if "H" in arrow]
    assert points
    for start, y, turn, *_, end, _ in points:
        for box in drawing.boxes:
            if start < box.x < end:
                assert box.x + WIDTH / 2 <= turn
                assert abs(box.y - y) > HEIGHT / 2
