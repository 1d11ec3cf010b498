"""The names that a graph's values have, so that a new one is found without asking them all."""

from __future__ import annotations

from collections.abc import Collection


class Names:
    """How often each name is taken: by one value, but for a moment in the middle of a rewrite."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._least: dict[str, int] = {}  # no number below it is free behind this name

    def take(self, name: str) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1

    def free(self, name: str) -> None:
        count = self._counts.get(name, 0)
        if count > 1:
            self._counts[name] = count - 1
            return
        self._counts.pop(name, None)
        like, _, number = name.rpartition(".")
        if like in self._least and number.isdecimal():
            self._least[like] = min(self._least[like], int(number))

    def fresh(self, like: str, others: Collection[str]) -> str:
        """``like``, or the first of ``like.1``, ``like.2`` … that is not taken, nor in ``others``.

        The name is not taken by that: it is when a value has it.
        """
        if like not in self._counts and like not in others:
            return like
        number = self._least.get(like, 1)
        while f"{like}.{number}" in self._counts:
            number += 1
        self._least[like] = number
        while f"{like}.{number}" in self._counts or f"{like}.{number}" in others:
            number += 1
        return f"{like}.{number}"
