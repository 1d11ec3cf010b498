"""Listing what would be launched, so that other processes compile it before it is.

Inside ``listing`` a launch takes note of its kernel and of what of its arguments is compiled in,
and runs nothing: tensors may be ones that have shapes alone. A listed launch is bytes, which any
process of this Tessella can compile.
"""

from __future__ import annotations

import importlib
import io
import operator
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from tessella.device import identity


class Listed:
    """Launches that differ in their machine code.

    Attributes:
        launches: each as bytes, by the key of its machine code.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self.launches: dict[str, bytes] = {}

    def add(
        self, kernel: Any, grid: tuple[int, ...], args: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        """Take note of a launch; one without a key, or that cannot be written, is left out."""
        args = [_bare(value) for value in args]
        key = identity.key(kernel, args, named, self._target)
        if key is None or key in self.launches:
            return
        written = io.BytesIO()
        try:
            _Pickler(written).dump((kernel, grid, args, dict(named)))
        except (pickle.PicklingError, TypeError, AttributeError):  # it is compiled when it starts
            return
        self.launches[key] = written.getvalue()


_open: ContextVar[Listed | None] = ContextVar("listed", default=None)


def open_list() -> Listed | None:
    """The list that launches are added to now; None: they run."""
    return _open.get()


@contextmanager
def listing(target: str) -> Iterator[Listed]:
    """Inside, launches are listed for ``target`` and nothing runs."""
    listed = Listed(target)
    token = _open.set(listed)
    try:
        yield listed
    finally:
        _open.reset(token)


def read(launch: bytes) -> tuple[Any, tuple[int, ...], list[Any], dict[str, Any]]:
    """Kernel, grid, arguments and constants of a listed launch, by who trusts its writer."""
    made: tuple[Any, tuple[int, ...], list[Any], dict[str, Any]] = pickle.loads(launch)
    return made


def _bare(value: Any) -> Any:
    """An argument whose tensors have an element type and nothing else."""
    if isinstance(value, torch.Tensor):
        return _empty(value.dtype)
    if isinstance(value, tuple):
        made = [_bare(one) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    return value


def _empty(dtype: torch.dtype) -> torch.Tensor:
    with unset_fake_temporarily():
        return torch.empty(0, dtype=dtype, device="meta")


class _Pickler(pickle.Pickler):
    """Writes functions for the GPU by their names, and tensors as their element types."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _empty, (value.dtype,)
        if identity.is_device_code(value):
            named = value.fn.__module__, value.fn.__qualname__
            if _named(*named) is not value:
                raise pickle.PicklingError(f"{named} is another function")
            return _named, named
        return NotImplemented


def _named(module: str, name: str) -> Any:
    return operator.attrgetter(name)(importlib.import_module(module))
