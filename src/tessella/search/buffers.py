"""How a kernel uses memory: whether it writes beside its result, and how much it allocates."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessella.operations.user_operators import as_tuple
from tessella.search.timing import Run

POISON = 77  # what a kernel leaves unwritten must show


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory from a buffer's first byte to its last, the gaps of a slice included."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.as_strided((size,), (1,), 0)


def wrote_beside(out: torch.Tensor) -> bool:
    """Whether something else than poison lies in the gaps of a slice."""
    memory = whole(out).clone()
    memory.as_strided(out.shape, out.stride()).fill_(POISON)
    poison = torch.full_like(memory[:1], POISON)
    return bool((memory.float() != poison.float()).any())


def allocated(run: Run, made: Sequence[torch.Tensor]) -> int:
    """The most that torch's allocator handed out during a call, without the results."""
    torch.cuda.synchronize()
    before: int = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    again = as_tuple(run())
    peak: int = torch.cuda.max_memory_allocated() - before
    fresh = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in again}
    old = {t.untyped_storage().data_ptr() for t in made}
    results: int = sum(n for pointer, n in fresh.items() if pointer not in old)
    return max(0, peak - results)
