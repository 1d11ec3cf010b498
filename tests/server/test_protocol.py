"""Infer requests and responses without a server; lies of every kind by hypothesis."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella.core.errors import InputError, ServeError
from tessella.server import Limits
from tessella.server.protocol import InferRequest, parse_infer, signature
from tessella.server.responses import build_infer
from tests.support.engines import Pair, Scores

LIMITS = Limits()
FLOWERS = signature(Scores().inputs, Scores().outputs, Scores().labels, Scores().preprocess)
PAIR = signature(Pair().inputs, Pair().outputs, (), None)
IMAGE = np.arange(192, dtype=np.float32).reshape(1, 3, 8, 8)


def tensor(**changes: Any) -> dict[str, Any]:
    """A correct JSON tensor for flowers, with changes; None leaves a field out."""
    fields = {
        "name": "image",
        "datatype": "FP32",
        "shape": [1, 3, 8, 8],
        "data": IMAGE.ravel().tolist(),
        **changes,
    }
    return {k: v for k, v in fields.items() if v is not None}


def binary_tensor(nbytes: Any = 768, **changes: Any) -> dict[str, Any]:
    return tensor(data=None, parameters={"binary_data_size": nbytes}, **changes)


def parse_json(document: Any, model: Any = FLOWERS) -> InferRequest:
    return parse_infer(json.dumps(document).encode(), None, model, LIMITS)


def parse_binary(document: Any, tail: bytes, model: Any = FLOWERS) -> InferRequest:
    text = json.dumps(document).encode()
    return parse_infer(text + tail, str(len(text)).encode(), model, LIMITS)


def test_flat_nested_and_binary_are_the_same_tensor() -> None:
    flat = parse_json({"inputs": [tensor()]})
    nested = parse_json({"inputs": [tensor(data=IMAGE.tolist())]})
    binary = parse_binary({"inputs": [binary_tensor()]}, IMAGE.tobytes())
    raw = parse_infer(IMAGE.tobytes(), b"0", FLOWERS, LIMITS)
    for request in (flat, nested, binary, raw):
        assert (request.arrays["image"] == IMAGE).all()
    assert [o.binary for o in flat.outputs + binary.outputs] == [False, False]
    assert [o.binary for o in raw.outputs] == [True]


@pytest.mark.parametrize(
    ("document", "what"),
    [
        ([], "not a JSON object"),
        ({}, "does not give the model's inputs"),
        ({"inputs": {}}, "not a list of objects"),
        ({"inputs": [1]}, "not a list of objects"),
        ({"inputs": [{}]}, "need names"),
        ({"inputs": [tensor(), tensor()]}, "each once"),
        ({"inputs": [tensor(name="picture")]}, "send image: float32"),
        ({"inputs": [tensor(), tensor(name="b")]}, "does not give the model's inputs"),
        ({"inputs": [tensor(shape=None)]}, "impossible shape"),
        ({"inputs": [tensor(shape=[-1, 3, 8, 8])]}, "impossible shape"),
        ({"inputs": [tensor(shape=[0, 3, 8, 8])]}, "impossible shape"),
        ({"inputs": [tensor(shape=[1, 3, 64])]}, "wrong shape"),
        ({"inputs": [tensor(shape=[192])]}, "wrong shape"),
        ({"inputs": [tensor(shape=[2, 3, 8, 8])]}, "promises"),
        ({"inputs": [tensor(shape=[2**62, 3, 8, 8])]}, "too large"),
        ({"inputs": [tensor(datatype=None)]}, "unknown datatype"),
        ({"inputs": [tensor(datatype="float32")]}, "unknown datatype"),
        ({"inputs": [tensor(datatype=["FP32"])]}, "unknown datatype"),
        ({"inputs": [tensor(datatype="FP64")]}, "wrong element type"),
        ({"inputs": [tensor(data=None)]}, "no list"),
        ({"inputs": [tensor(parameters=[])]}, "not an object"),
        ({"inputs": [tensor()], "parameters": 1}, "not an object"),
        ({"inputs": [tensor()], "id": 7}, "id is not a string"),
        ({"inputs": [tensor()], "outputs": [{"name": "x"}]}, "no output"),
        ({"inputs": [tensor()], "outputs": [{"name": "scores"}] * 2}, "each once"),
        ({"inputs": [tensor()], "parameters": {"binary_data_output": "yes"}}, "true or false"),
        (
            {
                "inputs": [tensor()],
                "outputs": [{"name": "scores", "parameters": {"classification": "3"}}],
            },
            "number of classes",
        ),
        ({"inputs": [tensor(datatype="BYTES", shape=[1, 3])]}, "wrong shape"),
        ({"inputs": [tensor(datatype="BYTES", shape=[1], data=["%%%"])]}, "not base64"),
        ({"inputs": [tensor(datatype="BYTES", shape=[1], data=[5])]}, "not base64"),
        ({"inputs": [tensor(datatype="BYTES", shape=[10**7])]}, "too large"),
    ],
)
def test_what_does_not_fit_is_told(document: Any, what: str) -> None:
    with pytest.raises(InputError, match=what):
        parse_json(document)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"null",
        b"\xff\xfe",
        b'{"inputs": [NaN]}',
        b'{"inputs": [Infinity]}',
        b'{"inputs": [], "inputs": []}',
        b"[" * 200_000,
        b'{"inputs":' * 50_000,
        b"9" * 10_000,
        b'{"id": "\\ud800"}',
    ],
)
def test_what_is_not_json_is_told(text: bytes) -> None:
    with pytest.raises(InputError):
        parse_infer(text, None, FLOWERS, LIMITS)


def test_large_json_has_to_come_as_binary() -> None:
    text = json.dumps({"inputs": [tensor()]}).encode()
    with pytest.raises(InputError, match="as binary data"):
        parse_infer(text, None, FLOWERS, Limits(json_bytes=len(text) - 1))
    parse_infer(text, None, FLOWERS, Limits(json_bytes=len(text)))


@pytest.mark.parametrize(
    "length",
    [b"-1", b"+5", b"1.0", b"0x10", b"", b" 7", b"1e3", b"99999", b"9" * 40, "٣".encode()],
)
def test_a_lying_header_length(length: bytes) -> None:
    body = json.dumps({"inputs": [binary_tensor()]}).encode() + IMAGE.tobytes()
    with pytest.raises(InputError):
        parse_infer(body, length, FLOWERS, LIMITS)


@pytest.mark.parametrize("nbytes", [-1, 0, 767, 769, 2**63, 768.0, "768", None, True, [768]])
def test_a_lying_binary_size(nbytes: Any) -> None:
    with pytest.raises(InputError):
        parse_binary({"inputs": [binary_tensor(nbytes)]}, IMAGE.tobytes())


def test_bytes_and_data_for_one_tensor() -> None:
    both = tensor(parameters={"binary_data_size": 768})
    with pytest.raises(InputError, match="data in the JSON too"):
        parse_binary({"inputs": [both]}, IMAGE.tobytes())


def test_bytes_that_belong_to_nobody() -> None:
    with pytest.raises(InputError, match="4 bytes after the last"):
        parse_binary({"inputs": [binary_tensor()]}, IMAGE.tobytes() + b"1234")


def test_different_batches() -> None:
    a = {"name": "a", "datatype": "FP32", "shape": [1, 2, 3], "data": [0] * 6}
    b = {"name": "b", "datatype": "INT32", "shape": [2, 2, 3], "data": [0] * 12}
    with pytest.raises(InputError, match="different batch sizes"):
        parse_json({"inputs": [a, b]}, PAIR)


def test_what_is_not_supported_says_so() -> None:
    for document in (
        {"inputs": [tensor()], "parameters": {"sequence_id": 5}},
        {"inputs": [tensor(parameters={"shared_memory_region": "x"})]},
        {
            "inputs": [tensor()],
            "outputs": [{"name": "scores", "parameters": {"shared_memory_region": "x"}}],
        },
    ):
        with pytest.raises(ServeError, match=r"not supported|no shared memory") as caught:
            parse_json(document)
        assert caught.value.status == 501


def test_raw_bodies() -> None:
    for body in (b"", b"1", IMAGE.tobytes()[:-1], IMAGE.tobytes() + b"1"):
        with pytest.raises(InputError, match="wrong number of bytes"):
            parse_infer(body, b"0", FLOWERS, LIMITS)
    with pytest.raises(InputError, match="one input"):
        parse_infer(b"1234", b"0", PAIR, LIMITS)


def test_images_as_base64_and_as_bytes() -> None:
    files = [b"first", b"second"]
    text = [base64.b64encode(f).decode() for f in files]
    as_json = parse_json({"inputs": [tensor(datatype="BYTES", shape=[2], data=text)]})
    assert as_json.images == {"image": files}
    tail = b"".join(struct.pack("<I", len(f)) + f for f in files)
    entry = binary_tensor(len(tail), datatype="BYTES", shape=[2, 1])
    assert parse_binary({"inputs": [entry]}, tail).images == {"image": files}
    entry = {"name": "a", "datatype": "BYTES", "shape": [1], "data": ["aaaa"]}
    other = {"name": "b", "datatype": "INT32", "shape": [1, 2, 3], "data": [0] * 6}
    with pytest.raises(InputError, match="no encoded images"):
        parse_json({"inputs": [entry, other]}, PAIR)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@settings(max_examples=150)
@given(
    field=st.sampled_from(["name", "datatype", "shape", "data", "parameters"]),
    value=JSON,
    tail=st.binary(max_size=40),
    binary=st.booleans(),
)
def test_any_json_in_any_field_is_an_error_or_the_right_request(
    field: str, value: Any, tail: bytes, binary: bool
) -> None:
    entry = {**(binary_tensor() if binary else tensor()), field: value}
    content = (IMAGE.tobytes() if binary else b"") + tail
    try:
        request = parse_binary({"inputs": [entry]}, content)
    except (InputError, ServeError):
        return
    assert (request.arrays["image"] == IMAGE).all()
    assert not tail


@settings(max_examples=150)
@given(
    header=st.integers(-5, 2000) | st.integers(),
    first=st.integers(-5, 100) | st.integers(),
    second=st.integers(-5, 100) | st.integers(),
    batch=st.integers(-2, 5) | st.integers(),
    nbytes=st.integers(0, 100),
)
def test_lying_sizes_of_two_tensors(
    header: int, first: int, second: int, batch: int, nbytes: int
) -> None:
    """Only the one true combination passes; nothing but our errors comes out of the others."""
    shape = [batch, 2, 3]
    document = {
        "inputs": [
            {"name": "a", "datatype": "FP32", "shape": shape,
             "parameters": {"binary_data_size": first}},
            {"name": "b", "datatype": "INT32", "shape": shape,
             "parameters": {"binary_data_size": second}},
        ]
    }  # fmt: skip
    text = json.dumps(document).encode()
    body = text + bytes(nbytes)
    is_true = header == len(text) and first == second == 24 * batch and nbytes == 48 * batch > 0
    try:
        request = parse_infer(body, str(header).encode(), PAIR, LIMITS)
    except InputError:
        assert not is_true
    else:
        assert is_true
        assert request.arrays["b"].shape == (batch, 2, 3)


@settings(max_examples=150)
@given(body=st.binary(max_size=200), header=st.none() | st.integers(0, 220))
def test_any_bytes_are_refused(body: bytes, header: int | None) -> None:
    with pytest.raises(InputError):
        parse_infer(body, None if header is None else str(header).encode(), FLOWERS, LIMITS)


def test_the_response_in_json_and_binary() -> None:
    outputs = {
        "total": np.arange(6, dtype=np.int32).reshape(1, 2, 3),
        "same": np.arange(6, dtype=np.float32).reshape(1, 2, 3) / 4,
    }
    inputs = [
        {"name": "a", "datatype": "FP32", "shape": [1, 2, 3], "data": [0] * 6},
        {"name": "b", "datatype": "INT32", "shape": [1, 2, 3], "data": [0] * 6},
    ]
    wanted = [{"name": "same", "parameters": {"binary_data": True}}, {"name": "total"}]
    request = parse_json({"id": "", "inputs": inputs, "outputs": wanted}, PAIR)
    response = build_infer(request, outputs, PAIR, name="pair", version="1")
    assert response.json_bytes is not None
    assert json.loads(response.body[: response.json_bytes]) == {
        "model_name": "pair",
        "model_version": "1",
        "id": "",
        "outputs": [
            {"name": "same", "datatype": "FP32", "shape": [1, 2, 3],
             "parameters": {"binary_data_size": 24}},
            {"name": "total", "datatype": "INT32", "shape": [1, 2, 3], "data": [0, 1, 2, 3, 4, 5]},
        ],
    }  # fmt: skip
    assert response.body[response.json_bytes :] == outputs["same"].tobytes()


def test_an_image_input_is_the_one_of_the_record_shape() -> None:
    assert FLOWERS.image_input == "image"
    assert PAIR.image_input is None
    no_match = signature(Pair().inputs, Pair().outputs, (), Scores().preprocess)
    assert no_match.image_input is None
