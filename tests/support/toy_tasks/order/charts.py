"""Loss and concordance over the training."""

from __future__ import annotations

CLASS_COUNTS = "pictures with a place, by split"
CONFUSION = False
PERCENT: tuple[str, ...] = ("concordance",)
CURVES: tuple[tuple[str, str], ...] = (("Loss", "loss"), ("Concordance", "concordance"))
