"""What a network of instances gets wrong: its masks beside those of the things, by kind of error.

The kinds are detection's, and so is what decides them, but for the overlap, which is that of masks.
Imports no torch: the studio does without.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np

from tessella.annotations import rle
from tessella.tasks.detection import errors as boxes
from tessella.tasks.detection.errors import OVERLAP, TITLES, Floats, Matched, Outlines, thresholds
from tessella.tasks.instances.cells import outlines
from tessella.tasks.instances.examples import MaskSets
from tessella.tasks.instances.packing import WIDTH, drawn, size_of, things_of
from tessella.tasks.instances.runs import of_counts
from tessella.tasks.task import Rows, Targets

FIELDS = WIDTH  # of a told thing in a row

__all__ = ["FIELDS", "OVERLAP", "TITLES", "MatchedMasks", "match", "thresholds"]


@dataclass(frozen=True, kw_only=True, eq=False)
class MatchedMasks(Matched):
    """Every told mask and every thing of a split, matched at an overlap of masks."""

    rows_NDW: Rows = field(repr=False)
    targets: MaskSets = field(repr=False)

    def told_outlines(self, told: int) -> Outlines:
        image = int(self.images[told])
        row = self.rows_NDW[image, self.numbers[told]]
        runs = drawn(row[None], size_of(self.targets, image))
        return self._placed(rle.of_runs(runs.begins, runs.ends, runs.stride - 1), image)

    def thing_outlines(self, thing: int) -> Outlines:
        image = int(self.there_images[thing])
        first = int(np.searchsorted(self.there_images, image))
        return self._placed(self.targets.counts(image)[thing - first], image)

    def _placed(self, counts: rle.Counts, image: int) -> Outlines:
        """The outlines of a mask of what the network sees, in pixels of the stored picture."""
        top, left, height, width = self.targets.views[image].tolist()
        around = outlines(rle.mask_of(counts, height, width))
        return tuple(
            tuple((np.reshape(line, (-1, 2)) + np.array([left, top])).ravel().tolist())
            for line in around
        )


def match(
    rows_NR: Rows, targets: Targets, overlap: float = OVERLAP, least_K: Floats | None = None
) -> MatchedMasks:
    """The told masks of rows N×(things · ``FIELDS``) beside the things of their images.

    Args:
        overlap: an intersection over union of masks, above ``NEAR`` and at most 1.
        least_K: scores below which nothing is matched, nor drawn; None: everything is.
    """
    assert isinstance(targets, MaskSets)

    def overlaps_of(image: int, told: Rows, things: Floats) -> Floats:
        size, crowds = size_of(targets, image), things[:, 5] > 0
        there = of_counts(targets.counts(image), size)
        every = np.ones((len(told), len(things)), bool)
        return drawn(told, size).shares(there, crowds, every)

    rows_NDW = things_of(rows_NR)
    found = boxes.matched(rows_NDW, targets, overlap, overlaps_of, least_K)
    same = {f.name: getattr(found, f.name) for f in fields(found)}
    return MatchedMasks(**same, rows_NDW=rows_NDW, targets=targets)
