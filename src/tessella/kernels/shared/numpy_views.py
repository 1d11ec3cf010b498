"""NumPy's views of tensors, kept: a program's values lie in the same tensors in each run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

View = Callable[[torch.Tensor], Any]


class Seen:
    """NumPy's views of a tensor that is read and of one that is written, kept between calls.

    Made again where others come; not for two threads at once.
    """

    def __init__(self, read: View, written: View) -> None:
        self._make = read, written
        self._of: tuple[torch.Tensor, torch.Tensor] | None = None
        self._made: tuple[Any, Any] = (None, None)

    def views(self, x: torch.Tensor, out: torch.Tensor) -> tuple[Any, Any]:
        if self._of is None or self._of[0] is not x or self._of[1] is not out:
            self._made = self._make[0](x), self._make[1](out)
            self._of = x, out
        return self._made
