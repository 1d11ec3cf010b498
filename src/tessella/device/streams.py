"""CUDA streams that nobody else has, and captures into graphs in one of them."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from tessella.device.cuda_graphs import GRAPH_LOCK
from tessella.device.driver import cuda_driver
from tessella.device.graph_edges import let_libraries_wait

_CAPTURES = threading.Lock()
_captured: ContextVar[bool] = ContextVar("captured", default=False)
_FREE: defaultdict[int, list[int]] = defaultdict(list)  # handles by the device's index
_POOLS: dict[int, torch.cuda._POOL_HANDLE | None] = {}  # where a stream's last capture had memory


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
        self.stream = torch.cuda.ExternalStream(handle, device=index)  # type: ignore[no-untyped-call]
        weakref.finalize(self, free.append, handle).atexit = False


@contextmanager
def capturing(
    *, pool: torch.cuda._POOL_HANDLE | None = None, stream: torch.cuda.Stream | None = None
) -> Iterator[torch.cuda.CUDAGraph]:
    """Record what the block launches in a graph, which can be replayed behind the block. Other
    threads may run and allocate meanwhile, but not draw random numbers on the GPU: torch's
    generator belongs to the capture.

    Args:
        pool: where the block's results live; memory of the graph's own if None.
        stream: one that nobody else uses, now or when the graph is replayed. If None, one of all
            captures.

    cuBLAS has a workspace for each stream. One of an earlier capture lies in that one's memory, and
    torch.compile frees all: a graph that used it read and wrote what was no longer there
    ("unspecified launch failure" of ViT and BERT). So it is forgotten before, and made again in
    this graph's pool.
    """
    stream = stream or _captures(torch.cuda.current_device()).stream
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    token = _captured.set(True)
    try:
        with _CAPTURES:
            if pool is None or _POOLS.get(stream.cuda_stream) != pool:
                torch._C._cuda_clearCublasWorkspaces()
            _POOLS[stream.cuda_stream] = pool
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                yield graph
    finally:
        _captured.reset(token)
    with GRAPH_LOCK:
        let_libraries_wait(cuda_driver(), graph.raw_cuda_graph())
        graph.instantiate()


def is_captured() -> bool:
    """Whether what is launched now is recorded by ``capturing``."""
    return _captured.get()


@functools.cache
def _captures(index: int) -> OwnStream:
    return OwnStream(torch.device("cuda", index))
