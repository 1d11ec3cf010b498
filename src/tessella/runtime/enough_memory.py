"""Whether a device has the memory that a plan needs, and what to do where it has not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tessella.artifacts.plan import Plan
from tessella.core.errors import ArtifactError
from tessella.core.memory import free_bytes, is_out_of_memory


@contextmanager
def enough_memory(plan: Plan, device: torch.device) -> Iterator[None]:
    """Raise ``ArtifactError`` with the batch that fits, where memory runs out inside."""
    free = free_bytes(device)
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        weights = sum(t.nbytes for t in plan.weights.values())
        needs = {b.batch: weights + max(b.arena_bytes, b.peak_bytes) for b in plan.program.buckets}
        fits = max((batch for batch, needed in needs.items() if needed < free), default=None)
        raise ArtifactError(
            f"the plan does not fit in the memory of {device}",
            seen=f"{max(needs.values()):,} bytes needed at least, {free:,} were free",
            fix=f"build it for batches up to {fits}: {plan.manifest.rebuild}"
            if fits is not None and fits < max(needs)
            else "free memory there, or build it in a narrower precision",
        ) from error


def require_memory(nbytes: int, device: torch.device) -> None:
    """Raise ``ArtifactError`` if a device has less memory than a plan asks for in one piece."""
    has = (
        torch.cuda.get_device_properties(device).total_memory
        if device.type == "cuda"
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    if nbytes > has:
        raise ArtifactError(
            "the plan needs more memory than there is",
            seen=f"{nbytes:,} bytes in one piece, {has:,} on {device}",
            fix="build it for smaller batches",
        )
