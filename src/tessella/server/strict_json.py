"""JSON of strangers, strictly, and values of the kind that is meant."""

from __future__ import annotations

import json
from typing import Any

from tessella.core.errors import InputError
from tessella.core.record import no_constant, unique_keys

# Lists, objects and texts, of which each takes 0.5 to 1.4 µs while nobody else is served.
MOST_PARTS = 1 << 18


def parse_object(text: bytes | bytearray, what: str) -> dict[str, Any]:
    """A JSON object, strictly: no NaN, no key twice, no absurd nesting."""
    parts = sum(map(text.count, (b"[", b"{", b'"')))
    if parts > MOST_PARTS:
        raise InputError(
            f"{what} has too many parts",
            seen=f"{parts:,} brackets and quotation marks in {len(text):,} bytes of JSON",
            fix="send tensors as binary data",
        )
    try:
        document = _STRICT.decode(text.decode())
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{what} is not valid JSON",
            seen=str(error)[:120],
            fix="send a JSON object, and name its length if tensors follow it",
        ) from error
    if not isinstance(document, dict):
        raise InputError(f"{what} is not a JSON object", seen=type(document).__name__)
    return document


# Made once: json.loads and json.dumps make a new one at each call that has options.
_STRICT = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=no_constant)


def object_of(holder: dict[str, Any], key: str, what: str) -> dict[str, Any]:
    """The object under a key of ``what``; an empty one if there is none."""
    value = holder.get(key, {})
    if not isinstance(value, dict):
        raise InputError(f"{key} of {what} is not an object", seen=repr(value)[:60])
    return value


def objects_of(holder: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The list of objects under a key, each with a name of its own; an empty one without."""
    value = holder.get(key, [])
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        raise InputError(f"{key} is not a list of objects", seen=repr(value)[:60])
    names = [v.get("name") for v in value]
    if not all(isinstance(n, str) for n in names) or len(set(names)) != len(names):
        raise InputError(f"{key} need names, each once", seen=repr(names)[:120])
    return value


def flag(parameters: dict[str, Any], key: str, default: bool) -> bool:
    """The truth value under a key."""
    value = parameters.get(key, default)
    if not isinstance(value, bool):
        raise InputError(f"{key} is not true or false", seen=repr(value)[:40])
    return value
