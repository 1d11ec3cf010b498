"""A number for each picture, as regression has it."""

from tessella.tasks.regression.examples import (
    JOINED,
    NAMES,
    PLACED,
    SMOOTHED,
    blank,
    column,
    contradiction,
    feature,
    find,
    lacking,
    occurs,
    renumbered,
    stored,
    strata,
    targets,
)

__all__ = [
    "JOINED", "NAMES", "PLACED", "SMOOTHED", "blank", "column", "contradiction", "feature", "find",
    "lacking", "occurs", "renumbered", "stored", "strata", "targets",
]  # fmt: skip
