"""The outputs of a training's events: ``events.jsonl``, TensorBoard's files, and the caller."""

from __future__ import annotations

from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event as BoardEvent
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import FileWriter

from tessella.core.events import Emit, Event, EventLog


class Journal:
    """An ``emit`` that writes each event once: only rank 0's journal is open.

    Args:
        folder: the run's folder.
        after_step: on resume, the step of the checkpoint; TensorBoard hides the steps after it that
            an earlier process wrote.
        emit: the caller's ``emit``.
        open: False for all ranks but 0.
    """

    def __init__(self, folder: Path, *, after_step: int | None, emit: Emit, open: bool) -> None:
        self._open = open
        if not open:
            return
        self._emit = emit
        self._log = EventLog(folder / "events.jsonl")
        self._board = FileWriter(str(folder / "tensorboard"))
        if after_step is not None:
            session = SessionLog(status=SessionLog.START)
            self._board.add_event(BoardEvent(step=after_step + 1, session_log=session))
            told = f"from step {after_step:,}"
            self(Event(kind="phase", name="resume", step=after_step, text=told))

    def __call__(self, event: Event) -> None:
        if not self._open:
            return
        self._log(event)
        if event.kind == "metric":
            scalars = [Summary.Value(tag=k, simple_value=v) for k, v in event.values.items()]
            self._board.add_summary(Summary(value=scalars), event.step, event.time)
        self._emit(event)

    def sync(self) -> None:
        """Write all events to disk durably, before a checkpoint that depends on them."""
        if self._open:
            self._log.sync()
            self._board.flush()

    def close(self) -> None:
        if self._open:
            self._log.close()
            self._board.close()
