"""The Open Inference Protocol's infer response, in the form that the request wants."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tessella.core.dtype import dtype
from tessella.server.classification import ranked
from tessella.server.protocol import NO_REGIONS, InferRequest, RequestedOutput, Signature
from tessella.server.shared_memory import Copy, Regions
from tessella.server.tensors import strings_to_binary, to_binary, to_json

MOST_TEXTS = 4  # of answers, for each of a model's heads
_COMPACT = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class InferResponse(NamedTuple):
    """A body, and the length of its JSON if binary tensors follow.

    Attributes:
        copies: to shared memory, that are to be made before it is sent.
    """

    body: bytes
    json_bytes: int | None
    copies: tuple[Copy, ...] = ()


def build_infer(
    request: InferRequest,
    outputs: Mapping[str, np.ndarray],
    model: Signature,
    *,
    name: str,
    version: str,
    regions: Regions = NO_REGIONS,
) -> InferResponse:
    """The response in the form that the request wants: JSON, JSON and binary tensors, or tensors
    in shared memory.
    """
    if request.texts is not None:
        # A split gives the same head to several versions: each names itself.
        told: tuple[str | tuple[int, ...], ...]
        told = version, *[outputs[o.name].shape for o in request.outputs]
        if (known := request.texts.get(told)) is not None:
            tensors = [
                to_binary(outputs[o.name], dtype(model.outputs[o.name].dtype))
                for o in request.outputs
            ]
            return InferResponse(body=b"".join([known, *tensors]), json_bytes=len(known))
    entries, parts, copies = [], [], []
    # What a network makes of a client's numbers is the client's: NaN, 0 as a divisor, 1e30.
    status = 422 if request.arrays else 500
    for requested in request.outputs:
        entry, part = _build_output(requested, outputs[requested.name], model, status)
        if (place := requested.place) is not None and part is not None:
            copies.append(regions.write(place, part))
            entry["parameters"] = {
                "shared_memory_region": place.region,
                "shared_memory_offset": place.offset,
                "shared_memory_byte_size": len(part),
            }
            part = None
        entries.append(entry)
        if part is not None:
            parts.append(part)
    document: dict[str, Any] = {"model_name": name, "model_version": version}
    if request.id is not None:
        document["id"] = request.id
    if request.labels:
        document["parameters"] = {"labels": model.labels}
    document["outputs"] = entries
    text = _COMPACT.encode(document).encode()
    if request.texts is not None and len(request.texts) < MOST_TEXTS:
        request.texts[told] = text
    any_binary = any(o.binary and o.place is None for o in request.outputs)
    return InferResponse(
        body=b"".join([text, *parts]) if parts else text,
        json_bytes=len(text) if any_binary else None,
        copies=tuple(copies),
    )


def _build_output(
    requested: RequestedOutput, array: np.ndarray, model: Signature, status: int
) -> tuple[dict[str, Any], bytes | None]:
    element = dtype(model.outputs[requested.name].dtype)
    entry: dict[str, Any] = {"name": requested.name}
    if requested.classification is not None:
        rows = ranked(array, requested.classification, model.labels)
        strings = [s for row in rows for s in row]
        entry |= {"datatype": "BYTES", "shape": [len(rows), len(rows[0])]}
        if not requested.binary:
            return entry | {"data": strings}, None
        part = strings_to_binary([s.encode() for s in strings])
    else:
        entry |= {"datatype": element.wire, "shape": list(array.shape)}
        if not requested.binary:
            return entry | {"data": to_json(array, name=requested.name, status=status)}, None
        part = to_binary(array, element)
    return entry | {"parameters": {"binary_data_size": len(part)}}, part
