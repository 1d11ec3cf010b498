"""A call of a GPU's program on arrays in the host's memory: four calls of the driver.

The engine's usual way asks torch some thirty things around its graph (streams, devices, events, a
copy there and one back), whose code is cold between the requests of a server: one image of
ResNet-50 takes 401 µs so and 352 by the driver, with 1 ms between calls 550 and 429 (H200, a plan
that was not tuned).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from tessella.device.driver import brief_driver, cuda_driver
from tessella.device.page_locked import copy_in, locked_empty
from tessella.runtime.graphs import GraphedBucket
from tessella.runtime.streams import Turns

MOST_BYTES = 1 << 20  # of inputs and outputs: Python's lock is held while they are copied


class SettledGraph:
    """A program of one batch size, from NumPy arrays of just its inputs to new ones.

    Not for two threads at once.

    Args:
        bucket: with contiguous results.
        names: of the outputs.
    """

    def __init__(self, bucket: GraphedBucket, turns: Turns, names: Sequence[str]) -> None:
        self._bucket, self._turns = bucket, turns
        self._driver, self._waiting = brief_driver(), cuda_driver()
        self._stream = turns.own.cuda_stream
        with torch.cuda.device(turns.own.device):
            self._context = self._driver.context()
        self._inputs = [(static.data_ptr(), static.nbytes) for static in bucket.inputs]
        self._made = [locked_empty(t.shape, t.dtype) for t in bucket.results]
        self._outputs = [
            (there.data_ptr(), made.data_ptr(), made.nbytes)
            for there, made in zip(self._made, bucket.results, strict=True)
        ]
        self._arrays = [(n, t.numpy()) for n, t in zip(names, self._made, strict=True)]

    @classmethod
    def of(
        cls,
        bucket: GraphedBucket,
        turns: Turns,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
    ) -> Self | None:
        """The program of a batch size; None if its inputs have other shapes than the arrays, which
        are then repeated, or if it is large, or of a type that NumPy lacks.
        """
        tensors = [*bucket.inputs, *bucket.results]
        if [tuple(t.shape) for t in bucket.inputs] != list(shapes):
            return None
        if sum(t.nbytes for t in tensors) > MOST_BYTES:
            return None
        if not all(t.is_contiguous() for t in tensors):
            return None
        try:
            return cls(bucket, turns, names)
        except TypeError:  # an element type that NumPy lacks
            return None

    def __call__(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Run on arrays of just the inputs' shapes and element types; returns when it has ended."""
        driver, stream = self._driver, self._stream
        with driver.within(self._context):
            self._turns.take_own()
            try:
                for (target, nbytes), array in zip(self._inputs, arrays):
                    whole = array if array.flags.c_contiguous else np.array(array, order="C")
                    address: int = whole.__array_interface__["data"][0]
                    copy_in(driver, target, address, nbytes, [whole], stream)
                self._bucket.launch(driver, stream)
                for there, made, nbytes in self._outputs:
                    driver.copy_out(there, made, nbytes, stream)
            finally:  # else what was begun would write and read behind the next call's back
                self._waiting.wait(stream)
        return {name: array.copy() for name, array in self._arrays}
