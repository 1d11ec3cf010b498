"""Between gRPC's messages and the bodies of the same requests over HTTP.

Every request of gRPC is answered by the routes of HTTP: one core, one set of checks and limits.
``Messages`` puts them together from what comes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from tessella.core.dtype import BY_WIRE
from tessella.core.errors import InputError
from tessella.core.open_inference import MESSAGES, ModelInferRequest, ModelInferResponse
from tessella.server.body import BodyReader, too_large
from tessella.server.tensors import strings_to_binary
from tessella.server.wire import require_few

_COMPACT = json.JSONEncoder(separators=(",", ":"), allow_nan=False)

# The field of ``contents`` in which the elements of a datatype come.
_CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents",
    "INT32": "int_contents", "INT64": "int64_contents", "UINT8": "uint_contents",
    "UINT16": "uint_contents", "UINT32": "uint_contents", "UINT64": "uint64_contents",
    "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip


def parsed(message: Any, content: bytes) -> Any:
    """A message of this class.

    Raises:
        InputError: the bytes are none, or it has more parts than one may have.
    """
    require_few(content, message)
    try:
        return message.FromString(content)
    except DecodeError as error:
        raise InputError(
            f"the request is no {message.DESCRIPTOR.name}", seen=f"{len(content):,} bytes"
        ) from error


SMALL_BYTES = 4096  # parts of a message that are put together at once: each object takes 200 bytes
PREFIX = struct.Struct(">BL")  # of a message: whether it is compressed, and its size
_RAW_INPUT, _RAW_OUTPUT = 7 << 3 | 2, 6 << 3 | 2  # how these fields begin
MOST_FIELDS_BYTES = 2048  # of a message that is remembered
MOST_PARTS = 64  # tensors of one


def cut(content: memoryview) -> tuple[bytes, list[memoryview]] | None:
    """The bytes of a ``ModelInferRequest`` before its ``raw_input_contents``, and these; None where
    they are not the last of it, or the message is none.
    """
    position, size = 0, len(content)
    parts: list[memoryview] = []
    fields = size
    while position < size:
        tag = content[position]
        if tag & 7 != 2 or tag > 127 or (parts and tag != _RAW_INPUT):
            return None
        if len(parts) == MOST_PARTS or (not parts and position > MOST_FIELDS_BYTES):
            return None
        length, shift = 0, 0
        start = position + 1
        while True:
            if start >= size or shift > 28:
                return None
            byte = content[start]
            length |= (byte & 127) << shift
            start, shift = start + 1, shift + 7
            if byte < 128:
                break
        if start + length > size:
            return None
        if tag == _RAW_INPUT:
            fields = position if not parts else fields
            parts.append(content[start : start + length])
        position = start + length
    if fields > MOST_FIELDS_BYTES:
        return None
    return bytes(content[:fields]), parts


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a ``ModelInferRequest`` says but for its tensors' bytes.

    Attributes:
        version: None is whichever there is.
        text: the JSON of the same request over HTTP.
    """

    name: str
    version: str | None
    text: bytes


def known_message(content: memoryview, parts: Sequence[memoryview]) -> Known | None:
    """What a message says; None if it is another each time, or has tensors elsewhere.

    Raises:
        InputError: as ``parsed`` and ``infer_body``.
    """
    message = parsed(ModelInferRequest, bytes(content))
    if message.id:
        return None
    json_bytes, body = infer_body(message, None)
    if len(body) - json_bytes != sum(map(len, parts)):  # they came in ``contents``
        return None
    version = message.model_version or None
    return Known(name=message.model_name, version=version, text=body[:json_bytes])


def answer_of(fields: bytes, tensors: Sequence[bytes]) -> bytes:
    """A ``ModelInferResponse`` of fields that are known, and ``raw_output_contents``."""
    parts = [fields]
    for tensor in tensors:
        head, length = bytearray((_RAW_OUTPUT,)), len(tensor)
        while length > 127:
            head.append(length & 127 | 128)
            length >>= 7
        head.append(length)
        parts += (bytes(head), tensor)
    return b"".join(parts)


def infer_body(message: Any, remaining_us: int | None) -> tuple[int, bytes]:
    """The length of the JSON, and a body for ``/infer``.

    Args:
        message: a ``ModelInferRequest``.
        remaining_us: until the deadline of the call.

    Raises:
        InputError: tensors that are given twice, or not as their datatype wants it.
    """
    raw = message.raw_input_contents
    inputs: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for tensor in message.inputs:
        entry = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        parameters = _plain(tensor.parameters)
        if "shared_memory_region" not in parameters:
            part = _content(tensor, raw, len(parts))
            parameters["binary_data_size"] = len(part)
            parts.append(part)
        inputs.append(entry | {"parameters": parameters})
    if raw and len(raw) != len(parts):
        raise InputError(
            "raw_input_contents are not one for each input",
            seen=f"{len(raw)} for {len(parts)}",
            fix="append the bytes of each input that is not in shared memory, in their order",
        )
    parameters = _plain(message.parameters) | {"binary_data_output": True}
    document: dict[str, Any] = {"parameters": parameters, "inputs": inputs}
    if message.outputs:
        document["outputs"] = [
            {"name": o.name, "parameters": _plain(o.parameters)} for o in message.outputs
        ]
    if message.id:
        document["id"] = message.id
    if remaining_us is not None:
        asked = parameters.get("timeout") or remaining_us
        parameters["timeout"] = min(asked, remaining_us) if type(asked) is int else asked
        # Heads without an id are remembered, and each of these is another.
        document.setdefault("id", "")
    text = _COMPACT.encode(document).encode()
    return len(text), b"".join([text, *parts])


def _content(tensor: Any, raw: Any, position: int) -> bytes:
    """The bytes of a tensor, from ``raw_input_contents`` or from its own ``contents``."""
    if raw and tensor.HasField("contents"):
        raise InputError(
            f"input {tensor.name!r} is given twice",
            seen="raw_input_contents and contents",
            fix="send one of them",
        )
    if raw:
        if position >= len(raw):
            raise InputError(f"raw_input_contents end before input {tensor.name!r}")
        part: bytes = raw[position]
        return part
    kind = tensor.datatype
    if kind not in _CONTENTS:
        raise InputError(
            f"input {tensor.name!r} cannot come in contents",
            seen=repr(kind)[:40],
            fix="send it in raw_input_contents",
        )
    values = getattr(tensor.contents, _CONTENTS[kind])
    if sum(len(given) for _, given in tensor.contents.ListFields()) != len(values):
        raise InputError(
            f"input {tensor.name!r} has contents of another datatype",
            fix=f"send {kind} in {_CONTENTS[kind]}",
        )
    if kind == "BYTES":
        return strings_to_binary(list(values))
    element = np.dtype(BY_WIRE[kind].numpy)
    wide = np.array(values, element if element.itemsize > 2 else None)
    if element.itemsize <= 2 and element.kind != "b" and wide.size:
        least, most = np.iinfo(element).min, np.iinfo(element).max
        if wide.min() < least or wide.max() > most:
            raise InputError(f"input {tensor.name!r} holds a number that {kind} cannot hold")
    return wide.astype(element.newbyteorder("<")).tobytes()


def infer_response(body: bytes, json_bytes: int | None) -> Any:
    """The answer of ``/infer`` as a ``ModelInferResponse``."""
    document = json.loads(body[:json_bytes])
    message = ModelInferResponse(
        model_name=document["model_name"],
        model_version=document["model_version"],
        id=document.get("id", ""),
    )
    start = json_bytes or 0
    for entry in document["outputs"]:
        tensor = message.outputs.add(
            name=entry["name"], datatype=entry["datatype"], shape=entry["shape"]
        )
        parameters = entry.get("parameters", {})
        nbytes = parameters.pop("binary_data_size", None)
        _fill(tensor.parameters, parameters)
        # One for each output, as clients count them; empty where the tensor is in shared memory.
        message.raw_output_contents.append(body[start : start + (nbytes or 0)])
        start += nbytes or 0
    labels = document.get("parameters", {}).get("labels", [])
    if labels:
        message.parameters["labels"].string_param = json.dumps(labels)
    return message


def _plain(parameters: Any) -> dict[str, Any]:
    """The parameters of a message as those of JSON."""
    return {
        name: getattr(value, kind)
        for name, value in parameters.items()
        if (kind := value.WhichOneof("parameter_choice"))
    }


def _fill(parameters: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        kind = "int64_param" if type(value) is int else "string_param"
        setattr(parameters[name], kind, value)


# grpc.health.v1's HealthCheckResponse: field 1 is 1 for SERVING, 2 for NOT_SERVING.
HEALTH = {True: b"\x08\x01", False: b"\x08\x02"}


def change_body(message: Any) -> bytes:
    """The body of a request that loads or unloads a model."""
    names = dict.fromkeys(message.parameters, "")
    return _COMPACT.encode({"parameters": names}).encode()


def answered(name: str, document: dict[str, Any]) -> Any:
    """A message of this name that says what an answer over HTTP says."""
    return json_format.ParseDict(document, MESSAGES[name](), ignore_unknown_fields=True)


class Messages:
    """The messages of a call, put together from parts, whose bytes are counted as held."""

    __slots__ = ("_at", "_bodies", "_held", "_is_stream", "_most", "_needed", "_parts", "_size")

    def __init__(self, bodies: BodyReader, most_bytes: int, *, is_stream: bool) -> None:
        self._bodies, self._most, self._is_stream = bodies, most_bytes, is_stream
        self._parts: list[memoryview | bytes | bytearray] = []
        self._at = 0  # where in the first part the next message begins
        self._size = self._held = 0  # behind that, and of all that was not released
        self._needed: int | None = None  # bytes of the first message, with its prefix

    @property
    def is_partial(self) -> bool:
        return self._size > 0

    def take(self, chunk: memoryview) -> None:
        """Add what has come.

        Raises:
            ServeError: 413, a message larger than any may be; 503, the server holds what it may.
            InputError: this begins no message.
        """
        size = len(chunk)
        self._bodies.hold(size)
        self._held += size
        self._size += size
        last = self._parts[-1] if self._parts else None
        if size >= SMALL_BYTES:
            # A part of much that is passed over would keep all of it.
            is_most = 4 * size >= len(chunk.obj)  # type: ignore[arg-type]
            self._parts.append(chunk if is_most else bytes(chunk))
        elif isinstance(last, bytearray):
            last += chunk
        else:
            self._parts.append(bytearray(chunk))
        self._begin()
        if not self._is_stream and self._needed is not None and self._size > self._needed:
            raise _not_one(self._size)

    def _begin(self) -> None:
        """Read a message's prefix, once it is there."""
        if self._needed is not None or self._size < PREFIX.size:
            return
        if len(self._parts[0]) - self._at < PREFIX.size:
            self._join()
        flag, size = PREFIX.unpack_from(self._parts[0], self._at)
        if flag > 1:
            raise InputError("a message begins with neither 0 nor 1", seen=flag)
        if size > self._most:
            raise too_large(size, self._most)
        self._needed = PREFIX.size + size

    def _join(self) -> None:
        first, *others = self._parts
        self._parts, self._at = [b"".join((memoryview(first)[self._at :], *others))], 0

    def only(self) -> tuple[bool, memoryview]:
        """Whether it is compressed, and the one message that there is.

        Raises:
            InputError: there is none, or more.
        """
        if self._needed is None or self._size != self._needed:
            raise _not_one(self._size)
        if len(self._parts) > 1:
            self._join()
        whole = self._parts[0]
        return whole[0] == 1, memoryview(whole)[PREFIX.size :]

    def next(self) -> tuple[bool, memoryview] | None:
        """As ``only``, of a stream: the next message that is complete. It is held till ``release``.

        Raises:
            InputError, ServeError: as ``take``, of the one behind it.
        """
        if self._needed is None or self._size < self._needed:
            return None
        first = self._parts[0]
        if len(first) - self._at < self._needed or isinstance(first, bytearray):
            self._join()  # a bytearray cannot grow while somebody looks at it
        message = memoryview(self._parts[0])[self._at : self._at + self._needed]
        self._at += self._needed
        self._size -= self._needed
        self._needed = None
        if self._at == len(self._parts[0]):
            self._parts.pop(0)
            self._at = 0
        self._begin()
        return message[0] == 1, message[PREFIX.size :]

    def release(self, message: memoryview) -> None:
        """Hold a message of a stream no more."""
        self._release(min(self._held, PREFIX.size + len(message)))

    def drop(self) -> None:
        """Hold nothing any more."""
        self._parts.clear()
        self._release(self._held)

    def _release(self, nbytes: int) -> None:
        self._bodies.held_bytes -= nbytes
        self._held -= nbytes


def _not_one(nbytes: int) -> InputError:
    if not nbytes:
        return InputError("there is no message")
    return InputError("there is not just one message", seen=f"{nbytes:,} bytes")
