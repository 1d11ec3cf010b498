"""Memory plan: when each value dies, and where in one arena the live ones lie.

Kernels that write into a given buffer get a place in the arena; the others allocate. A view shares
its base's memory, which then lives as long as the view. Slices lie in the memory of their whole. A
result that is made element by element takes the place of an operand that nobody needs any more.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tessella.artifacts.program import ALIGNMENT, Bucket, Buffer, Step
from tessella.compiler.choices.choose_kernels import Choice
from tessella.execution import liveness
from tessella.execution.liveness import Use
from tessella.graph.graph import Graph
from tessella.kernels import catalog
from tessella.operations.tensor_meta import TensorMeta

WORKSPACE = ".workspace"


@dataclass
class _Storage:
    """Memory that a value, its views and its slices occupy from step ``first`` to step ``last``."""

    name: str
    meta: TensorMeta
    first: int
    last: int
    in_arena: bool
    offset: int | None = None

    @cached_property
    def nbytes(self) -> int:
        return -(-self.meta.nbytes // ALIGNMENT) * ALIGNMENT


def apply(graph: Graph, choices: Sequence[Choice], batch: int) -> Bucket:
    """The straight-line program of one bucket."""
    uses = [_use(graph, choice) for choice in choices]
    outputs = [v.name for v in graph.outputs]
    frees = liveness.ended(uses, outputs)
    by_name = _storages(choices, outputs, liveness.last_memory_uses(uses, outputs))
    storages = list({id(s): s for s in by_name.values()}.values())
    arena_bytes = place([s for s in storages if s.in_arena])
    buffers = tuple(
        Buffer(
            name=value.name,
            dtype=meta.dtype,
            shape=meta.shape,
            format=meta.format,
            offset=by_name[value.name].offset if value.name in by_name else None,
            slice=choice.slices.get(value.name),
        )
        for choice in choices
        for value, meta in zip(choice.node.outputs, choice.problem.outputs, strict=True)
    ) + tuple(
        Buffer(name=s.name, dtype=s.meta.dtype, shape=s.meta.shape, offset=s.offset)
        for s in storages
        if s.name.endswith(WORKSPACE)
    )
    steps = tuple(
        Step(
            kernel=choice.kernel,
            op=choice.node.op,
            inputs=tuple(None if v is None else v.name for v in choice.node.inputs),
            outputs=tuple(v.name for v in choice.node.outputs),
            attrs=choice.node.attrs,
            config=choice.config,
            workspace=_workspace(choice) if choice.workspace_bytes else None,
            frees=tuple(sorted(frees[index])),
            layer=choice.node.layer,
        )
        for index, choice in enumerate(choices)
    )
    return Bucket(
        batch=batch,
        buffers=buffers,
        steps=steps,
        arena_bytes=arena_bytes,
        held_bytes=arena_bytes + _peak_bytes([s for s in storages if not s.in_arena], len(choices)),
        peak_bytes=_peak_bytes(storages, len(choices)),
    )


def _workspace(choice: Choice) -> str:
    """The name of the step's scratch memory."""
    return choice.node.outputs[0].name + WORKSPACE


def _use(graph: Graph, choice: Choice) -> Use[str]:
    """What a step reads, but for constants, and writes."""
    return Use(
        [v.name for v in choice.node.inputs if v is not None and v not in graph.constants],
        [v.name for v in choice.node.outputs],
        aliases=catalog.kernel(choice.kernel).views,
    )


def _storages(
    choices: Sequence[Choice], outputs: Sequence[str], until: dict[str, int]
) -> dict[str, _Storage]:
    """What steps write into and work in, by the name of a value that is no view and no slice.

    Args:
        until: the last step that needs each value's memory.
    """
    metas = {
        value.name: meta
        for choice in choices
        for value, meta in zip(choice.node.outputs, choice.problem.outputs, strict=True)
    }
    wholes = {place.of for choice in choices for place in choice.slices.values()}
    views = [c for c in choices if catalog.kernel(c.kernel).views]
    lasting = wholes.union(outputs, (v.name for c in views for v in c.node.inputs if v is not None))
    storages: dict[str, _Storage] = {}
    for index, choice in enumerate(choices):
        row = catalog.kernel(choice.kernel)
        if choice.workspace_bytes:
            name = _workspace(choice)
            meta = TensorMeta(shape=(choice.workspace_bytes,), dtype="uint8")
            storages[name] = _Storage(name, meta, index, index, True)
        for value in choice.node.outputs if not row.views else ():
            place = choice.slices.get(value.name)
            base = value.name if place is None else place.of
            if base not in storages:
                taken = _overwritten(index, choice, storages, lasting) if place is None else None
                new = _Storage(base, metas[base], index, index, row.writes_out)
                storages[base] = taken or new
            storages[base].last = max(storages[base].last, until[value.name])
    return storages


def _overwritten(
    index: int, choice: Choice, storages: Mapping[str, _Storage], lasting: Collection[str]
) -> _Storage | None:
    """An operand's storage that an element-by-element step may write its result into."""
    if not catalog.kernel(choice.kernel).in_place:
        return None
    for value, meta in zip(choice.node.inputs, choice.problem.inputs, strict=True):
        if value is None or value.name in lasting or meta != choice.problem.output:
            continue
        storage = storages.get(value.name)
        if storage is not None and storage.in_arena and storage.last == index:
            return storage
    return None


# In which order storages get their places. No order is best for all networks: of twelve of
# torchvision's, by size is 25 % above the least for MNASNet and exact for the others, by time exact
# for MNASNet and up to 44 % above for the others.
ORDERS: tuple[Callable[[_Storage], tuple[Any, ...]], ...] = (
    lambda s: (-s.nbytes, s.first, s.name),
    lambda s: (s.first, -s.nbytes, s.name),
    lambda s: (s.first - s.last, -s.nbytes, s.name),
    lambda s: (-s.nbytes, s.first - s.last, s.name),
)


def place(storages: Sequence[_Storage]) -> int:
    """Offsets, by the order that needs the least memory; returns the arena's size."""
    steps = max((s.last for s in storages), default=0) + 1
    least = _peak_bytes(storages, steps)
    best, offsets = math.inf, [s.offset for s in storages]
    for order in ORDERS:
        nbytes = _place_in(sorted(storages, key=order))
        if nbytes < best:
            best, offsets = nbytes, [s.offset for s in storages]
        if best == least:
            break
    for storage, offset in zip(storages, offsets, strict=True):
        storage.offset = offset
    return int(best)


def _place_in(storages: Sequence[_Storage]) -> int:
    """Offsets in the order given, each in the tightest gap; returns the arena's size."""
    placed, nbytes = _Placed(), 0
    for storage in storages:
        end, gaps = 0, []
        for offset, _, its_end in sorted(placed.living_with(storage)):
            if offset - end >= storage.nbytes:
                gaps.append((offset - end, end))
            end = max(end, its_end)
        storage.offset = offset = min(gaps)[1] if gaps else end
        placed.add(storage, offset)
        nbytes = max(nbytes, offset + storage.nbytes)
    return nbytes


class _Placed:
    """Places that are taken, by how long (in powers of two) and since when: those that are taken at
    the same time as another are found without a look at all.
    """

    def __init__(self) -> None:
        self._count = itertools.count()
        # first step, number in the order of places, last step, offset, end
        self._by_length: dict[int, list[tuple[int, int, int, int, int]]] = {}

    def add(self, storage: _Storage, offset: int) -> None:
        group = self._by_length.setdefault((storage.last - storage.first).bit_length(), [])
        number, end = next(self._count), offset + storage.nbytes
        insort(group, (storage.first, number, storage.last, offset, end))

    def living_with(self, storage: _Storage) -> Iterator[tuple[int, int, int]]:
        """The offset, number and end of each."""
        for bits, group in self._by_length.items():
            since = bisect_left(group, (storage.first - (1 << bits) + 1,))
            until = bisect_left(group, (storage.last + 1,))
            for _, number, last, offset, end in group[since:until]:
                if last >= storage.first:
                    yield offset, number, end


def _peak_bytes(storages: Sequence[_Storage], steps: int) -> int:
    """The most that is live during any step."""
    changes = [0] * (steps + 1)
    for storage in storages:
        changes[min(storage.first, steps)] += storage.nbytes
        changes[min(storage.last + 1, steps)] -= storage.nbytes
    return max(itertools.accumulate(changes[:steps]), default=0)
