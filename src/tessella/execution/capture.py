"""CUDA graphs: what a function launches, recorded once and replayed, so that it costs one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from tessella.device.cuda_graphs import GRAPH_LOCK
from tessella.device.driver import Driver, cuda_driver
from tessella.device.graph_parameters import Addresses, Parameters
from tessella.device.streams import capturing

WARM_UP_RUNS = 2  # cuDNN and cuBLAS make their handles and workspaces before a capture

Results = TypeVar("Results")


class Captured(Generic[Results]):
    """A function as a CUDA graph.

    The function is kept: a graph holds none of the weights and buffers that it reads and writes,
    and without it they were freed (ResNet-50: "illegal memory access").

    Args:
        pool, stream: as of ``capturing``.

    Attributes:
        results: what the function returned: each replay writes them anew.
        parameters: what the graph's kernels are launched with.
    """

    def __init__(
        self,
        run: Callable[[], Results],
        *,
        warm_up_runs: int = WARM_UP_RUNS,
        pool: torch.cuda._POOL_HANDLE | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._run = run
        for _ in range(warm_up_runs):
            run()
        with capturing(pool=pool, stream=stream) as self._graph:
            self.results = run()
        self._executable = self._graph.raw_cuda_graph_exec()
        self.parameters = Parameters(cuda_driver(), self._graph.raw_cuda_graph())

    def replay(self, *reads: tuple[Addresses, int]) -> None:
        """Launch the graph, which reads from these addresses, now and later."""
        with GRAPH_LOCK:
            for places, address in reads:
                places.point(self._executable, address)
            self._graph.replay()

    def launch(self, driver: Driver, stream: int, reads: Sequence[tuple[Addresses, int]]) -> None:
        """As ``replay``, in a stream of the driver and past torch: for graphs that draw no random
        numbers.
        """
        with GRAPH_LOCK:
            for places, address in reads:
                places.point(self._executable, address)
            driver.launch_graph(self._executable, stream)
