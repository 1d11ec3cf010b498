"""Loss, R² and mean error over the training, and images with each number."""

from __future__ import annotations

CLASS_COUNTS = "images for which each number is known, by split"
CONFUSION = False
PERCENT: tuple[str, ...] = ()
CURVES: tuple[tuple[str, str], ...] = (
    ("Loss", "loss"),
    ("R²", "r2"),
    ("Mean absolute error", "mae"),
)
