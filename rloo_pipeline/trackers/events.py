"""Writes a round's metrics as a TensorBoard event file, so that `tensorboard --logdir results` shows every run's
curves.

One file holds one round. Names and step (the optimizer steps so far) are TRL's. The bytes depend only on the metrics:
the wall time of an event is the number of the round, in seconds, and no host is named. A repeated round thus writes the
same file, and TensorBoard's `Relative` axis counts rounds. Numbers are float32, as always in TensorBoard; metrics.json
has full precision.
"""

from collections.abc import Mapping
from pathlib import Path

from rloo_pipeline.artifacts.files import atomic_write
from rloo_pipeline.trackers.names import STEP, named

VERSION = "brain.Event:2"
"""Version that the first event of every TensorBoard file carries."""


def write_events(path: Path, round_: int, metrics: Mapping[str, float | int | None], part: str = "train") -> None:
    """Writes every metric of a round as a scalar. None values are left out.

    Args:
        path: path of the file; TensorBoard requires `tfevents` in its name.
        round_: number of the round, from 1.
        metrics: content of metrics.json.
        part: first part of TRL's names: `train` or `eval`.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    scalars = named(metrics, part)
    step = int(scalars.pop(STEP, round_))
    values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
    events = (
        Event(wall_time=round_, file_version=VERSION),
        Event(wall_time=round_, step=step, summary=Summary(value=values)),
    )
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString(deterministic=True))
