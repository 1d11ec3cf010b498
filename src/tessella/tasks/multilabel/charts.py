"""Loss, average precision and F1 over the training, and images with each class."""

from __future__ import annotations

CLASS_COUNTS = "images with each, by split; an image may have several"
CONFUSION = False
PERCENT: tuple[str, ...] = ("map", "f1", "f1_at_half", "exact", "label_accuracy")
CURVES: tuple[tuple[str, str], ...] = (
    ("Loss", "loss"),
    ("Mean average precision", "map"),
    ("F1", "f1"),
)
