"""Where a network saw a picture: from what it answers back to the picture's own pixels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessella.core.preprocess import Preprocess, placement


@dataclass(frozen=True, kw_only=True)
class View:
    """A picture of a height and a width, as a record brings it to a network.

    Attributes:
        height, width: of the picture as it is shown, in its own pixels.
    """

    height: int
    width: int
    record: Preprocess

    def in_picture(self, boxes_N4: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Boxes x0 y0 x1 y1 in fractions of what the network sees, in the picture's own pixels.

        What reaches over the picture's edge, into the padding, is cut.
        """
        boxes = self.around_picture(boxes_N4)
        return boxes.clip(0, [self.width, self.height, self.width, self.height])

    def around_picture(self, boxes_N4: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The same boxes as they are, over the picture's edge or not."""
        record = self.record
        place = placement(self.height, self.width, record)
        _, height, width = record.input_shape
        left, top, right, bottom = place.box
        x = (record.width - width) // 2 - place.left + boxes_N4[:, [0, 2]] * width
        y = (record.height - height) // 2 - place.top + boxes_N4[:, [1, 3]] * height
        x = left + x * (right - left) / place.width
        y = top + y * (bottom - top) / place.height
        return np.stack([x[:, 0], y[:, 0], x[:, 1], y[:, 1]], axis=1)
