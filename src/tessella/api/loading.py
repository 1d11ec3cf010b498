"""load: a plan, ready to run. Imports neither compiler nor graphs nor networks."""

from __future__ import annotations

from pathlib import Path

from tessella import runtime
from tessella.artifacts.plan import Plan
from tessella.runtime.engine import Engine


def load(
    path: str | Path | Plan,
    *,
    device: str | None = None,
    compiled: bool = True,
    every_size: bool = False,
) -> Engine:
    """A plan, ready to run; needs neither model code nor compiler.

    Args:
        device: ``cpu``, or a GPU by its number, ``cuda:1``; by default the current GPU. Of a plan
            for several targets the program for it is taken.
        compiled: run the machine code that a plan for a GPU carries; without, its kernels are
            compiled from Tessella's own sources, for a plan by someone you do not trust.
        every_size: get the programs of all batch sizes ready now. Otherwise, on a CPU, the first
            call of a size does that for it, and takes longer; ``engine.warm_up()`` does it, too.

    >>> engine = load("flowers.plan")
    >>> scores = engine(image=images)["scores"]
    """
    return runtime.load(path, device=device, compiled=compiled, every_size=every_size)
