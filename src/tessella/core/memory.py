"""Out of memory: how it is recognized, on a GPU and in the host."""

from __future__ import annotations

import os

import torch

_CPU_MESSAGES = ("DefaultCPUAllocator: can't allocate", "not enough memory: you tried to allocate")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(m in str(error) for m in _CPU_MESSAGES)


def free_bytes(device: torch.device) -> int:
    """About how many bytes a device has free."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
