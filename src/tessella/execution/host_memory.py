"""Host memory between the steps of a program on a CPU: kept, not given back and asked for again.

oneDNN's results come from the C library's allocator. By default it returns large blocks to the
system when they are freed, and every run takes them page by page again: 14,000 page faults in a
ResNet-50 of batch 8, 6 to 10 % of its time (163 → 153 ms on two cores). Engines run so, and so the
compiler measures.
"""

from __future__ import annotations

import ctypes
import functools
import platform

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
MMAP_BYTES = 1 << 30  # larger blocks still come from the system and go back at once
TOP_PAD_BYTES = 64 << 20


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process's allocator keep what is freed, for the next run; True where it can.

    That is for the whole process, and for good: its resident memory stays at its highest.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    settings = (
        (_M_MMAP_THRESHOLD, MMAP_BYTES),
        (_M_TRIM_THRESHOLD, 2**31 - 1),
        (_M_TOP_PAD, TOP_PAD_BYTES),
    )
    done = [libc.mallopt(name, value) for name, value in settings]
    return done == [1, 1, 1]
