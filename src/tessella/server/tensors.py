"""Tensors on the wire, raw little-endian bytes or JSON numbers, to NumPy arrays and back.

The declared shape and type of a tensor are checked against its bytes before any array is made.
Element types that NumPy lacks (BF16, FP8) are float32 on the NumPy side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch

from tessella.core.dtype import DTYPES, DType, dtype, dtype_name
from tessella.core.errors import InputError, ServeError
from tessella.runtime import Engine

MAX_RANK = 16
# By name: to hash a row of ``DTYPES`` takes 1 µs, which a small request had twice.
_LITTLE_ENDIAN = {
    known.name: np.dtype(known.numpy).newbyteorder("<") for known in DTYPES.values() if known.numpy
}


def parse_shape(shape: Any, *, name: str) -> tuple[int, ...]:
    """A shape of positive integers; the batch is its first."""
    fits = isinstance(shape, list) and 1 <= len(shape) <= MAX_RANK
    if not fits or not all(type(d) is int and d >= 1 for d in shape):
        raise InputError(
            f"tensor {name!r} has an impossible shape",
            seen=repr(shape)[:80],
            fix="send a list of positive integers, the batch first",
        )
    return tuple(shape)


def narrow(array: np.ndarray, dtype: DType) -> torch.Tensor:
    """A contiguous array as a tensor of an element type that NumPy may lack."""
    return torch.from_numpy(array).to(getattr(torch, dtype.name))


def widen(tensor: torch.Tensor) -> np.ndarray:
    """A tensor on the CPU as an array; element types that NumPy lacks become float32, exactly."""
    known = DTYPES[dtype_name(tensor.dtype)].numpy is not None
    return (tensor if known else tensor.float()).numpy()


# --- binary -------------------------------------------------------------------------------------


def from_binary(
    content: memoryview, dtype: DType, shape: tuple[int, ...], *, name: str
) -> np.ndarray:
    """The array in row-major little-endian bytes. May be read-only and share the body's memory."""
    expected = math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        raise InputError(
            f"tensor {name!r} has the wrong number of bytes",
            seen=f"{len(content):,} bytes for {dtype.wire} {list(shape)}",
            fix=f"send {expected:,} bytes, or correct the shape",
        )
    if dtype.numpy is None:
        raw = torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype.name))
        return widen(raw).reshape(shape)
    if dtype.name == "bool":
        flags = np.frombuffer(content, np.uint8)
        if flags.size and flags.max() > 1:
            raise InputError(
                f"tensor {name!r} has a BOOL that is neither 0 nor 1", seen=int(flags.max())
            )
        return flags.view(np.bool_).reshape(shape)
    return np.ndarray(shape, _LITTLE_ENDIAN[dtype.name], content)


def as_it_comes(dtype: DType) -> np.dtype | None:
    """The type of arrays that ``from_binary`` makes of any bytes of the right number, where it need
    not look at them.
    """
    return None if dtype.numpy is None or dtype.name == "bool" else _LITTLE_ENDIAN[dtype.name]


def to_binary(array: np.ndarray, dtype: DType) -> bytes:
    """Row-major little-endian bytes of an output."""
    if dtype.numpy is None:
        return narrow(np.ascontiguousarray(array), dtype).view(torch.uint8).numpy().tobytes()
    return array.astype(_LITTLE_ENDIAN[dtype.name], copy=False).tobytes()


def strings_from_binary(content: memoryview, count: int, *, name: str) -> list[bytes]:
    """The elements of a BYTES tensor: each a 4-byte length and that many bytes."""
    strings: list[bytes] = []
    position = 0
    while position < len(content):
        start = position + 4
        end = start + int.from_bytes(content[position:start], "little")
        if start > len(content) or end > len(content) or len(strings) == count:
            break
        strings.append(bytes(content[start:end]))
        position = end
    if position != len(content) or len(strings) != count:
        raise InputError(
            f"tensor {name!r} does not hold the BYTES that its shape promises",
            seen=f"{len(strings)} complete elements in {len(content):,} bytes, shape for {count}",
            fix="send each element as its length (4 bytes, little-endian) and its bytes",
        )
    return strings


def strings_to_binary(strings: list[bytes]) -> bytes:
    return b"".join(len(s).to_bytes(4, "little") + s for s in strings)


# --- JSON ---------------------------------------------------------------------------------------


def from_json(data: Any, dtype: DType, shape: tuple[int, ...], *, name: str) -> np.ndarray:
    """The array in a JSON list, flat in row-major order or nested as its shape says."""
    values = flatten(data, shape, name=name)
    is_float = dtype.name.startswith(("float", "bfloat"))
    is_bool = dtype.name == "bool"
    allowed = {int, float} if is_float else {bool} if is_bool else {int}
    if strange := set(map(type, values)) - allowed:
        raise InputError(
            f"tensor {name!r} holds something that is not {dtype.wire}",
            seen=", ".join(sorted(_JSON_WORDS.get(t, t.__name__) for t in strange)),
            fix="send numbers of the declared datatype",
        )
    try:
        wide = np.array(values, np.float64 if is_float else np.bool_ if is_bool else np.int64)
    except OverflowError as error:
        raise _out_of_range(name, dtype) from error
    if is_float:
        return _narrow_float(wide, dtype, name).reshape(shape)
    if not is_bool:
        range_of = np.iinfo(np.dtype(dtype.numpy))
        if wide.size and not range_of.min <= wide.min() <= wide.max() <= range_of.max:
            raise _out_of_range(name, dtype)
    return wide.astype(dtype.numpy, copy=False).reshape(shape)


_JSON_WORDS = {str: "a string", float: "a fraction", bool: "true or false", type(None): "null",
               list: "a list", dict: "an object", int: "a number"}  # fmt: skip


def _narrow_float(wide: np.ndarray, dtype: DType, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        array = widen(narrow(wide, dtype)) if dtype.numpy is None else wide.astype(dtype.numpy)
    if not np.isfinite(array).all():  # JSON has no infinity, but 1e999 reads as one
        raise _out_of_range(name, dtype)
    return array


def _out_of_range(name: str, dtype: DType) -> InputError:
    return InputError(
        f"tensor {name!r} holds a number that {dtype.wire} cannot hold",
        fix="send smaller numbers or another datatype",
    )


def flatten(data: Any, shape: tuple[int, ...], *, name: str) -> list[Any]:
    """The elements of a list that is flat or nested exactly as ``shape`` says."""
    if not isinstance(data, list):
        raise InputError(f"tensor {name!r} has no list as data", seen=_JSON_WORDS.get(type(data)))
    sizes, level = [len(data)], data
    while len(sizes) <= len(shape) and level and isinstance(level[0], list):
        if not all(isinstance(row, list) for row in level):
            break
        lengths = set(map(len, level))
        if len(lengths) > 1:
            raise InputError(
                f"tensor {name!r} has rows of different lengths", seen=sorted(lengths)[:5]
            )
        sizes.append(lengths.pop())
        level = list(chain.from_iterable(level))
    if tuple(sizes) != shape and not (len(sizes) == 1 and sizes[0] == math.prod(shape)):
        raise InputError(
            f"tensor {name!r} does not hold what its shape promises",
            seen=f"data of shape {sizes}, declared {list(shape)}",
            fix=f"send {math.prod(shape):,} elements, flat or nested like the shape",
        )
    return level


def to_json(array: np.ndarray, *, name: str, status: int = 500) -> list[Any]:
    """The elements as a flat list of JSON numbers.

    Args:
        status: of the error; 500 says that we made the input, 422 that the client did.

    Raises:
        ServeError: NaN or infinity, which JSON cannot say.
    """
    require_finite(array, name=name, status=status)
    return array.ravel().tolist()


def require_finite(array: np.ndarray, *, name: str, status: int = 500) -> None:
    """Refuse an output with NaN or infinity, which JSON cannot say."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ServeError(
            f"output {name!r} holds NaN or infinity, which JSON cannot say",
            status=status,
            fix="ask for binary_data, and look at the input or the model",
        )


def on_numpy(engine: Engine) -> Callable[..., Mapping[str, np.ndarray]]:
    """The engine as a function of NumPy arrays, also with element types that NumPy lacks."""
    if all(dtype(s.dtype).numpy is not None for s in (*engine.inputs, *engine.outputs)):
        return engine
    types = {s.name: dtype(s.dtype) for s in engine.inputs}

    def run(**arrays: np.ndarray) -> dict[str, np.ndarray]:
        tensors = {name: narrow(array, types[name]) for name, array in arrays.items()}
        return {name: widen(tensor) for name, tensor in engine(**tensors).items()}

    return run
