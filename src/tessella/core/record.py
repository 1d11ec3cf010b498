"""Frozen dataclasses to JSON and back, strictly: what a file says is checked before it is believed.

All our files hold records. A record is a frozen dataclass whose fields are ``str``, ``int``,
``float``, ``bool``, ``None``, ``Literal``, tuples, dicts with string keys, unions of these, and
other records.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import types
import typing
from collections import Counter
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from tessella.core.errors import ArtifactError, CorruptArtifact, TessellaError

R = TypeVar("R")

MAX_DEPTH = 64  # of lists and objects in each other; ours are a tenth of that


def to_plain(value: Any) -> Any:
    """A record as plain dicts, lists and scalars, ready for ``json.dumps``."""
    kind: Any = type(value)
    if kind in _SCALARS:
        return value
    if kind is dict:
        return {k: v if type(v) in _SCALARS else to_plain(v) for k, v in value.items()}
    if kind is tuple or kind is list:
        return [v if type(v) in _SCALARS else to_plain(v) for v in value]
    if (names := _names(kind)) is not None:
        return {name: to_plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple | list):
        return [to_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: to_plain(v) for k, v in value.items()}
    if isinstance(value, str | int | float):
        return value
    raise TypeError(f"a record cannot hold {type(value).__name__}: {value!r}")


_SCALARS = frozenset((str, int, float, bool, type(None)))


@functools.cache
def _names(kind: Any) -> tuple[str, ...] | None:
    """The fields of a record; None of what is none."""
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple(field.name for field in dataclasses.fields(kind))


def canonical_json(value: Any) -> str:
    """One text per value: sorted keys, no spaces. Hashes and exact rebuilds rest on it."""
    return json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def same_json(one: Any, other: Any) -> bool:
    """Whether two values have one canonical text, where 1, 1.0 and true are three: mostly their
    ``repr`` says so, at a tenth of the time."""
    return repr(one) == repr(other) or canonical_json(one) == canonical_json(other)


def digest(value: Any) -> str:
    """SHA-256 of ``canonical_json``, as 64 hexadecimal characters."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, for a decoder's ``object_pairs_hook``; ``ValueError`` for a key twice."""
    out = dict(pairs)
    if len(out) != len(pairs):
        twice = sorted(name for name, count in Counter(k for k, _ in pairs).items() if count > 1)
        raise ValueError(f"key given twice: {twice}")
    return out


def no_constant(name: str) -> float:
    """For a decoder's ``parse_constant``: NaN and Infinity are no numbers of JSON."""
    raise ValueError(f"{name} is not a JSON number")


def parse_json(text: str | bytes, *, where: str) -> Any:
    """``json.loads`` that refuses duplicate keys, numbers that are none and absurd nesting.

    Recursive functions can walk what passes, and ``canonical_json`` write it. Errors name the file.
    """

    def finite(number: str) -> float:
        if math.isinf(value := float(number)):
            raise ValueError(f"{number[:20]} is too large for a number")
        return value

    try:
        data = json.loads(
            text,
            object_pairs_hook=unique_keys,
            parse_constant=no_constant,
            parse_float=finite,
        )
        _require_shallow(data)
        lower = text.lower()
        if b"\\ud" in lower if isinstance(lower, bytes) else "\\ud" in lower:
            # a surrogate without its partner cannot be written as UTF-8
            json.dumps(data, ensure_ascii=False).encode()
        return data
    except (ValueError, RecursionError) as error:
        raise CorruptArtifact(
            f"{where} is not valid JSON",
            seen=str(error)[:200],
            fix="restore the file from a backup or make it again",
        ) from error


_BOXES = frozenset((dict, list))  # what a decoder makes: no other type holds values


def _require_shallow(data: Any) -> None:
    """Raise ``ValueError`` where lists and objects lie deeper in each other than ``MAX_DEPTH``."""
    level = [data] if type(data) in _BOXES else []
    for _ in range(MAX_DEPTH):
        inside = [box.values() if type(box) is dict else box for box in level]
        level = [value for values in inside for value in values if type(value) in _BOXES]
        if not level:
            return
    raise ValueError(f"lists and objects lie deeper in each other than {MAX_DEPTH}")


def from_plain(cls: type[R], data: Any, *, where: str) -> R:
    """The record of type ``cls`` that ``data`` (parsed JSON) describes.

    Raises:
        CorruptArtifact: a field is missing, unknown, or of another type; the message has its path.
    """
    return typing.cast(R, _convert(cls, data, where))


@functools.cache
def _fields(cls: type) -> tuple[dict[str, Any], frozenset[str], dict[str, frozenset[type]]]:
    """The types of a record's fields, those that must be there, and what they take as it is."""
    hints = typing.get_type_hints(cls)
    fields = [f for f in dataclasses.fields(cls) if f.init]
    required = frozenset(
        f.name
        for f in fields
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    )
    taken = {f.name: _taken(hints[f.name]) for f in fields}
    return {f.name: hints[f.name] for f in fields}, required, taken


def _taken(hint: Any) -> frozenset[type]:
    """The types of JSON's values that a field of this type takes without a change."""
    if hint in (str, int, bool, float, type(None)):
        return frozenset({hint})
    if get_origin(hint) not in (Union, types.UnionType):
        return frozenset()
    found = frozenset().union(*map(_taken, get_args(hint)))
    return found - {int} if float in found else found  # the first of both that is named decides


def _wrong(where: str, expected: str, seen: Any) -> CorruptArtifact:
    return CorruptArtifact(
        f"{where} is not {expected}", seen=repr(seen)[:120], fix="make the file again"
    )


_PLAIN = (str, int, bool)  # types of which JSON has the very values


@functools.cache
def _kind(hint: Any) -> tuple[bool, Any]:
    """Whether a hint is a record, and its origin: found once, as plans hold 200,000 values. Its
    arguments are not, for unions of other orders are equal."""
    return dataclasses.is_dataclass(hint), get_origin(hint)


def _convert(hint: Any, data: Any, where: str) -> Any:
    if hint is type(data) and hint in _PLAIN:
        return data
    is_record, origin = _kind(hint)
    if is_record:
        return _convert_record(typing.cast(type, hint), data, where)
    if hint is Any:
        return data
    if origin in (Union, types.UnionType):
        return _convert_union(hint.__args__, data, where)
    if origin is Literal:
        if any(data == value and type(data) is type(value) for value in hint.__args__):
            return data
        raise _wrong(where, f"one of {list(hint.__args__)}", data)
    if origin is tuple:
        return _convert_tuple(hint.__args__, data, where)
    if origin is dict:
        if not isinstance(data, dict):
            raise _wrong(where, "an object", data)
        return {k: _convert(hint.__args__[1], v, f"{where}.{k}") for k, v in data.items()}
    if hint is float:
        return _convert_float(data, where)
    if hint is None or hint is type(None):
        if data is None:
            return None
        raise _wrong(where, "null", data)
    if hint in _PLAIN:
        raise _wrong(where, {int: "an integer", str: "a string", bool: "a boolean"}[hint], data)
    raise TypeError(f"{where}: a record cannot hold a field of type {hint!r}")


def _convert_float(data: Any, where: str) -> float:
    try:
        if isinstance(data, int | float) and not isinstance(data, bool) and math.isfinite(data):
            return float(data)
    except OverflowError:  # an integer of more than 308 digits
        pass
    raise _wrong(where, "a finite number", data)


def _convert_record(cls: type, data: Any, where: str) -> Any:
    hints, required, taken = _fields(cls)
    if not isinstance(data, dict):
        raise _wrong(where, f"an object ({cls.__name__})", data)
    if not data.keys() <= hints.keys():
        unknown = sorted(data.keys() - hints.keys())
        raise _wrong(where, f"a {cls.__name__} with known fields", unknown)
    if not data.keys() >= required:
        missing = ", ".join(sorted(required - data.keys()))
        raise _wrong(where, f"a complete {cls.__name__}: {missing} missing", sorted(data))
    try:
        return cls(
            **{
                # most values: a plan holds 200,000
                k: v
                if (kind := type(v)) in taken[k] and (kind is not float or math.isfinite(v))
                else _convert(hints[k], v, f"{where}.{k}")
                for k, v in data.items()
            }
        )
    except ArtifactError:
        raise
    except TessellaError as error:  # what its __post_init__ refuses
        seen = "" if error.seen is None else f" ({error.seen})"
        fix = error.fix or "make the file again"
        raise CorruptArtifact(
            f"{where} is not a valid {cls.__name__}", seen=f"{error.wrong}{seen}", fix=fix
        ) from error
    except (ValueError, TypeError) as error:
        raise _wrong(where, f"a valid {cls.__name__}", error) from error


def _convert_tuple(args: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list | tuple):
        raise _wrong(where, "a list", data)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_convert(args[0], v, f"{where}[{i}]") for i, v in enumerate(data))
    if len(data) != len(args):
        raise _wrong(where, f"a list of {len(args)}", data)
    return tuple(
        _convert(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, data, strict=True))
    )


def _convert_union(options: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in options:
        return None  # as most fields that may be left out are
    failures = []
    for option in options:
        try:
            return _convert(option, data, where)
        except CorruptArtifact as error:
            failures.append(error)
    records = [f for o, f in zip(options, failures, strict=True) if dataclasses.is_dataclass(o)]
    if isinstance(data, dict) and records:
        raise records[0]
    names = " or ".join(getattr(o, "__name__", str(o)) for o in options)
    raise _wrong(where, names, data)
