"""TensorBoard reads the event files and finds exactly the metrics in them."""

import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from rloo_pipeline.trackers.events import write_events

METRICS = {"round": 3, "reward": 0.25, "rewards/answer/mean": -1.5, "kl": None, "num_tokens": 16_000_000}


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every curve that TensorBoard sees in a folder, as (step, value)."""
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_every_metric_is_a_curve_and_null_is_left_out(tmp_path: Path) -> None:
    write_events(tmp_path / "00003.tfevents", 3, METRICS)
    expected = {name: [(3, float(value))] for name, value in METRICS.items() if value is not None}
    assert read(tmp_path) == expected
    assert [file.name for file in tmp_path.iterdir()] == ["00003.tfevents"]


def test_the_files_of_several_rounds_are_one_curve(tmp_path: Path) -> None:
    for number in (2, 1, 3):
        write_events(tmp_path / f"{number:05d}.tfevents", number, {"reward": number / 4, "late": number - 2 or None})
    assert read(tmp_path) == {"reward": [(1, 0.25), (2, 0.5), (3, 0.75)], "late": [(1, -1.0), (3, 1.0)]}


def test_the_same_metrics_give_the_same_bytes_in_any_order_at_any_time(tmp_path: Path) -> None:
    first, second = tmp_path / "a.tfevents", tmp_path / "b" / "c.tfevents"
    write_events(first, 3, METRICS)
    write_events(second, 3, dict(reversed(METRICS.items())))
    assert first.read_bytes() == second.read_bytes()
    assert {event.wall_time for event in EventFileLoader(str(first)).Load()} == {3.0}


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_events(tmp_path / "1.tfevents", 1, {"reward": "much"})  # type: ignore[dict-item]
    assert not list(tmp_path.iterdir())


def test_writing_events_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rloo_pipeline.trackers.events import write_events; "
        f"write_events(Path({str(tmp_path / '1.tfevents')!r}), 1, {{'reward': 1.0}}); "
        "print({'torch', 'tensorflow'} & sys.modules.keys())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
