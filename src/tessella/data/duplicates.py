"""Exact duplicates across splits: a network is flattered by a test image that it was trained on."""

from __future__ import annotations

MAX_PAIRS = 1000


class Duplicates:
    """A collection of all images' hashes; keeps 16 bytes and one number an image.

    Attributes:
        count: number of images that equal an image of another split.
        pairs: the first ``MAX_PAIRS`` such images: number of the earlier one and of the later one.
    """

    def __init__(self) -> None:
        self.count = 0
        self.pairs: list[tuple[int, int]] = []
        self._first: dict[bytes, tuple[int, int]] = {}

    def add(self, digest: bytes, split: int, number: int) -> None:
        """Add an image by the hash of its pixels; ``number`` identifies it in ``pairs``."""
        first_split, first = self._first.setdefault(digest, (split, number))
        if first_split != split:
            self.count += 1
            if len(self.pairs) < MAX_PAIRS:
                self.pairs.append((first, number))
