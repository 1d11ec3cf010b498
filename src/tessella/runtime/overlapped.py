"""Calls of an engine on a GPU that overlap: while one computes, the next one's inputs are copied.

    arrays of several requests ─▶ inputs on the GPU ─▶ engine ─▶ outputs in locked host memory
                          one stream             another stream

The samples of a call are copied one behind the other from where they lie, so that nobody has to
join them before, and its caller goes on at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import perf_counter_ns

import numpy as np
import torch

from tessella.core.dtype import dtype
from tessella.device.driver import brief_driver
from tessella.device.page_locked import copy_in, locked_empty
from tessella.device.streams import OwnStream
from tessella.runtime.engine import Engine

DEPTH = 2  # calls at a time: one computes, one is copied

Arrays = Mapping[str, np.ndarray]


class Overlapped:
    """An engine whose calls return before they have ended. For one thread.

    Args:
        engine: on a GPU; see ``can_overlap``.
        samples: the most of a call.
    """

    def __init__(self, engine: Engine, samples: int) -> None:
        # Copies from lanes and of decoded pictures, whose pages are locked, return in 5 µs; to have
        # Python's lock again takes up to 100.
        self._engine, self._driver = engine, brief_driver()
        self._copies, self._computes = OwnStream(engine.device), OwnStream(engine.device)
        self._free = [_Place(samples) for _ in range(DEPTH)]

    @property
    def has_room(self) -> bool:
        """Whether another call may begin."""
        return bool(self._free)

    def begin(self, parts: Sequence[Arrays]) -> Call:
        """Begin a call on the samples of all parts, whose arrays stay unchanged until it has ended.

        Raises:
            InputError: as the engine.
        """
        place = self._free.pop()
        try:
            with torch.cuda.device(self._engine.device):
                return self._begin(place, parts)
        except BaseException:
            for stream in (self._copies.stream, self._computes.stream):
                with suppress(RuntimeError):  # where the GPU has failed, this does, too
                    stream.synchronize()
            self._free.append(place)
            raise

    def _begin(self, place: _Place, parts: Sequence[Arrays]) -> Call:
        copies, computes, inputs = self._copies.stream, self._computes.stream, {}
        handle: int = copies.cuda_stream
        with torch.cuda.stream(computes):
            for name in parts[0]:
                arrays = [part[name] for part in parts]
                count = sum(map(len, arrays))
                given = place.input(name, arrays[0], self._engine.device)[:count]
                target = given.data_ptr()
                for address, nbytes, some in runs_of(arrays):
                    copy_in(self._driver, target, address, nbytes, some, handle)
                    target += nbytes
                inputs[name] = given
            computes.wait_event(copies.record_event())
            made = self._engine(**inputs)
            outputs = {name: place.output(name, tensor) for name, tensor in made.items()}
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(computes)
        return Call(self._free, place, done, made, outputs)


def runs_of(arrays: Sequence[np.ndarray]) -> list[tuple[int, int, list[np.ndarray]]]:
    """Address, bytes and arrays of each run that one copy moves: parts of one array that follow
    each other, as pictures that were decoded together. A copy takes 3 µs of its caller.
    """
    runs: list[tuple[int, int, list[np.ndarray]]] = []
    end = 0
    base: object = None
    for array in arrays:
        try:
            address = ctypes.addressof(ctypes.c_char.from_buffer(array.data))  # 1 µs, not 2.4
        except (BufferError, TypeError):  # not contiguous, or for reading alone
            array = np.array(array, order="C")
            address = array.ctypes.data
        nbytes = array.nbytes
        if address == end and array.base is base and isinstance(base, np.ndarray):
            first, before, some = runs[-1]
            some.append(array)
            runs[-1] = first, before + nbytes, some
        else:
            runs.append((address, nbytes, [array]))
        end, base = address + nbytes, array.base
    return runs


def can_overlap(engine: Engine) -> bool:
    """Whether calls of an engine can: on a GPU, with element types that NumPy has, and no input
    whose values have to be looked at before.
    """
    specs = (*engine.inputs, *engine.outputs)
    known = all(dtype(spec.dtype).numpy is not None for spec in specs)
    return engine.device.type == "cuda" and known and not engine.has_rows


class _Place:
    """The memory of one call: inputs on the GPU, outputs in locked memory of the host."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._inputs: dict[str, torch.Tensor] = {}
        self._outputs: dict[str, torch.Tensor] = {}

    def input(self, name: str, like: np.ndarray, device: torch.device) -> torch.Tensor:
        """Room for samples like these."""
        held, shape = self._inputs.get(name), (self._samples, *like.shape[1:])
        kind = torch.from_numpy(np.empty(0, like.dtype)).dtype
        if held is None or (held.shape, held.dtype) != (shape, kind):
            held = self._inputs[name] = torch.empty(shape, dtype=kind, device=device)
            # It may be memory that a call still reads, in this stream: copies are made in another.
            torch.cuda.current_stream(device).synchronize()
        return held

    def output(self, name: str, made: torch.Tensor) -> torch.Tensor:
        """The host's copy of an output, which is complete when the stream has come so far."""
        held, shape = self._outputs.get(name), (self._samples, *made.shape[1:])
        if held is None or (held.shape, held.dtype) != (shape, made.dtype):
            held = self._outputs[name] = locked_empty(torch.Size(shape), made.dtype)
        return held[: len(made)].copy_(made, non_blocking=True)


class Call:
    """A call that has begun."""

    def __init__(
        self,
        free: list[_Place],
        place: _Place,
        done: torch.cuda.Event,
        made: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
    ) -> None:
        self._free, self._place, self._done = free, place, done
        self._made, self._outputs = made, outputs  # what is still copied may not be freed
        self.ended_ns: int | None = None  # when ``wait`` saw its end

    def is_done(self) -> bool:
        """Whether ``outputs`` would not wait."""
        try:
            return bool(self._done.query())  # type: ignore[no-untyped-call]
        except RuntimeError:  # told by ``outputs``
            return True

    def wait(self) -> None:
        """Return when it has ended; for any thread."""
        try:
            self._done.synchronize()
        finally:
            self.ended_ns = perf_counter_ns()

    def outputs(self) -> dict[str, np.ndarray]:
        """The outputs, which stay as they are until ``release``.

        Raises:
            RuntimeError: the GPU failed.
        """
        if not self._done.query():  # type: ignore[no-untyped-call]
            self._done.synchronize()
        return {name: tensor.numpy() for name, tensor in self._outputs.items()}

    def release(self) -> None:
        """Let another call take this one's memory."""
        self._free.append(self._place)
