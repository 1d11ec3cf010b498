"""Tensors on the wire against NumPy, struct and torch; and what no client may say."""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest

from tessella.core.dtype import BY_WIRE, DTYPES
from tessella.core.errors import InputError, ServeError
from tessella.server.tensors import (
    from_binary,
    from_json,
    parse_shape,
    strings_from_binary,
    strings_to_binary,
    to_binary,
    to_json,
)

NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}


@pytest.mark.parametrize("name", DTYPES)
def test_binary_there_and_back(name: str) -> None:
    element = DTYPES[name]
    values = np.array([[0, 1, 0], [1, 1, 0]])
    reference = values.astype(NUMPY.get(name, element.numpy))
    array = from_binary(memoryview(reference.tobytes()), element, (2, 3), name="x")
    assert array.dtype == (np.dtype(element.numpy) if element.numpy else np.float32)
    assert (array.astype(np.float64) == values).all()
    assert to_binary(array, element) == reference.tobytes()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_narrow_floats_round_as_ml_dtypes_does(name: str) -> None:
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    assert to_binary(values, DTYPES[name]) == values.astype(NUMPY[name]).tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_json_there_and_back(name: str) -> None:
    element = DTYPES[name]
    data = [[False, True]] if name == "bool" else [[1, 0]] if "int" in name else [[1.5, -2]]
    array = from_json(data, element, (1, 2), name="x")
    assert array.dtype == (np.dtype(element.numpy) if element.numpy else np.float32)
    assert to_json(array, name="x") == data[0]
    flat = from_json(data[0], element, (1, 2), name="x")
    assert (flat == array).all()


def test_json_floats_are_rounded_as_numpy_does() -> None:
    values = [0.1, 1e-46, 3.4e38, 16777217]
    array = from_json(values, DTYPES["float32"], (4,), name="x")
    assert (array == np.array(values).astype(np.float32)).all()


@pytest.mark.parametrize(
    ("data", "wire", "what"),
    [
        ([1, 2, 3], "FP32", "promises"),
        ([[1, 2], [3]], "FP32", "different lengths"),
        ([[1, 2, 3, 4]], "FP32", "promises"),
        ([[1], [2], [3], [4]], "FP32", "promises"),
        ([[[1, 2], [3, 4]]], "FP32", "promises"),
        ([[1, 2], 3], "FP32", "promises"),
        ([1, 2, 3, "4"], "FP32", "a string"),
        ([1, 2, 3, None], "FP32", "null"),
        ([1, 2, 3, True], "FP32", "true or false"),
        ([1, 2, 3, {}], "FP32", "an object"),
        ([1, 2, 3, [4]], "FP32", "a list"),
        ([1, 2, 3, 1e39], "FP32", "cannot hold"),
        ([1, 2, 3, float("inf")], "FP64", "cannot hold"),
        ([1, 2, 3, 10**400], "FP64", "cannot hold"),
        ([1, 2, 3, 70000], "FP16", "cannot hold"),
        ([1, 2, 3, 4.0], "INT32", "a fraction"),
        ([1, 2, 3, 2**31], "INT32", "cannot hold"),
        ([1, 2, 3, 2**63], "INT64", "cannot hold"),
        ([1, 2, 3, -1], "UINT8", "cannot hold"),
        ([1, 0, 1, 0], "BOOL", "a number"),
        ({"0": 1}, "FP32", "no list"),
        (None, "FP32", "no list"),
        ("AAAA", "FP32", "no list"),
    ],
)
def test_json_that_is_not_the_tensor(data: object, wire: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        from_json(data, BY_WIRE[wire], (2, 2), name="x")


def test_a_thousand_levels_of_lists_are_refused() -> None:
    data: list = [1]
    for _ in range(1000):
        data = [data]
    with pytest.raises(InputError, match="promises"):
        from_json(data, DTYPES["float32"], (1, 1), name="x")


@pytest.mark.parametrize(
    "shape", [None, [], "4", [0], [-1, 3], [1.0], [True], [[1]], ["1"], [1] * 17, {"0": 1}, 4]
)
def test_impossible_shapes(shape: object) -> None:
    with pytest.raises(InputError, match="impossible shape"):
        parse_shape(shape, name="x")


def test_binary_of_another_size_is_refused_before_anything_is_made() -> None:
    for content, shape in [(b"12345678", (1,)), (b"123", (1,)), (b"", (2**40, 2**40))]:
        with pytest.raises(InputError, match="wrong number of bytes"):
            from_binary(memoryview(content), DTYPES["float32"], shape, name="x")
    with pytest.raises(InputError, match="neither 0 nor 1"):
        from_binary(memoryview(b"\x01\x02"), DTYPES["bool"], (2,), name="x")


def test_strings_there_and_back() -> None:
    strings = [b"", b"abc", bytes(range(256))]
    content = strings_to_binary(strings)
    assert content == b"".join(struct.pack("<I", len(s)) + s for s in strings)
    assert strings_from_binary(memoryview(content), 3, name="x") == strings


@pytest.mark.parametrize("cut", range(1, 12))
def test_cut_strings_are_refused(cut: int) -> None:
    content = strings_to_binary([b"abc", b"abcde"])
    with pytest.raises(InputError, match="BYTES"):
        strings_from_binary(memoryview(content)[:-cut], 2, name="x")


@pytest.mark.parametrize("count", [1, 3, 2**60])
def test_strings_of_another_number_are_refused(count: int) -> None:
    content = strings_to_binary([b"abc", b"abcde"])
    with pytest.raises(InputError, match="BYTES"):
        strings_from_binary(memoryview(content), count, name="x")


def test_nan_has_no_json() -> None:
    with pytest.raises(ServeError, match="NaN") as caught:
        to_json(np.array([1.0, np.nan]), name="y")
    assert caught.value.status == 500
