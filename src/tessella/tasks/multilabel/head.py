"""One score for each class, each a logit of its own."""

from __future__ import annotations

from tessella.tasks.classification.head import (
    ANSWERS,
    FINISHES,
    OUTPUT,
    TAUGHT,
    aligned,
    finish,
    shape,
    width,
)

__all__ = ["ANSWERS", "FINISHES", "OUTPUT", "TAUGHT", "aligned", "finish", "shape", "width"]
