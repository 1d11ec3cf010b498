"""Lifetimes: no two values of a program that are needed at the same time share memory."""

from __future__ import annotations

import math
from bisect import bisect

import torch

from tessella.artifacts.plan import Bucket, Program
from tessella.core.errors import CorruptArtifact
from tessella.kernels import catalog


def check(program: Program, bucket: Bucket) -> None:
    """Refuse a bucket in whose arena a step would overwrite what is still read.

    A view keeps alive what it is a view of. What ``Step.frees`` says is not believed.

    Raises:
        CorruptArtifact: two live buffers overlap; names both.
    """
    buffers = {b.name: b for b in bucket.buffers}
    last = _last_use(program, bucket)
    ends: dict[int, list[tuple[int, int, str]]] = {}
    live: list[tuple[int, int, str]] = []  # (first byte, end, name), sorted, apart from each other
    for index, step in enumerate(bucket.steps):
        born = [(name, last[name]) for name in step.outputs]
        if step.workspace is not None:
            born.append((step.workspace, index))
        for name, until in born:
            buffer = buffers[name]
            nbytes = math.prod(buffer.shape) * getattr(torch, buffer.dtype).itemsize
            if buffer.offset is None or nbytes == 0:
                continue
            place = (buffer.offset, buffer.offset + nbytes, name)
            at = bisect(live, place)
            for other in live[max(0, at - 1) : at + 1]:
                if place[0] < other[1] and other[0] < place[1]:
                    raise CorruptArtifact(
                        f"{name} and {other[2]} lie in the same memory at the same time",
                        seen=f"batch {bucket.batch}, step {index}: bytes {place[:2]}, {other[:2]}",
                        fix="build the plan again",
                    )
            live.insert(at, place)
            ends.setdefault(until, []).append(place)
        for place in ends.pop(index, []):
            live.remove(place)


def _last_use(program: Program, bucket: Bucket) -> dict[str, int]:
    """The last step that needs each value's memory, its views included."""
    last: dict[str, int] = {}
    for index, step in enumerate(bucket.steps):
        last |= {n: index for n in (*step.inputs, *step.outputs) if n is not None}
    last |= {n: len(bucket.steps) for n in program.outputs}
    for step in reversed(bucket.steps):  # so a view of a view is known before what it views
        if catalog.kernel(step.kernel).views:
            until = max(last[n] for n in step.outputs)
            for name in step.inputs:
                if name is not None:
                    last[name] = max(last[name], until)
    return last
