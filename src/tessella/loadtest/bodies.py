"""What is sent: random tensors of a model's inputs as binary data, JSON or gRPC, or a picture."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from tessella.core.dtype import BY_WIRE
from tessella.core.errors import ServeError, UsageError
from tessella.core.open_inference import ModelInferRequest

Kind = Literal["binary", "json", "image", "grpc"]
KINDS: tuple[Kind, ...] = ("binary", "json", "image", "grpc")


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where to send.

    Attributes:
        url: of the server, ``http://HOST:PORT``.
        grpc: ``HOST:PORT`` of its gRPC.
    """

    url: str
    model: str
    token: str | None = field(default=None, repr=False)
    grpc: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}


def body_for(target: Target, kind: Kind, *, batch: int = 1, picture: Path | None = None) -> bytes:
    """A whole request: of HTTP with its head, or gRPC's message.

    Raises:
        ServeError: the server does not answer, or has no such model.
        UsageError: a kind that needs something else.
    """
    if kind == "image":
        if picture is None:
            raise UsageError("an image body needs a file", fix="give --picture FILE")
        verb = _asked(target, "/config")["parameters"]["verb"]["string_value"]
        return _http(target, verb, picture.read_bytes(), ())
    if kind not in KINDS:
        raise UsageError("there is no such body", seen=kind, fix=f"use one of {', '.join(KINDS)}")
    chance = random.Random(0)
    inputs = []
    for spec in _asked(target, "")["inputs"]:
        shape = [batch, *(abs(d) for d in spec["shape"][1:])]
        count = 1
        for size in shape:
            count *= size
        inputs.append((spec["name"], spec["datatype"], shape, count))
    tensors = [_random(chance, kind_of, count) for _, kind_of, _, count in inputs]
    if kind == "grpc":
        message = ModelInferRequest(model_name=target.model, raw_input_contents=tensors)
        for name, datatype, shape, _ in inputs:
            message.inputs.add(name=name, datatype=datatype, shape=shape)
        serialized: bytes = message.SerializeToString()
        return serialized
    entries: list[dict[str, Any]] = [
        {"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape, _ in inputs
    ]
    if kind == "json":
        for entry, (_, _, _, count) in zip(entries, inputs, strict=True):
            is_float = entry["datatype"].startswith(("FP", "BF"))
            entry["data"] = [round(chance.random(), 6) if is_float else 1 for _ in range(count)]
            if entry["datatype"] == "BOOL":
                entry["data"] = [True] * count
        return _http(target, "infer", json.dumps({"inputs": entries}).encode(), ())
    for entry, tensor in zip(entries, tensors, strict=True):
        entry["parameters"] = {"binary_data_size": len(tensor)}
    text = json.dumps(
        {"parameters": {"binary_data_output": True}, "inputs": entries}, separators=(",", ":")
    ).encode()
    length = ("Inference-Header-Content-Length", str(len(text)))
    return _http(target, "infer", b"".join([text, *tensors]), (length,))


def max_batch(target: Target) -> int:
    """The most samples that the server joins.

    Raises:
        ServeError: the server does not answer, or has no such model.
    """
    return int(_asked(target, "/config")["max_batch_size"])


def _random(chance: random.Random, datatype: str, count: int) -> bytes:
    if datatype == "FP32":
        return struct.pack(f"<{count}f", *(chance.random() for _ in range(count)))
    if datatype not in BY_WIRE:
        raise UsageError("no random tensor of this datatype can be made", seen=datatype)
    if datatype.startswith(("FP", "BF")):
        return bytes(count * BY_WIRE[datatype].itemsize)  # random bytes could be NaN
    nbytes = BY_WIRE[datatype].itemsize  # each is 0 or 1, which any vocabulary has
    return b"".join(chance.randrange(2).to_bytes(nbytes, "little") for _ in range(count))


def _http(target: Target, verb: str, content: bytes, headers: tuple[tuple[str, str], ...]) -> bytes:
    lines = [
        f"POST /v2/models/{target.model}/{verb} HTTP/1.1",
        f"Host: {urlsplit(target.url).netloc}",
        f"Content-Length: {len(content)}",
        *(f"{name}: {value}" for name, value in (*target.headers.items(), *headers)),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content


def _asked(target: Target, path: str) -> dict[str, Any]:
    url = f"{target.url}/v2/models/{target.model}{path}"
    try:
        answer = httpx.get(url, headers=target.headers, timeout=10)
    except httpx.HTTPError as error:
        raise ServeError(
            "the server does not answer", status=503, seen=f"{url}: {error}", fix="start it"
        ) from error
    if answer.status_code != 200:
        raise ServeError("the server refuses", status=answer.status_code, seen=answer.text[:200])
    document: dict[str, Any] = answer.json()
    return document
