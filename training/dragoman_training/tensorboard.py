"""Figures of a run for TensorBoard, in RUN/tensorboard: ``tensorboard --logdir runs`` shows all runs side by side.

The files are written with TensorBoard's own package; torch's wrapper around it adds nothing that is needed here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class RunWriter:
    """Writes scalars. A run that goes on after step ``after`` hides what a killed session wrote of later steps.

    So does one that begins anew, after step 0, since the killed session left no checkpoint.
    """

    def __init__(self, run: Path, after: int = 0) -> None:
        folder = run / "tensorboard"
        went_before = folder.is_dir() and any(folder.iterdir())
        self._writer = EventFileWriter(str(folder))
        if went_before:
            start = Event(step=after + 1, session_log=SessionLog(status=SessionLog.START), wall_time=time.time())
            self._writer.add_event(start)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """The figures of one step, by names such as ``dev/loss``; on the disk at once."""
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(step=step, summary=summary, wall_time=time.time()))
        self._writer.flush()

    def close(self) -> None:
        """End the file."""
        self._writer.close()
