"""Follows who wrote each byte of a plan's arena, as its steps run: an independent look at it."""

from __future__ import annotations

import math

import torch

from tessella.artifacts.program import Bucket, Program
from tessella.kernels import catalog


def check_memory(program: Program, bucket: Bucket) -> None:
    """Every step reads bytes that were last written by who made what it reads.

    A concatenation does not write the parts that lie in it already; it reads as its own what they
    may read as theirs.
    """
    buffers = {b.name: b for b in bucket.buffers}
    owner = torch.full((bucket.arena_bytes,), -1, dtype=torch.int64)
    number = {name: i for i, name in enumerate(buffers)}
    ids = {name: {i} for name, i in number.items()}  # whose bytes a value may find
    bases: dict[str, set[str]] = {}  # value → the values with memory that it may look into

    def region(name: str) -> torch.Tensor | None:
        """The bytes of a value, by their place in the arena."""
        buffer = buffers[name]
        if buffer.slice is not None:
            whole = region(buffer.slice.of)
            start, size = buffer.slice.start, buffer.shape[buffer.slice.axis]
            return None if whole is None else whole.narrow(buffer.slice.axis, start, size)
        if buffer.offset is None:
            return None
        itemsize = getattr(torch, buffer.dtype).itemsize
        nbytes = math.prod(buffer.shape) * itemsize
        flat = torch.arange(buffer.offset, buffer.offset + nbytes).view(-1, itemsize)
        if buffer.format == "channels_last":
            n, c, *sizes = buffer.shape
            return flat.view(n, *sizes, c, itemsize).movedim(-2, 1)
        return flat.view(*buffer.shape, itemsize)

    def read(name: str) -> None:
        for base in bases.get(name, ()):
            if (bytes_ := region(base)) is not None:
                found = set(owner[bytes_].unique().tolist())
                assert found <= ids[base], (name, base, found)

    for step in bucket.steps:
        inputs = [n for n in step.inputs if n is not None]
        for name in inputs:
            read(name)
        for name in step.outputs:
            if catalog.kernel(step.kernel).views:
                bases[name] = set().union(*(bases.get(n, set()) for n in inputs))
                continue
            bases[name] = {name}
            if (bytes_ := region(name)) is None:
                continue
            written = bytes_.flatten()
            for part in inputs if step.op == "cat" else ():
                there = region(part) if part in buffers else None
                if there is not None and torch.isin(there, bytes_).all():
                    ids[name] = ids[name].union(*(ids[base] for base in bases[part]))
                    written = written[~torch.isin(written, there)]
            owner[written] = number[name]
        if step.workspace is not None:
            owner[region(step.workspace)] = -2
    for name in program.outputs:
        read(name)
