"""Loss and accuracy over the training, the confusion matrix, and images of each class."""

from __future__ import annotations

CLASS_COUNTS = "images in each, by split"
CONFUSION = True
PERCENT: tuple[str, ...] = ("accuracy", "top5")
CURVES: tuple[tuple[str, str], ...] = (("Loss", "loss"), ("Accuracy", "accuracy"))
