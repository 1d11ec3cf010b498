"""Exact duplicates across splits: a network is flattered by a test image that it was trained on."""

from __future__ import annotations

MAX_PAIRS = 1000


class Duplicates:
    """Told of every image once; remembers 16 bytes of hash and one number an image.

    Attributes:
        count: images whose pixels an image of another split has, too.
        pairs: the first ``MAX_PAIRS`` of them, as numbers of images: the earlier, the later.
    """

    def __init__(self) -> None:
        self.count = 0
        self.pairs: list[tuple[int, int]] = []
        self._first: dict[bytes, tuple[int, int]] = {}

    def add(self, digest: bytes, split: int, number: int) -> None:
        """Args: the hash of the pixels, the split, and the image's number."""
        first_split, first = self._first.setdefault(digest, (split, number))
        if first_split != split:
            self.count += 1
            if len(self.pairs) < MAX_PAIRS:
                self.pairs.append((first, number))
