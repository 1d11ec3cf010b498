"""A call whose arrays are copied to one place: then nothing is left to ask before the kernels run.

Between the requests of a server, where a processor's caches hold other things, what a call of a
LeNet asks of torch (tensors of arrays, strides, devices, its mode, a copy, arrays of tensors) takes
60 µs beside 110 µs of kernels. Steps in machine code that follow each other are one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Self

import numpy as np
import torch

from tessella.core.spec import TensorSpec
from tessella.execution.bucket import BoundBucket, SettledSteps

# the shapes and element types of arrays or of tensors, which these tell apart
Kinds = tuple[tuple[tuple[int, ...], np.dtype[Any] | torch.dtype], ...]
MOST_BYTES = 1 << 18  # of inputs and outputs: to copy more costs more than to ask


class Settled:
    """A program with its inputs and outputs as NumPy sees them. Not for two threads at once.

    Args:
        inputs: what the steps read.
        outputs: names, and where the results lie; None where each run makes another tensor.
    """

    def __init__(
        self,
        steps: SettledSteps,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[tuple[str, np.ndarray | None]],
    ) -> None:
        self._inputs, self._outputs = tuple(inputs), outputs
        self._calls = tuple(steps.calls)
        self._slots, self._results, self._moves = steps.slots, steps.results, tuple(steps.moves)
        self._asks_torch = steps.asks_torch

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
            return cls(found, [t.numpy() for t in inputs], list(zip(outputs, made, strict=True)))
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


def kinds_of(arrays: Sequence[Any], *, tensors: bool) -> Kinds:
    """What calls with such arrays may be settled by; nothing where they are neither all arrays nor,
    if those may be, all tensors in the host's memory whose numbers NumPy sees as they are.
    """
    if all(type(a) is np.ndarray for a in arrays) or (
        tensors
        and all(
            type(a) is torch.Tensor and a.is_cpu and a.layout == torch.strided and not a.is_neg()
            for a in arrays
        )
    ):
        return tuple([(a.shape, a.dtype) for a in arrays])
    return ()


def answered(
    call: Callable[[Sequence[np.ndarray]], dict[str, np.ndarray]], arrays: Sequence[Any]
) -> dict[str, Any]:
    """A settled call's outputs: arrays for arrays, tensors for tensors."""
    if isinstance(arrays[0], np.ndarray):
        return call(arrays)
    made = call([a.detach().numpy() for a in arrays])
    return {name: torch.from_numpy(array) for name, array in made.items()}
