"""CUDA graphs: a bucket captured once and replayed, so that launching costs one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessella.kernels.float32_math import float32_math
from tessella.kernels.problem import Math, TensorMeta
from tessella.kernels.streams import capturing
from tessella.runtime.bucket import BoundBucket

WARM_UP_RUNS = 2  # cuDNN and cuBLAS make their handles and workspaces before a capture


class GraphedBucket:
    """A bucket as a CUDA graph with its own input tensors.

    Args:
        pool: the memory pool that all graphs of an engine share; they are replayed one at a time.
        stream: the engine's own, in which the bucket is captured.
    """

    def __init__(
        self,
        bound: BoundBucket,
        inputs: Sequence[TensorMeta],
        *,
        math: Math,
        pool: tuple[int, int],
        stream: torch.cuda.Stream,
        device: torch.device,
    ) -> None:
        self.batch = bound.batch
        self.steps = bound.steps
        with torch.inference_mode(False):  # else they could not be written outside of that mode
            self.inputs = [meta.empty(device).zero_() for meta in inputs]
        self._graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), float32_math(math):
            for _ in range(WARM_UP_RUNS):
                bound(self.inputs)
            with capturing(self._graph, pool=pool, stream=stream):
                self._outputs = bound(self.inputs)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy the inputs in (fewer samples than the bucket's are padded with zeros) and replay."""
        for static, tensor in zip(self.inputs, inputs, strict=True):
            count = len(tensor)
            if count == self.batch:
                static.copy_(tensor, non_blocking=True)
            else:
                static[:count].copy_(tensor, non_blocking=True)
                static[count:].zero_()
        self._graph.replay()
        return self._outputs
