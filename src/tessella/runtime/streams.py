"""A CUDA stream of an engine's own, between what its caller did before and does after."""

from __future__ import annotations

import torch


class OwnStream:
    """``with own:`` runs the block in it, after the work of the caller's stream and before the
    next. One thread at a time.

    So engines of one GPU that are called in several threads run side by side, on whatever stream
    the threads are. Written out, as it lies on the way of each answer: without
    ``torch.cuda.stream`` and new events, 34 µs became 16 (docs/log.md, 2026-11-22).

    What the block reads is the caller's memory, and may be given back at once: the caller's stream
    goes on only behind the block. What it makes stays the engine's: the caller copies it in the
    stream that is current again, and says so by ``taken``. So nobody's memory is used in a stream
    that its allocator does not know of, and ``record_stream`` is not needed.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._index: int = self.stream.device_index  # an index: torch looks up anything else
        self._caller = torch.cuda.current_stream(self._index)
        self._device = torch.cuda.current_device()
        self._begin, self._end, self._taken = (torch.cuda.Event() for _ in range(3))

    def __enter__(self) -> None:
        self._device = torch.cuda.current_device()
        self._caller = torch.cuda.current_stream(self._index)
        self._begin.record(self._caller)
        self._begin.wait(self.stream)
        self._taken.wait(self.stream)  # by whoever called before, maybe in another stream
        torch.cuda.set_stream(self.stream)  # and its device

    def __exit__(self, *_: object) -> None:
        self._end.record(self.stream)
        self._end.wait(self._caller)
        torch.cuda.set_stream(self._caller)
        if self._device != self._index:
            torch.cuda.set_device(self._device)

    def taken(self) -> None:
        """What the last block made has been copied: the next block may overwrite it then."""
        self._taken.record(self._caller)
