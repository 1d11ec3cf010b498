"""Loss, IoU and Dice over the training, and images in which each class occurs."""

from __future__ import annotations

CLASS_COUNTS = "images in which each occurs, by split"
CONFUSION = False
PERCENT: tuple[str, ...] = ("miou", "dice", "pixel_accuracy")
CURVES: tuple[tuple[str, str], ...] = (
    ("Loss", "loss"),
    ("Mean intersection over union", "miou"),
    ("Dice", "dice"),
)
