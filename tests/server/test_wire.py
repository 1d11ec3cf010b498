"""Fields and numbers of a message are counted as protobuf's own parser finds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessella.core.errors import InputError
from tessella.core.open_inference import ModelInferRequest
from tessella.server import wire
from tessella.server.grpc_messages import parsed


def request(seed: int) -> Any:
    """A message with all that one may have, and large enough to be looked at."""
    random = np.random.default_rng(seed)
    message = ModelInferRequest(model_name="flowers", id="1", raw_input_contents=[bytes(100_000)])
    message.parameters["priority"].int64_param = -1
    for name in "abc"[: int(random.integers(1, 4))]:
        tensor = message.inputs.add(name=name, datatype="FP32", shape=[1, -1, 1 << 40])
        tensor.parameters["binary_data_size"].int64_param = 1 << 33
        tensor.contents.fp32_contents.extend(random.normal(size=50))
        tensor.contents.int64_contents.extend(random.integers(-9, 9, 7).tolist())
        tensor.contents.bytes_contents.extend([b"", b"cat"])
    message.outputs.add(name="scores").parameters["classification"].string_param = "5"
    return message


def fields_of(message: Any) -> int:
    """As they come on the wire: what is repeated but not packed one by one."""
    count = 0
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            # a key and a value for each entry
            count += sum(3 + fields_of(value[key]) for key in value)
        elif field.message_type is not None:
            count += sum(1 + fields_of(v) for v in (value if field.is_repeated else [value]))
        elif field.is_repeated and field.type in (field.TYPE_BYTES, field.TYPE_STRING):
            count += len(value)
        else:
            count += 1
    return count


@pytest.mark.parametrize("seed", range(4))
def test_as_many_fields_as_protobuf_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    message = request(seed)
    content = message.SerializeToString()
    monkeypatch.setattr(wire, "MOST_FIELDS", fields_of(message))
    assert parsed(ModelInferRequest, content) == message
    monkeypatch.setattr(wire, "MOST_FIELDS", fields_of(message) - 1)
    with pytest.raises(InputError, match="too many parts"):
        parsed(ModelInferRequest, content)


def nested(*numbers: int, content: bytes) -> bytes:
    for number in reversed(numbers):
        size = len(content)
        length = bytes((size >> shift & 127) | 128 for shift in (0, 7, 14, 21)) + b"\0"
        content = bytes((number << 3 | 2,)) + length + content
    return content


MUCH = {
    "inputs": b"\x2a\x00" * 4_000_000,
    "raw inputs": b"\x3a\x00" * 4_000_000,
    "parameters": b"\x22\x00" * 4_000_000,
    "strings": nested(5, 5, content=b"\x42\x00" * 4_000_000),
    "numbers one by one": nested(5, 5, content=b"\x10\x01" * 4_000_000),
    "packed numbers": nested(5, 5, 2, content=bytes(8_000_000)),
    "sizes": nested(5, 3, content=bytes(8_000_000)),
    "what nobody knows": b"\x78\x01" * 4_000_000,
    "groups": b"\x7b\x7c" * 4_000_000,
    "a field that ends behind the message": b"\x2a\xff\xff\xff\x7f" + bytes(70_000),
}


class Unparsed:
    """A message that nobody may parse."""

    DESCRIPTOR = ModelInferRequest.DESCRIPTOR

    @staticmethod
    def FromString(content: bytes) -> Any:
        raise AssertionError(f"{len(content)} bytes were parsed")


@pytest.mark.parametrize("kind", MUCH)
def test_much_of_little_is_refused_before_it_is_parsed(kind: str) -> None:
    with pytest.raises(InputError):
        parsed(Unparsed, MUCH[kind])


def test_a_negative_number_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    message = request(0)
    message.inputs[0].contents.int64_contents.extend([-1] * 2000)
    monkeypatch.setattr(wire, "MOST_NUMBERS", 2200)
    assert parsed(ModelInferRequest, message.SerializeToString()) == message
