"""A CUDA stream of an engine's own, between what its caller did before and does after."""

from __future__ import annotations

import torch


class OwnStream:
    """``with own:`` runs the block in it, after the work of the caller's stream and before the
    next. One thread at a time.

    So engines of one GPU that are called in several threads run side by side, on whatever stream
    the threads are. Written out, as it lies on the way of each answer: ``torch.cuda.stream`` and
    new events take some 10 µs.

    Attributes:
        stream: the engine's.
        caller: inside of the block, the stream of the engine's device that was current before.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._index: int = self.stream.device_index  # an index, as torch looks up anything else
        self.caller = torch.cuda.current_stream(self._index)
        self._device = torch.cuda.current_device()
        self._begin, self._end = torch.cuda.Event(), torch.cuda.Event()

    def __enter__(self) -> OwnStream:
        self._device = torch.cuda.current_device()
        self.caller = torch.cuda.current_stream(self._index)
        self._begin.record(self.caller)
        self._begin.wait(self.stream)
        torch.cuda.set_stream(self.stream)  # and its device
        return self

    def __exit__(self, *_: object) -> None:
        self._end.record(self.stream)
        self._end.wait(self.caller)
        torch.cuda.set_stream(self.caller)
        if self._device != self._index:
            torch.cuda.set_device(self._device)
