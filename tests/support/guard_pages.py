"""Tensors that end, or begin, beside a page which may not be touched.

Machine code that reads or writes one byte too many there ends its process with a signal, where it
would otherwise find other tensors of the same heap, mostly without a trace.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tessella.core.integers import ceil_div
from tessella.device.x86 import code

PAGE = mmap.PAGESIZE
_protect = ctypes.CDLL(None).mprotect
_protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def memory_of(nbytes: int, *, at_end: bool) -> tuple[mmap.mmap, int]:
    """Memory between two pages without access, and where in it so many bytes touch one of them."""
    pages = ceil_div(nbytes, PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (address, address + (pages + 1) * PAGE):
        assert _protect(page, PAGE, 0) == 0
    return memory, PAGE + (pages * PAGE - nbytes if at_end else 0)


def placed(t: torch.Tensor, *, at_end: bool) -> torch.Tensor:
    """A copy with the same strides, from whose first to whose last number no byte is spare."""
    numbers = 1 + sum((d - 1) * s for d, s in zip(t.shape, t.stride(), strict=True))
    memory, begin = memory_of(numbers * t.itemsize, at_end=at_end)
    flat = torch.frombuffer(memory, dtype=t.dtype, count=numbers, offset=begin)
    return flat.as_strided(t.shape, t.stride()).copy_(t)


class Guarded(TorchDispatchMode):  # type: ignore[misc]
    """Inside, what operators allocate lies beside a page without access."""

    def __init__(self, *, at_end: bool) -> None:
        super().__init__()
        self.at_end = at_end

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        is_new = isinstance(made, torch.Tensor) and not func._schema.returns[0].alias_info
        if not is_new or not made.numel() or made.device.type != "cpu" or made.is_mkldnn:
            return made
        return placed(made, at_end=self.at_end)


@contextmanager
def guarded(*, at_end: bool) -> Iterator[None]:
    """What torch allocates inside, and the tables that machine code reads, lie beside a page
    without access."""
    make = code.Table.__init__

    def made(self: Any, rows: Any, *held: object) -> None:
        make(self, rows, *held)
        if not (nbytes := self._numbers.nbytes):
            return
        memory, begin = memory_of(nbytes, at_end=at_end)
        moved = np.frombuffer(memory, np.int64, self._numbers.size, begin)
        moved[:] = self._numbers.reshape(-1)
        self._numbers, self.address = moved, moved.ctypes.data

    with patch.object(code.Table, "__init__", made), Guarded(at_end=at_end):
        yield
