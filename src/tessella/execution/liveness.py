"""Liveness: how long each value is needed in a straight line of steps.

The one analysis of all who free, place or overwrite values. ``runtime.lifetimes``, which checks
plans that others made, has its own, so that an error in this one cannot hide.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Use(Generic[Name]):
    """What one step reads (None where an input is left out) and writes.

    Attributes:
        aliases: whether the reads may be read through the writes: a view looks at their memory.
    """

    reads: Sequence[Name | None]
    writes: Sequence[Name]
    aliases: bool = False


def last_uses(uses: Sequence[Use[Name]], lasting: Iterable[Name]) -> dict[Name, int]:
    """The last step that reads or writes each value; one past all steps for ``lasting`` ones."""
    last = {n: i for i, use in enumerate(uses) for n in (*use.reads, *use.writes) if n is not None}
    return last | dict.fromkeys(lasting, len(uses))


def last_memory_uses(uses: Sequence[Use[Name]], lasting: Iterable[Name]) -> dict[Name, int]:
    """The last step that needs each value's memory, through its views too."""
    last = last_uses(uses, lasting)
    for use in reversed(uses):  # a view of a view is known before what it is a view of
        if use.aliases:
            until = max(last[name] for name in use.writes)
            last |= {n: max(last[n], until) for n in use.reads if n is not None}
    return last


def ended(uses: Sequence[Use[Name]], lasting: Iterable[Name]) -> list[list[Name]]:
    """For each step, the values that no later one reads and that are not ``lasting``."""
    found: list[list[Name]] = [[] for _ in uses]
    for name, index in last_uses(uses, lasting).items():
        if index < len(uses):
            found[index].append(name)
    return found


def dying(uses: Sequence[Use[Name]], lasting: Iterable[Name]) -> list[tuple[int, ...]]:
    """For each step, the positions of the inputs whose memory nothing needs afterwards.

    Args:
        lasting: values whose memory must stay as it is: inputs, outputs, constants, slices.
    """
    family: dict[Name, Name] = {}  # of values that may share memory: each one's elder

    def root(name: Name) -> Name:
        while (elder := family.setdefault(name, name)) != name:
            family[name] = name = family[elder]
        return name

    for use in uses:
        for name in (*use.writes, *use.reads) if use.aliases else ():
            if name is not None:
                family[root(name)] = root(use.writes[0])
    roots = [
        Use([None if n is None else root(n) for n in use.reads], [root(n) for n in use.writes])
        for use in uses
    ]
    last = last_uses(roots, map(root, lasting))
    return [
        tuple(
            position
            for position, name in enumerate(use.reads)
            if name is not None and last[name] == index and use.reads.count(name) == 1
        )
        for index, use in enumerate(roots)
    ]
