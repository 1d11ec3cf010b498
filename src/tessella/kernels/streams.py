"""CUDA streams that nobody else has, and captures into graphs in one of them."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tessella.kernels.driver import cuda_driver

_CAPTURES = threading.Lock()
_FREE: defaultdict[int, list[int]] = defaultdict(list)  # handles by the device's index


class OwnStream:
    """A stream that does not wait for the default one, and that nobody else has while this lives.

    torch's own streams come round again after 32: work of somebody else in a stream that is being
    captured ends the capture with an error. It is used again, not given back, as cuBLAS and cuDNN
    hold the stream that they were called in last.

    Attributes:
        stream: torch's view of it. (A weak reference to that one is not told of its end in torch
            2.11, and the process died at its own.)
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        free = _FREE[index]
        try:
            handle = free.pop()
        except IndexError:
            handle = cuda_driver().new_stream(index)
        self.stream = torch.cuda.ExternalStream(handle, device=index)
        weakref.finalize(self, free.append, handle).atexit = False


@contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph,
    *,
    pool: tuple[int, int] | None = None,
    stream: torch.cuda.Stream | None = None,
) -> Iterator[None]:
    """Record what the block launches. Other threads may run and allocate meanwhile, but not draw
    random numbers on the GPU: torch's generator belongs to the capture.

    Args:
        pool: where the block's results live; memory of the graph's own if None.
        stream: one that nobody else uses, now or when the graph is replayed, and that has run
            nothing: cuBLAS makes a workspace for each stream, which is then in ``pool``. One that
            it had before may be freed, as torch.compile does. If None, one of all captures.
    """
    stream = stream or _captures(torch.cuda.current_device()).stream
    with (
        _CAPTURES,
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
    ):
        yield


@functools.cache
def _captures(index: int) -> OwnStream:
    return OwnStream(torch.device("cuda", index))
