"""Out of memory: find a batch size that fits by running smaller ones, and name it in the error."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from tessella.core.errors import OutOfMemory
from tessella.core.memory import is_out_of_memory


def largest_that_runs(step: Callable[[int], None], failed: int) -> int | None:
    """The largest of failed/2, failed/4, … images that ``step`` runs with, or None."""
    batch = failed // 2
    while batch >= 1:
        give_back()
        if _runs(step, batch):
            return batch
        batch //= 2
    return None


def give_back() -> None:
    """Free what nothing refers to, and let other processes have a GPU's memory that is free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _runs(step: Callable[[int], None], batch: int) -> bool:
    try:
        step(batch)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    except ValueError:  # batch normalization refuses to train on a single image
        return False
    return True


def out_of_memory(
    seen: str, *, batch_size: int, fits: int | None, device: torch.device
) -> OutOfMemory:
    """The error with settings that fit.

    Args:
        seen: the allocator's message, of which the error keeps the first line.
        batch_size, fits: images a step over all processes, that failed and that ran.
    """
    if fits is None:
        fix = "use smaller images, a smaller network, or precision bf16: one image does not fit"
    else:
        fix = f"use --batch-size {fits}: a step of that size was run here"
    return OutOfMemory(
        f"a step of {batch_size} images does not fit in the memory of {device}",
        seen=seen.strip().splitlines()[0] if seen.strip() else "no memory",
        fix=fix,
    )
