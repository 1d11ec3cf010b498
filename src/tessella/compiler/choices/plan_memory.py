"""Memory plan: when each value dies, and where in one arena the live ones lie.

Kernels that write into a given buffer get a place in the arena; the others allocate. A view shares
its base's memory, which then lives as long as the view. Slices lie in the memory of their whole. A
result that is made element by element takes the place of an operand that nobody needs any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tessella.artifacts.program import ALIGNMENT, Bucket, Buffer, Step
from tessella.compiler.choices.choose_kernels import Choice
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

    @property
    def nbytes(self) -> int:
        return -(-self.meta.nbytes // ALIGNMENT) * ALIGNMENT


def apply(graph: Graph, choices: Sequence[Choice], batch: int) -> Bucket:
    """The straight-line program of one bucket."""
    last_read = _last_reads(graph, choices)
    memory = _Memory(graph, choices, last_read)
    storages = memory.storages()
    arena_bytes = place([s for s in storages if s.in_arena])
    buffers = tuple(
        Buffer(
            name=value.name,
            dtype=meta.dtype,
            shape=meta.shape,
            format=meta.format,
            offset=memory.offset(value.name),
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
            frees=tuple(sorted(name for name, last in last_read.items() if last == index)),
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


def _last_reads(graph: Graph, choices: Sequence[Choice]) -> dict[str, int]:
    """The last step that reads each value (or makes it); the graph's outputs outlive all steps."""
    last = {
        value.name: index
        for index, choice in enumerate(choices)
        for value in (*choice.node.inputs, *choice.node.outputs)
        if value is not None and value not in graph.constants
    }
    return last | {v.name: len(choices) for v in graph.outputs}


class _Memory:
    """Which storage each value lies in, views and slices included."""

    def __init__(self, graph: Graph, choices: Sequence[Choice], last_read: dict[str, int]) -> None:
        self._last_read = last_read
        self._metas = {
            value.name: meta
            for choice in choices
            for value, meta in zip(choice.node.outputs, choice.problem.outputs, strict=True)
        }
        self._storages: dict[str, _Storage] = {}  # by the name of a value that is neither
        self._bases: dict[str, set[str]] = {}  # value → the storages that its memory may belong to
        wholes = {place.of for choice in choices for place in choice.slices.values()}
        viewed = {
            v.name
            for choice in choices
            if catalog.kernel(choice.kernel).views
            for v in choice.node.inputs
            if v is not None
        }
        self._lasting = wholes | viewed | {v.name for v in graph.outputs}
        for index, choice in enumerate(choices):
            self._add(index, choice)

    def storages(self) -> list[_Storage]:
        """Each once, in the order of their first steps."""
        return list({id(s): s for s in self._storages.values()}.values())

    def offset(self, name: str) -> int | None:
        """Where the value lies in the arena; None if it has no place of its own there."""
        return self._storages[name].offset if name in self._storages else None

    def _add(self, index: int, choice: Choice) -> None:
        """What the step makes, and works in."""
        row = catalog.kernel(choice.kernel)
        if choice.workspace_bytes:
            name = _workspace(choice)
            meta = TensorMeta(shape=(choice.workspace_bytes,), dtype="uint8")
            self._storages[name] = _Storage(name, meta, index, index, True)
        read = [v.name for v in choice.node.inputs if v is not None and v.name in self._bases]
        for value in choice.node.outputs:
            name = value.name
            if row.views:
                self._bases[name] = set().union(*(self._bases[n] for n in read))
            else:
                place = choice.slices.get(name)
                base = name if place is None else place.of
                if base not in self._storages:
                    taken = self._overwritten(index, choice) if place is None else None
                    self._storages[base] = taken or _Storage(
                        base, self._metas[base], index, index, row.writes_out
                    )
                self._bases[name] = {base}
            for base in self._bases[name]:
                storage = self._storages[base]
                storage.last = max(storage.last, self._last_read[name])

    def _overwritten(self, index: int, choice: Choice) -> _Storage | None:
        """An operand's storage that an element-by-element step may write its result into."""
        if not catalog.kernel(choice.kernel).in_place:
            return None
        for value, meta in zip(choice.node.inputs, choice.problem.inputs, strict=True):
            storage = self._storages.get(value.name) if value is not None else None
            if storage is None or value.name in self._lasting or meta != choice.problem.output:
                continue
            if storage.in_arena and storage.last == index:
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
    placed: list[_Storage] = []
    for storage in storages:
        neighbours = sorted(
            (p for p in placed if p.first <= storage.last and storage.first <= p.last),
            key=lambda p: p.offset,
        )
        end, gaps = 0, []
        for neighbour in neighbours:
            if neighbour.offset - end >= storage.nbytes:
                gaps.append((neighbour.offset - end, end))
            end = max(end, neighbour.offset + neighbour.nbytes)
        storage.offset = min(gaps)[1] if gaps else end
        placed.append(storage)
    return max((s.offset + s.nbytes for s in placed), default=0)


def _peak_bytes(storages: Sequence[_Storage], steps: int) -> int:
    """The most that is live during any step."""
    return max(
        (sum(s.nbytes for s in storages if s.first <= i <= s.last) for i in range(steps)), default=0
    )
