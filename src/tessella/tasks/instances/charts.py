"""Loss and average precision over the training, and images in which each class occurs."""

from __future__ import annotations

CLASS_COUNTS = "images in which each occurs, by split"
CONFUSION = False
PERCENT: tuple[str, ...] = (
    "map", "map50", "map75", "recall", "small", "medium", "large", "box_map", "box_map50",
)  # fmt: skip
CURVES: tuple[tuple[str, str], ...] = (
    ("Loss", "loss"),
    ("Mean average precision of masks", "map"),
    ("At an overlap of one half", "map50"),
    ("Mean average precision of boxes", "box_map"),
)
