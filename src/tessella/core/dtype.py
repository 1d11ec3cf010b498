"""The element types, by torch's names, with their size and their name on the wire.

Names are torch's (``getattr(torch, name)``); ``wire`` is the Open Inference Protocol's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tessella.core.errors import UsageError

Math = Literal["ieee", "tf32"]  # how float32 products may be rounded


@dataclass(frozen=True, kw_only=True)
class DType:
    name: str
    itemsize: int
    wire: str
    numpy: str | None  # None where NumPy has no such type


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType(name="float64", itemsize=8, wire="FP64", numpy="float64"),
        DType(name="float32", itemsize=4, wire="FP32", numpy="float32"),
        DType(name="float16", itemsize=2, wire="FP16", numpy="float16"),
        DType(name="bfloat16", itemsize=2, wire="BF16", numpy=None),
        DType(name="float8_e4m3fn", itemsize=1, wire="FP8", numpy=None),
        DType(name="int64", itemsize=8, wire="INT64", numpy="int64"),
        DType(name="int32", itemsize=4, wire="INT32", numpy="int32"),
        DType(name="int16", itemsize=2, wire="INT16", numpy="int16"),
        DType(name="int8", itemsize=1, wire="INT8", numpy="int8"),
        DType(name="uint64", itemsize=8, wire="UINT64", numpy="uint64"),
        DType(name="uint32", itemsize=4, wire="UINT32", numpy="uint32"),
        DType(name="uint16", itemsize=2, wire="UINT16", numpy="uint16"),
        DType(name="uint8", itemsize=1, wire="UINT8", numpy="uint8"),
        DType(name="bool", itemsize=1, wire="BOOL", numpy="bool"),
    )
}

FLOATS = ("float32", "float16", "bfloat16")  # what kernels read, round and sum in float32
SIXTEEN_BIT = ("float16", "bfloat16")
FP8 = ("float8_e4m3fn", "float8_e5m2")

BY_WIRE: dict[str, DType] = {d.wire: d for d in DTYPES.values()}

QUANTIZED = ("int8", "float8_e4m3fn")  # the types of quantized values that layers multiply

# What a user writes as ``precision=``, and the element type of the activations it means: for int8
# and fp8 of those between layers that are worth it, by calibration.
PRECISIONS: dict[str, str] = {
    "fp32": "float32",
    "tf32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "int8": "int8",
    "fp8": "float8_e4m3fn",
}

# Behind the precision of a single layer: its weight is made 2:4 sparse, as in ``int8+2:4``.
SPARSE = "+2:4"


def plain_precision(precision: str) -> str:
    """The precision without ``SPARSE``.

    >>> plain_precision("int8+2:4")
    'int8'
    """
    return precision.removesuffix(SPARSE)


def dtype(name: str) -> DType:
    """The element type called ``name``; raises ``UsageError`` with the known names."""
    if name not in DTYPES:
        raise UsageError("unknown element type", seen=name, fix=f"use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(torchs: object) -> str:
    """The name here of one of torch's element types, without importing torch."""
    return str(torchs).removeprefix("torch.")
