"""Frozen dataclasses to JSON and back, strictly: what a file says is checked before it is believed.

All our files hold records. A record is a frozen dataclass whose fields are ``str``, ``int``,
``float``, ``bool``, ``None``, ``Literal``, tuples, dicts with string keys, unions of these, and
other records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import types
import typing
from collections import Counter
from collections.abc import Callable, Sequence
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
        if late := _late(kind):
            names = tuple(n for n in names if n not in late or getattr(value, n) is not None)
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


# Metadata of a field that is left out where it is None: hashes of records that were written before
# there was such a field stay what they are.
LATE = {"left out": True}


@functools.cache
def _late(kind: Any) -> frozenset[str]:
    """The fields of a record with the metadata ``LATE``."""
    return frozenset(f.name for f in dataclasses.fields(kind) if f.metadata == LATE)


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
    return typing.cast(R, _told(_record(typing.cast(type, cls)), data, where))


def records_from_plain(cls: type[R], data: Any, *, where: str) -> tuple[R, ...]:
    """The records of type ``cls`` that a list describes; raises as ``from_plain``."""
    return typing.cast(tuple[R, ...], _told(_many(cls), data, where))


def _told(convert: Convert, data: Any, where: str) -> Any:
    """The value, or an error that says where in the file it is none."""
    try:
        return convert(data)
    except _Misfit as misfit:
        path = "".join(reversed(misfit.path))
        raise CorruptArtifact(
            f"{where}{path} is not {misfit.expected}", seen=misfit.seen, fix=misfit.fix
        ) from misfit.__cause__


Convert = Callable[[Any], Any]  # parsed JSON to a value; raises ``_Misfit``


class _Misfit(Exception):
    """A value that is not of its type. Its path, the innermost name first, is gathered on the way
    out: to write the path of each of the 200,000 values of a plan took longer than to look at them.
    """

    def __init__(self, expected: str, seen: str, fix: str = "make the file again") -> None:
        super().__init__()
        self.expected, self.seen, self.fix = expected, seen, fix
        self.path: list[str] = []


def _wrong(expected: str, seen: Any) -> _Misfit:
    return _Misfit(expected, repr(seen)[:120])


# Types of which JSON has the very values.
_PLAIN = {int: "an integer", str: "a string", bool: "a boolean", type(None): "null"}


def _taken(hint: Any) -> frozenset[type]:
    """The types of JSON's values that a field of this type takes without a change."""
    hint = type(None) if hint is None else hint
    if hint in _PLAIN or hint is float:
        return frozenset({hint})
    if get_origin(hint) not in (Union, types.UnionType):
        return frozenset()
    found = frozenset().union(*map(_taken, get_args(hint)))
    return found - {int} if float in found else found  # the first of both that is named decides


def _takes(taken: frozenset[type], value: Any) -> bool:
    """Whether a value is what it shall become already."""
    kind = type(value)
    return kind in taken and (kind is not float or math.isfinite(value))


def _converter(hint: Any) -> Convert:
    """What makes values of a type; asked for once for each field of a record."""
    origin, args = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _record(typing.cast(type, hint))
    if hint is Any:
        return lambda data: data
    if origin in (Union, types.UnionType):
        return _union(args)
    if origin is Literal:
        return _literal(args)
    if origin is tuple:
        return _many(args[0]) if len(args) == 2 and args[1] is Ellipsis else _tuple(args)
    if origin is dict:
        return _names_of(args[1])
    if hint is float:
        return _float
    if hint is None or hint in _PLAIN:
        return _plain(type(None) if hint is None else hint)
    raise TypeError(f"a record cannot hold a field of type {hint!r}")


def _plain(kind: type) -> Convert:
    def convert(data: Any) -> Any:
        if type(data) is kind:
            return data
        raise _wrong(_PLAIN[kind], data)

    return convert


def _float(data: Any) -> float:
    try:
        if isinstance(data, int | float) and not isinstance(data, bool) and math.isfinite(data):
            return float(data)
    except OverflowError:  # an integer of more than 308 digits
        pass
    raise _wrong("a finite number", data)


def _literal(values: tuple[Any, ...]) -> Convert:
    def convert(data: Any) -> Any:
        if any(data == value and type(data) is type(value) for value in values):
            return data
        raise _wrong(f"one of {list(values)}", data)

    return convert


def _many(hint: Any) -> Convert:
    """A tuple of any length."""
    taken, inner = _taken(hint), _converter(hint)
    if dataclasses.is_dataclass(hint) and _asks_nothing(typing.cast(type, hint)):
        return _table(typing.cast(type, hint))

    def convert(data: Any) -> Any:
        if not isinstance(data, list | tuple):
            raise _wrong("a list", data)
        kinds = set(map(type, data))
        if kinds <= taken and (float not in kinds or all(_takes(taken, v) for v in data)):
            return tuple(data)
        try:
            return tuple(map(inner, data))
        except _Misfit:  # which one is it?
            return tuple(_inside(inner, value, f"[{i}]") for i, value in enumerate(data))

    return convert


def _table(cls: type) -> Convert:
    """A tuple of records, looked at by their fields: most have the same ones, in one order."""
    inner = _record(cls)

    def convert(data: Any) -> Any:
        if not isinstance(data, list | tuple):
            raise _wrong("a list", data)
        kinds = set(map(type, data))
        names = set(map(tuple, data)) if kinds == {dict} else set()
        if len(names) == 1:
            with contextlib.suppress(_Misfit):  # which one is it?
                return _rows(cls, names.pop(), data)
        return tuple(_inside(inner, value, f"[{i}]") for i, value in enumerate(data))

    return convert


def _rows(cls: type, names: tuple[str, ...], data: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
    """The records of dicts that all have these keys; raises ``_Misfit`` if one is none."""
    fields = _fields(cls)
    if not fields.required <= set(names) <= fields.converters.keys():
        raise _wrong(f"a {cls.__name__}", names)
    columns, changed = [], False
    for name in names:
        column, taken = [row[name] for row in data], fields.taken[name]
        kinds = set(map(type, column))
        is_plain = kinds <= taken
        if is_plain and float in kinds:
            is_plain = all(math.isfinite(value) for value in column if type(value) is float)
        if not is_plain:
            column, changed = list(map(fields.converters[name], column)), True
        columns.append(column)
    if changed:
        data = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    return tuple(_filled(cls, row) for row in data)


def _tuple(hints: tuple[Any, ...]) -> Convert:
    inner = [_converter(hint) for hint in hints]

    def convert(data: Any) -> Any:
        if not isinstance(data, list | tuple):
            raise _wrong("a list", data)
        if len(data) != len(inner):
            raise _wrong(f"a list of {len(inner)}", data)
        pairs = zip(inner, data, strict=True)
        return tuple(_inside(one, value, f"[{i}]") for i, (one, value) in enumerate(pairs))

    return convert


def _names_of(hint: Any) -> Convert:
    """A dict by names."""
    inner = _converter(hint)

    def convert(data: Any) -> Any:
        if not isinstance(data, dict):
            raise _wrong("an object", data)
        if hint is Any:
            return dict(data)
        return {name: _inside(inner, value, f".{name}") for name, value in data.items()}

    return convert


def _inside(inner: Convert, value: Any, name: str) -> Any:
    try:
        return inner(value)
    except _Misfit as misfit:
        misfit.path.append(name)
        raise


def _union(hints: tuple[Any, ...]) -> Convert:
    options = [(hint, _converter(hint)) for hint in hints]

    def convert(data: Any) -> Any:
        if data is None and type(None) in hints:
            return None  # as most fields that may be left out are
        failures = []
        for hint, inner in options:
            try:
                return inner(data)
            except _Misfit as misfit:
                failures.append((hint, misfit))
        records = [misfit for hint, misfit in failures if dataclasses.is_dataclass(hint)]
        if isinstance(data, dict) and records:
            raise records[0]
        raise _wrong(" or ".join(getattr(hint, "__name__", str(hint)) for hint in hints), data)

    return convert


@dataclasses.dataclass(frozen=True)
class _Fields:
    """A record's fields.

    Attributes:
        converters, taken: what makes each, and the types of JSON's that it takes as they are.
        required: those that must be there.
        defaults, factories: what those are that are left out, or what makes it.
    """

    converters: dict[str, Convert]
    taken: dict[str, frozenset[type]]
    required: frozenset[str]
    defaults: dict[str, Any]
    factories: dict[str, Callable[[], Any]]


@functools.cache
def _fields(cls: type) -> _Fields:
    """Asked for when there is a record: records may hold records of their own type."""
    hints, without = typing.get_type_hints(cls), dataclasses.MISSING
    fields = [f for f in dataclasses.fields(cls) if f.init]
    return _Fields(
        converters={f.name: _converter(hints[f.name]) for f in fields},
        taken={f.name: _taken(hints[f.name]) for f in fields},
        required=frozenset(f.name for f in fields if f.default is f.default_factory is without),
        defaults={f.name: f.default for f in fields if f.default is not without},
        factories={f.name: f.default_factory for f in fields if f.default_factory is not without},
    )


def _asks_nothing(cls: type) -> bool:
    """Whether records of a type are what their fields are: nothing is asked of these together."""
    plain = not hasattr(cls, "__post_init__") and not hasattr(cls, "__slots__")
    return plain and all(f.init for f in dataclasses.fields(cls))


@functools.cache
def _record(cls: type) -> Convert:
    """What makes records of a type."""
    make = functools.partial(_filled if _asks_nothing(cls) else _made, cls)
    isfinite = math.isfinite

    def convert(data: Any) -> Any:
        fields = _fields(cls)
        if not isinstance(data, dict):
            raise _wrong(f"an object ({cls.__name__})", data)
        if not data.keys() <= fields.converters.keys():
            unknown = sorted(data.keys() - fields.converters.keys())
            raise _wrong(f"a {cls.__name__} with known fields", unknown)
        if not data.keys() >= fields.required:
            missing = ", ".join(sorted(fields.required - data.keys()))
            raise _wrong(f"a complete {cls.__name__}: {missing} missing", sorted(data))
        taken, converters = fields.taken, fields.converters
        return make(
            {
                name: value
                if (kind := type(value)) in taken[name] and (kind is not float or isfinite(value))
                else _inside(converters[name], value, f".{name}")
                for name, value in data.items()
            }
        )

    return convert


def _filled(cls: type, values: dict[str, Any]) -> Any:
    """``cls(**values)`` of a record that asks nothing of its values: a frozen one sets them one by
    one, which took half of the time.
    """
    fields, record = _fields(cls), typing.cast(Any, object.__new__(cls))
    held = record.__dict__
    if len(values) < len(fields.converters):
        held.update(fields.defaults)
        held.update({n: make() for n, make in fields.factories.items() if n not in values})
    held.update(values)
    return record


def _made(cls: type, values: dict[str, Any]) -> Any:
    try:
        return cls(**values)
    except ArtifactError:
        raise
    except TessellaError as error:  # what its __post_init__ refuses
        seen = "" if error.seen is None else f" ({error.seen})"
        fix = error.fix or "make the file again"
        raise _Misfit(f"a valid {cls.__name__}", f"{error.wrong}{seen}", fix) from error
    except (ValueError, TypeError) as error:
        raise _wrong(f"a valid {cls.__name__}", error) from error
