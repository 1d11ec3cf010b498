"""Memory: how running out of it is recognized, on a GPU and in the host, and large pages of it."""

from __future__ import annotations

import ctypes
import functools
import gc
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tessella.core.errors import OutOfMemory

LARGE_PAGE = 2**21  # bytes, of x86-64 and of AArch64 with pages of 4 KiB

_MESSAGES = (
    "DefaultCPUAllocator: can't allocate",
    "not enough memory: you tried to allocate",
    "CUDA error: out of memory",  # where another program has it: torch.AcceleratorError
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(m in str(error) for m in _MESSAGES)


@contextmanager
def room_for(images: int, where: object) -> Iterator[None]:
    """Inside, memory for so many images is taken.

    Raises:
        OutOfMemory: there is too little.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"{images:,} images do not fit in the memory of {where}",
            seen=str(error).splitlines()[0][:200] if str(error) else "no memory",
            fix="use a smaller batch, or --batch-size auto, which takes the most that fit",
        ) from error


@contextmanager
def without_collecting() -> Iterator[None]:
    """Inside, Python does not look for cycles: to read a plan makes 100,000 objects, none in one,
    and to look at all of torch's again for that took a tenth of loading.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def free_bytes(device: torch.device) -> int:
    """About how many bytes a device has free; of a host those count that hold files' copies."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        told = next(line for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # another system
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return int(told.split()[1]) << 10


def host_bytes() -> int:
    """How many bytes the host has in all, or the container that this process runs in."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # "max" where there is none
    told = limit.read_text().strip() if limit.is_file() else ""
    return min(most, int(told)) if told.isdigit() else most


def empty_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory with any content: uint8 [nbytes], whose first address is a multiple of 64.

    In a host it lies in large pages where the system has them, from 2 MiB on. A processor finds
    few small pages quickly: depthwise convolutions of 8 images (Zen 3, one thread) took 1.0 to 3.5
    times as long in pages of 4 KiB.
    """
    if device.type != "cpu" or nbytes < LARGE_PAGE:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    around = torch.empty(nbytes + LARGE_PAGE, dtype=torch.uint8)
    skipped = -around.data_ptr() % LARGE_PAGE
    memory = around[skipped : skipped + nbytes]
    if (advise := _madvise()) is not None:  # a hint: that it is refused harms nothing
        advise(memory.data_ptr(), nbytes // LARGE_PAGE * LARGE_PAGE, mmap.MADV_HUGEPAGE)
    return memory


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The system's ``madvise``, where it knows large pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
