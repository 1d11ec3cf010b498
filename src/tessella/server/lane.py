"""A lane: the memory that one acceptor shares with the engine's process, and its places.

The acceptor makes it without a name, sealed in its size, and hands it over the engine's socket, so
that no other process can open it. The acceptor alone says which bytes are taken; the engine reads
inputs and writes outputs where a ticket says, after looking whether these places lie in the lane.
"""

from __future__ import annotations

import fcntl
import functools
import math
import mmap
import os
from collections.abc import Iterable, Sequence

import numpy as np

from tessella.core.dtype import dtype
from tessella.core.errors import ServeError
from tessella.core.spec import TensorSpec
from tessella.device.page_locked import CHUNK_BYTES, PageLocked

ALIGNMENT = 64  # of tensors: a cache line, and the widest vector register
BRIEF_BYTES = 1 << 17  # that are copied in some 10 µs
LEAST_ORDER = 12  # a place has at least a page
MOST_LAYOUTS = 256  # that are remembered
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


# Name, offset in its place, shape, element type and bytes of a tensor.
Part = tuple[str, int, tuple[int, ...], np.dtype, int]


class _Mapping(mmap.mmap):
    """A lane's pages, which are unlocked before they go: with the last array that lies in them."""

    locked: PageLocked | None = None

    def __del__(self) -> None:
        if self.locked is not None:
            self.locked.release()


class Lane:
    """Memory that two processes see.

    Args:
        descriptor: of the memory; closed here, as the mapping keeps it.
        lock_bytes: as of ``PageLocked``.

    Raises:
        ServeError: 500, its size is not sealed: it could shrink under the one who reads it.
    """

    def __init__(self, descriptor: int, *, lock_bytes: int = CHUNK_BYTES) -> None:
        self._lock_bytes = lock_bytes
        try:
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ServeError("this memory may change its size", status=500)
            self._map = _Mapping(descriptor, 0)
            self._bytes = memoryview(self._map)
            self._nbytes = len(self._map)
        finally:
            os.close(descriptor)

    def page_lock(self, start: int, end: int) -> None:
        """Let a GPU copy from a place by itself."""
        if self._map.locked is None:
            address = np.frombuffer(self._map, np.uint8).ctypes.data
            self._map.locked = PageLocked(address, self._nbytes, self._lock_bytes)
        self._map.locked.lock(start, min(end, self._nbytes))

    def __len__(self) -> int:
        return self._nbytes

    def array(
        self, start: int, shape: tuple[int, ...], element: np.dtype, nbytes: int | None = None
    ) -> np.ndarray:
        """The array at a place.

        Args:
            nbytes: its size, where that is known.

        Raises:
            ServeError: 500, it does not lie in the lane.
        """
        if nbytes is None:
            nbytes = math.prod(shape) * element.itemsize
        if start < 0 or start % ALIGNMENT or start + nbytes > self._nbytes:
            raise ServeError("a tensor does not lie in its lane", status=500, seen=start)
        return np.ndarray(shape, element, self._map, start)

    def parts(self, start: int, sizes: Sequence[int]) -> list[memoryview]:
        """The bytes of so many each, one part behind the other, from a place on.

        Raises:
            ServeError: as ``array``.
        """
        found, end = [], start
        for size in sizes:
            found.append(self._bytes[end : end + size])
            end += size
        if start < 0 or start % ALIGNMENT or end > self._nbytes:
            raise ServeError("a tensor does not lie in its lane", status=500, seen=start)
        return found

    def write(self, start: int, content: memoryview) -> None:
        """Write bytes to a place, as ``copy_bytes`` does.

        Raises:
            ServeError: as ``array``.
        """
        if start < 0 or start % ALIGNMENT or start + len(content) > self._nbytes:
            raise ServeError("a tensor does not lie in its lane", status=500, seen=start)
        copy_bytes(self._bytes[start : start + len(content)], content)

    def give_back(self, start: int) -> None:
        """Give the pages from a place on back to the system: they are zeros when used again."""
        self._map.madvise(mmap.MADV_REMOVE, start)


def copy_bytes(place: memoryview, content: bytes | memoryview) -> None:
    """Copy to a place of the same length; of a few bytes, Python's lock is kept: who lets go of it
    for 20 µs waits for the other threads' turns.
    """
    if len(content) <= BRIEF_BYTES:
        place[:] = content
    else:
        np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(content, np.uint8))


def places_of(
    specs: Iterable[TensorSpec], sizes: Sequence[int], start: int
) -> tuple[list[tuple[TensorSpec, int, tuple[int, ...]]], int]:
    """Where tensors lie one behind the other from ``start`` on, and where the last one ends.

    Args:
        sizes: the dimensions of all tensors, one behind the other.

    Raises:
        ServeError: 500, more or fewer dimensions than the tensors have.
    """
    found, position = [], 0
    for spec in specs:
        shape = tuple(sizes[position : position + len(spec.shape)])
        position += len(shape)
        if len(shape) < len(spec.shape):
            break
        found.append((spec, start, shape))
        start = aligned(start + math.prod(shape) * numpy_type(spec).itemsize)
    if position != len(sizes) or len(found) < len(list(specs)):
        raise ServeError("a ticket has other dimensions than its tensors", status=500)
    return found, start


class Layouts:
    """Where tensors lie in a place, by their dimensions: clients send the same again and again.

    Args:
        specs: of all inputs, or of all outputs.
    """

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self._specs = tuple(specs)
        self._known: dict[tuple[int, ...], tuple[list[Part], int]] = {}

    def of(self, sizes: tuple[int, ...]) -> tuple[list[Part], int]:
        """The tensors, and where the last one ends; as of ``places_of`` from 0 on.

        Raises:
            ServeError: as ``places_of``.
        """
        known = self._known.get(sizes)
        if known is None:
            if len(self._known) == MOST_LAYOUTS:
                self._known.clear()
            found, end = places_of(self._specs, sizes, 0)
            parts = []
            for spec, offset, shape in found:
                element = numpy_type(spec)
                nbytes = math.prod(shape) * element.itemsize
                parts.append((spec.name, offset, shape, element, nbytes))
            known = self._known[sizes] = parts, end
        return known


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def numpy_type(spec: TensorSpec) -> np.dtype:
    """The element type on NumPy's side, where those that NumPy lacks are float32."""
    return _numpy_type(spec.dtype)


@functools.cache
def _numpy_type(name: str) -> np.dtype:
    return np.dtype(dtype(name).numpy or np.float32)


def make_memory(nbytes: int) -> int:
    """A descriptor of memory for a lane. What is never touched takes none."""
    descriptor = os.memfd_create("tessella lane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


class Places:
    """Which parts of a lane are free: a buddy allocator that merges only when it has to.

    Args:
        order: the lane has 2**order bytes.
    """

    def __init__(self, order: int) -> None:
        self._top = order
        self._free: list[list[int]] = [[] for _ in range(order + 1)]
        self._free[order].append(0)

    def take(self, nbytes: int) -> tuple[int, int]:
        """The start of a free place, and what ``give_back`` wants to know of it.

        Raises:
            ServeError: 413, it can never have room; 503, there is none now.
        """
        order = max(LEAST_ORDER, (nbytes - 1).bit_length())
        if order > self._top:
            raise ServeError(
                "the inputs and outputs of this request are too large",
                status=413,
                seen=f"{nbytes:,} bytes, at most {1 << self._top:,}",
                fix="send smaller batches",
            )
        if self._free[order]:
            return self._free[order].pop(), order
        found = self._larger(order)
        if found is None:
            self._merge()
            found = self._larger(order)
        if found is not None:
            start = self._free[found].pop()
            for lower in range(order, found):
                self._free[lower].append(start + (1 << lower))
            return start, order
        raise ServeError(
            "the server holds as many request bytes as it may",
            status=503,
            seen=f"no room for {nbytes:,} bytes",
            fix="try again in a moment, or send smaller batches",
        )

    def give_back(self, start: int, order: int) -> None:
        self._free[order].append(start)

    def _larger(self, order: int) -> int | None:
        return next((o for o in range(order, self._top + 1) if self._free[o]), None)

    def _merge(self) -> None:
        """Put free halves together, from the smallest up."""
        for order in range(LEAST_ORDER, self._top):
            size = 1 << order
            starts = set(self._free[order])
            whole = [s for s in starts if not s & size and s | size in starts]
            self._free[order] = sorted(starts - {half for s in whole for half in (s, s | size)})
            self._free[order + 1] += whole
