"""TensorBoard reads the event files and finds exactly the metrics in them, at TRL's names and steps."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from rloo_pipeline.trackers.events import write_events
from rloo_pipeline.trackers.names import in_mlflow, named

METRICS = {"round": 3, "step": 24, "reward": 0.25, "rewards/answer/mean": -1.5, "kl": None, "num_tokens": 16_000_000}


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every curve that TensorBoard sees in a folder, as (step, value)."""
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_every_metric_is_a_curve_and_null_is_left_out(tmp_path: Path) -> None:
    write_events(tmp_path / "00003.tfevents", 3, METRICS)
    curves = {name: float(value) for name, value in METRICS.items() if value is not None and name != "step"}
    assert read(tmp_path) == {f"train/{name}": [(24, value)] for name, value in curves.items()}
    assert [file.name for file in tmp_path.iterdir()] == ["00003.tfevents"]


def test_the_files_of_several_rounds_are_one_curve(tmp_path: Path) -> None:
    for number in (2, 1, 3):
        write_events(tmp_path / f"{number:05d}.tfevents", number, {"reward": number / 4, "late": number - 2 or None})
    reward, late = [(1, 0.25), (2, 0.5), (3, 0.75)], [(1, -1.0), (3, 1.0)]
    assert read(tmp_path) == {"train/reward": reward, "train/late": late}


def test_names_are_those_that_transformers_writes_for_trl() -> None:
    from transformers.integrations.integration_utils import rewrite_logs

    logs = {"reward": 1.0, "rewards/answer/mean": 0.5, "kl": 0.1}
    assert named(logs, "train") == rewrite_logs(logs)
    of_eval = {f"eval_{name}": value for name, value in logs.items()}
    assert named(logs, "eval") == rewrite_logs(of_eval)
    names = [in_mlflow(name) for part in ("train", "eval") for name in named(logs, part)]
    assert sorted(names) == sorted([*logs, *of_eval])


def test_every_metric_that_both_have_is_in_trls_trainer() -> None:
    [folder] = find_spec("trl").submodule_search_locations  # read, as its import takes ten seconds
    source = (Path(folder) / "trainer" / "rloo_trainer.py").read_text()
    for name in ("reward", "reward_std", "frac_reward_zero_std", "kl", "entropy", "completions/mean_length"):
        assert f'"{name}"' in source, name


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
