"""Triton's interpreter, without work whose result it throws away or computes again at each step.

Interpreted kernels spend most of their time around NumPy, not in it. What they compute, and what
is refused, stays the same; another version of Triton is left as it is.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton._utils import validate_block_shape
from triton.runtime import interpreter

KNOWN = "3.9."  # the versions whose functions are replaced here


def quicken() -> None:
    """Replace what is slow of the interpreter in this process."""
    if not triton.__version__.startswith(KNOWN):
        return
    # The check for overflow ends in device_assert, which does nothing unless ``debug`` is set.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _numpy_dtype
    interpreter._patch_lang = _patch_language
    tl.block_type.__init__ = _init_block
    tl.tensor.__init__ = _init_tensor


# --- element types: a table for each question, before ---------------------------------------------

_DTYPES = {
    "int1": "bool", "fp16": "float16", "fp32": "float32", "fp64": "float64",
    **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "bf16": "uint16",
    **dict.fromkeys(("fp8e5", "fp8e5b16", "fp8e4nv", "fp8e4b8", "fp8e4b15"), "uint8"),
}  # fmt: skip
_NUMPY = {name: np.dtype(numpy) for name, numpy in _DTYPES.items()}
_ADDRESS = np.dtype(np.uint64)


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    scalar = dtype.scalar
    return _ADDRESS if scalar.is_ptr() else _NUMPY[scalar.name]


# --- the language: patched again for each function that a kernel calls, before --------------------

_patch_all = interpreter._patch_lang
_patched: set[int] = set()  # the modules that are, while a kernel runs


class _Scope(interpreter._LangPatchScope):
    """What a launch patched; at its end, the language is as it was."""

    def restore(self) -> None:
        super().restore()
        _patched.clear()


def _patch_language(fn: Any) -> Any:
    wanted = {id(v) for v in fn.__globals__.values() if v is tl or v is tl.core}
    if wanted and wanted <= _patched:
        return interpreter._LangPatchScope()
    made = _patch_all(fn)
    scope = _Scope()
    scope._changes = made._changes
    _patched.update(wanted)
    return scope


# --- shapes: checked and written down anew for each value, before ---------------------------------


@functools.cache
def _shapes(sizes: tuple[int, ...]) -> tuple[Any, int, str]:
    """Of a block: its shape, which must be one that Triton takes, how many values, in words."""
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    shape = tl.tuple(sizes)
    return shape, validate_block_shape(sizes), str(shape)


@functools.cache
def _constants(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """Of a tensor: its shape, and how many values, as constants of the language."""
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _init_block(self: Any, element_ty: Any, shape: Any) -> None:
    assert isinstance(shape, (list, tuple, tl.tuple))
    sizes = tuple(s.value if isinstance(s, tl.constexpr) else s for s in shape)
    self.element_ty = element_ty
    self.shape, self.numel, words = _shapes(sizes)
    self.name = f"<{words}, {element_ty}>"


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _constants(tuple(type.shape.values) if type.is_block() else ())
