"""A call whose arrays are copied to one place: then nothing is left to ask before the kernels run.

Between the requests of a server, where a processor's caches hold other things, what a call of a
LeNet asks of torch (tensors of arrays, strides, devices, its mode, a copy, arrays of tensors) takes
60 µs beside 110 µs of kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Self

import numpy as np
import torch

from tessella.core.spec import TensorSpec
from tessella.device.x86.code import Launch
from tessella.execution.bucket import BoundBucket, SettledSteps

MOST_BYTES = 1 << 18  # of inputs and outputs: to copy more costs more than to ask


class Settled:
    """A program with its inputs and outputs as NumPy sees them. Not for two threads at once.

    Args:
        inputs: what the steps read.
        outputs: names, and where the results lie; None where each run makes another tensor.
        asks_torch: one of the steps is no machine code of ours.
    """

    def __init__(
        self,
        steps: SettledSteps,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[tuple[str, np.ndarray | None]],
        *,
        asks_torch: bool,
    ) -> None:
        self._calls, self._inputs, self._outputs = tuple(steps.calls), tuple(inputs), outputs
        self._slots, self._results, self._moves = steps.slots, steps.results, tuple(steps.moves)
        self._asks_torch = asks_torch

    @classmethod
    def of(
        cls, bucket: BoundBucket, specs: Sequence[TensorSpec], outputs: Sequence[str]
    ) -> Self | None:
        """The program of a batch size; None if its arrays are large, or NumPy lacks their type."""
        if sum(spec.nbytes(bucket.batch) for spec in specs) > MOST_BYTES:
            return None
        inputs = [
            torch.zeros(spec.at(bucket.batch), dtype=getattr(torch, spec.dtype)) for spec in specs
        ]
        try:
            found = bucket.settled(inputs)
            if found is None:
                return None
            slots, moves = found.slots, found.moves
            made = [None if slot in moves else slots[slot].numpy() for slot in found.results]
            if sum(array.nbytes for array in made if array is not None) > MOST_BYTES:
                return None
            return cls(
                found,
                [t.numpy() for t in inputs],
                list(zip(outputs, made, strict=True)),
                asks_torch=not all(isinstance(step.call, Launch) for step in bucket.steps),
            )
        except TypeError:  # an element type that NumPy lacks
            return None

    def __call__(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Run on arrays of just the inputs' shapes and element types."""
        for place, array in zip(self._inputs, arrays):
            place[...] = array
        with torch.inference_mode() if self._asks_torch else nullcontext():
            for call in self._calls:
                call()
        slots = self._slots
        made = {
            name: (slots[slot].numpy() if array is None else array).copy()
            for (name, array), slot in zip(self._outputs, self._results)
        }
        for slot in self._moves:
            slots[slot] = None
        return made
