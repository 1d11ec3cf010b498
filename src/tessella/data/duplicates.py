"""Images whose pixels are equal: of two splits, of two classes, or copies in one class."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PAIRS = 1000


@dataclass(slots=True)
class _First:
    """The first image of some pixels: its split, its number, and its class if it has one."""

    split: int
    number: int
    label: int | None


class Duplicates:
    """A collection of all images' hashes; keeps 16 bytes and three numbers an image.

    Attributes:
        count: number of images that equal an image of another split.
        pairs: the first ``MAX_PAIRS`` such images: number of the earlier one and of the later one.
        contradictions: number of images that equal an image of another class.
        copies: number of images that equal an image of the same split and class.
    """

    def __init__(self) -> None:
        self.count = self.contradictions = self.copies = 0
        self.pairs: list[tuple[int, int]] = []
        self._first: dict[bytes, _First] = {}

    def add(self, digest: bytes, split: int, number: int, label: int | None = None) -> None:
        """Add an image by the hash of its pixels; ``number`` identifies it in ``pairs``.

        ``label`` is the class where a task has classes that exclude each other.
        """
        first = self._first.setdefault(digest, _First(split, number, label))
        if first.number == number:
            return
        self.contradictions += first.label != label
        if first.split != split:
            self.count += 1
            if len(self.pairs) < MAX_PAIRS:
                self.pairs.append((first.number, number))
        elif first.label == label:
            self.copies += 1
