"""load: a plan, ready to run. Imports neither compiler nor graphs nor networks."""

from __future__ import annotations

from pathlib import Path

from tessella import runtime
from tessella.artifacts.plan import Plan
from tessella.runtime.engine import Engine


def load(path: str | Path | Plan, *, compiled: bool = True) -> Engine:
    """A plan, ready to run; needs neither model code nor compiler.

    Args:
        compiled: run the machine code that a plan for a GPU carries; without, its kernels are
            compiled from Tessella's own sources, for a plan by someone you do not trust.

    >>> engine = load("flowers.plan")
    >>> scores = engine(image=images)["scores"]
    """
    return runtime.load(path, compiled=compiled)
