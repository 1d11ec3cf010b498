"""Memory plan: when each value dies, and where in one arena the live ones lie.

Kernels that write into a given buffer get a place in the arena; the others allocate. A view shares
its base's memory, which then lives as long as the view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessella.artifacts.plan import ALIGNMENT, Bucket, Buffer, Step
from tessella.compiler.passes.choose_kernels import Choice
from tessella.graph.graph import Graph
from tessella.kernels import catalog
from tessella.kernels.problem import TensorMeta

WORKSPACE = ".workspace"


@dataclass
class _Storage:
    """Memory that a value and its views occupy from step ``first`` to step ``last``."""

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
    storages = _storages(graph, choices, last_read)
    arena_bytes = place([s for s in storages.values() if s.in_arena])
    buffers = tuple(
        Buffer(
            name=value.name,
            dtype=meta.dtype,
            shape=meta.shape,
            format=meta.format,
            offset=storages[value.name].offset if value.name in storages else None,
        )
        for choice in choices
        for value, meta in zip(choice.node.outputs, choice.problem.outputs, strict=True)
    ) + tuple(
        Buffer(name=s.name, dtype=s.meta.dtype, shape=s.meta.shape, offset=s.offset)
        for s in storages.values()
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
        peak_bytes=_peak_bytes(list(storages.values()), len(choices)),
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


def _storages(
    graph: Graph, choices: Sequence[Choice], last_read: dict[str, int]
) -> dict[str, _Storage]:
    """The memory of each computed value that is not a view, by the value's name."""
    storages: dict[str, _Storage] = {}
    bases: dict[str, set[str]] = {}  # value → the storages that its memory may belong to
    for index, choice in enumerate(choices):
        row = catalog.kernel(choice.kernel)
        if choice.workspace_bytes:
            meta = TensorMeta(shape=(choice.workspace_bytes,), dtype="uint8")
            name = _workspace(choice)
            storages[name] = _Storage(name, meta, index, index, True)
        read = [v.name for v in choice.node.inputs if v is not None and v.name in bases]
        for value, meta in zip(choice.node.outputs, choice.problem.outputs, strict=True):
            name, last = value.name, last_read[value.name]
            if row.views:
                bases[name] = set().union(*(bases[n] for n in read))
                for base in bases[name]:
                    storages[base].last = max(storages[base].last, last)
            else:
                writes_out = row.load().WRITES_OUT
                storages[name] = _Storage(name, meta, index, last, writes_out)
                bases[name] = {name}
    return storages


def place(storages: Sequence[_Storage]) -> int:
    """Offsets, the largest storage first, each in the tightest gap; returns the arena's size."""
    placed: list[_Storage] = []
    for storage in sorted(storages, key=lambda s: (-s.nbytes, s.first, s.name)):
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
