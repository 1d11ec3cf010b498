"""CUDA streams that nobody else has, and captures into graphs in one of them."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tessella.kernels.driver import cuda_driver

_CAPTURES = threading.Lock()


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A new stream that does not wait for the default one; it ends with the returned object.

    torch's own streams come round again after 32: work of somebody else in a stream that is being
    captured ends the capture with an error.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    driver = cuda_driver()
    with torch.cuda.device(index):
        handle = driver.new_stream(index)
    stream = torch.cuda.ExternalStream(handle, device=index)
    end = weakref.finalize(stream, driver.end_stream, handle)
    end.atexit = False  # the process ends, and its streams
    return stream


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
        stream: one that nobody else uses, now or when the graph is replayed: cuBLAS has a workspace
            for each, which the graph goes on using. If None, one of all captures.
    """
    stream = stream or _stream_of_captures(torch.cuda.current_device())
    with (
        _CAPTURES,
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
    ):
        yield


@functools.cache
def _stream_of_captures(index: int) -> torch.cuda.Stream:
    return own_stream(torch.device("cuda", index))
