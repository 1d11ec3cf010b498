"""What a launch wants of a compiler, as a key: found without parsing or compiling anything.

Equal keys, equal machine code: the key is at least as fine as what Triton specializes for. It takes
50 µs; Triton's own needs the source parsed, the compiler imported and a GPU.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch

from tessella.core.record import digest
from tessella.device.machine import ALIGNMENT


class _Unknown(Exception):
    """Something that has no text of its own."""


def arguments(kernel: Any, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """All arguments of a kernel in the order of its signature, constants among them."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | dict(named)
    return [given.get(p.name, p.default) for p in kernel.params]


def key(kernel: Any, args: Sequence[Any], named: Mapping[str, Any], target: str) -> str | None:
    """The key of a launch of a Triton or Gluon kernel; None where it has none.

    Args:
        kernel: the decorated function; one that tunes itself has no key.
        args: tensors, descriptors and numbers, in the function's order.
        named: constexpr parameters and options.
        target: what the machine code is for, for example ``sm_90``.
    """
    if not is_device_code(kernel):
        return None
    values = arguments(kernel, args, named)
    try:
        described = [
            _constant(value) if parameter.is_constexpr else _argument(value)
            for parameter, value in zip(kernel.params, values, strict=True)
        ]
        options = {n: _constant(v) for n, v in named.items() if n not in kernel.arg_names}
    except _Unknown:
        return None
    return digest([target, source(kernel), described, options])


def _argument(value: Any) -> str:
    """The part of an argument that is compiled into the kernel; the launch passes the rest."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.data_ptr() % ALIGNMENT == 0}"
    if value is None or isinstance(value, bool | float):
        return repr(value) if value is None else type(value).__name__
    if isinstance(value, tuple):
        return f"({', '.join(map(_argument, value))})"
    if type(value).__name__ == "constexpr":
        return f"constant {_constant(value)}"
    if isinstance(value, int):
        size = "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
        return "1" if value == 1 else f"{size} {value % ALIGNMENT == 0}"
    if hasattr(value, "block_shape") and isinstance(getattr(value, "base", None), torch.Tensor):
        of_layout = [
            f"{field.name}={value.__dict__[field.name]!r}"
            for field in dataclasses.fields(value)
            if field.name not in ("base", "shape", "strides")
        ]
        return f"{value.base.dtype} {len(value.shape)} {of_layout}"
    raise _Unknown


def _constant(value: Any) -> str:
    """A compile-time value as text that says all of it."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_constant, value))})"
    if isinstance(value, torch.dtype) or type(value).__name__ == "dtype":
        return str(value)
    if type(value).__name__ == "constexpr":
        return _constant(value.value)
    if is_device_code(value):
        return source(value)
    if dataclasses.is_dataclass(value):
        fields = [getattr(value, f.name) for f in dataclasses.fields(value)]
        return f"{type(value).__name__}{_constant(fields)}"
    raise _Unknown


_sources: dict[int, tuple[Any, str]] = {}  # by identity: to hash such a function is to parse it


def name(kernel: Any) -> str:
    """The kernel's name as a person would say it."""
    while not isinstance(kernel.fn, types.FunctionType):  # it tunes itself
        kernel = kernel.fn
    return f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"


def source(kernel: Any) -> str:
    """The name of a function for the GPU and a hash of its text and of all that it uses."""
    if id(kernel) not in _sources:
        texts = sorted(set(_texts(kernel, {})))
        hashed = sha256("\n".join(texts).encode()).hexdigest()
        _sources[id(kernel)] = kernel, f"{name(kernel)} {hashed}"
    return _sources[id(kernel)][1]


def is_device_code(value: Any) -> bool:
    """Whether a value is a function for the GPU, and none that tunes itself."""
    return isinstance(getattr(value, "fn", None), types.FunctionType) and hasattr(value, "src")


def _texts(kernel: Any, seen: dict[int, Any]) -> Iterator[str]:
    """The source of a function for the GPU, of those that it calls, and the values it reads."""
    if id(kernel) in seen:
        return
    seen[id(kernel)] = kernel
    yield kernel.src
    function = kernel.fn
    names = sorted(set(_names(function.__code__)))
    scope = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    for name in names:
        if name not in scope:
            continue
        value = scope[name]
        if isinstance(value, types.ModuleType):  # what of it is used is an attribute's name
            used = {n: vars(value)[n] for n in names if n in vars(value)}
        else:
            used = {name: value}
        for what, one in used.items():
            yield from _used(what, one, seen)


def _used(name: str, value: Any, seen: dict[int, Any]) -> Iterator[str]:
    if is_device_code(value):
        if not value.fn.__module__.startswith("triton."):  # known by its version
            yield from _texts(value, seen)
    elif isinstance(value, type):
        if not value.__module__.startswith(("triton.", "builtins")):
            for method in vars(value).values():
                yield from _used(name, method, seen)
    else:
        try:
            yield f"{name} = {_constant(value)}"
        except _Unknown:
            return


def _names(code: types.CodeType) -> Iterator[str]:
    """Every global and attribute that a function's code names."""
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
