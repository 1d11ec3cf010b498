"""In which CUDA stream a call of an engine runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tessella.device.streams import OwnStream


class Turns:
    """``with turns:`` runs the block in its caller's stream, behind the last block, in whatever
    stream that was: an engine has one arena. One thread at a time.

    Where the stream changes, the host waits until the last block has ended.

    So engines of one GPU run side by side where their callers have streams of their own, as calls
    from host memory do by ``in_own_stream``. What the block reads and makes is the caller's, in
    the caller's stream: its memory may be given back at once.

    Attributes:
        own: a stream that nobody else has.

    Written out, as it lies on the way of each answer (docs/log.md, 2026-11-22).
    """

    def __init__(self, device: torch.device) -> None:
        self._kept = OwnStream(device)
        self.own = self._kept.stream
        self._index: int = self.own.device_index  # an index: torch looks up anything else
        self._device = self._index
        self._last: torch.cuda.Stream | None = None
        self._done = torch.cuda.Event()

    def __enter__(self) -> None:
        self._device = torch.cuda.current_device()
        if self._device != self._index:
            torch.cuda.set_device(self._index)
        stream = torch.cuda.current_stream(self._index)
        if self._last is None or stream != self._last:  # torch 2.11: no stream differs from None
            self._done.synchronize()
            self._last = stream

    def __exit__(self, *_: object) -> None:
        self._done.record(self._last)
        if self._device != self._index:
            torch.cuda.set_device(self._device)

    def take_own(self) -> None:
        """Let what is begun in ``own`` from now on be a turn, whose caller waits for its end."""
        if self._last is None or self.own != self._last:
            self._done.synchronize()
            self._last = self.own

    @contextmanager
    def in_own_stream(self) -> Iterator[None]:
        """A turn in the engine's own stream, which waits for no work of the caller's: for inputs in
        host memory, and answers that are copied there within the block.
        """
        with torch.cuda.stream(self.own), self:
            yield
