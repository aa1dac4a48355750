"""A round's metrics as a TensorBoard event file, so that `tensorboard --logdir results` shows the curves of every run.

One file holds one round, with the round as its step. Its bytes depend on the metrics alone: the wall time of an event
is the number of the round, in seconds, and no host is named. So TensorBoard's axis `Relative` counts rounds too, and a
repeated round has the same file. Numbers are float32, as all scalars of TensorBoard; metrics.json has full precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rloo_pipeline.artifacts.files import atomic_write

VERSION = "brain.Event:2"
"""Version in the first event of every TensorBoard file."""


def write_events(path: Path, round_: int, metrics: Mapping[str, float | int | None]) -> None:
    """Writes every metric of a round as a scalar of the same name; None is left out.

    Args:
        path: of the file; TensorBoard requires `tfevents` in its name.
        round_: the number of the round, from 1.
        metrics: the content of metrics.json.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    values = [
        Summary.Value(tag=name, simple_value=value) for name, value in sorted(metrics.items()) if value is not None
    ]
    events = (
        Event(wall_time=round_, file_version=VERSION),
        Event(wall_time=round_, step=round_, summary=Summary(value=values)),
    )
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString(deterministic=True))
