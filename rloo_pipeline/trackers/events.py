"""A round's metrics as a TensorBoard event file, so that `tensorboard --logdir results` shows the curves of every run.

One file holds one round, with the round as its step. The bytes depend on the metrics alone: where TensorBoard's own
writer puts the clock, here stands the number of the round, in seconds, and no host is named. So its axis `Relative`
counts rounds too, and a round that is made again has the same file. Numbers are float32, as in every scalar of
TensorBoard; metrics.json has them in full.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rloo_pipeline.artifacts.files import atomic_write

VERSION = "brain.Event:2"
"""What the first event of every file of TensorBoard says."""


def write_events(path: Path, round_: int, metrics: Mapping[str, float | int | None]) -> None:
    """Writes every number of a round as a scalar under its own name; what does not exist (None) is left out.

    Args:
        path: a file that TensorBoard finds: its name must contain `tfevents`.
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
    with atomic_write(path) as beside, beside.open("wb") as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString(deterministic=True))
