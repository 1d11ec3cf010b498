"""Lies in a plan's own words, vouched for by honest hashes: what is behind the hashes is tested.

A field is chosen by its kind (``buckets.*.buffers.*.offset``), so that the rare ones have their
turn, and gets a value of the right type that is wrong, or one of another type. Where buckets must
be alike the same lie may be told in each of them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors.torch import load, save

from tessella.kernels import catalog
from tessella.operations.torch_operators.allowed import ALLOWED

Members = dict[str, bytes]
Path = tuple[Any, ...]  # keys and indices, from the top


def member(members: Members, name: str) -> bytes:
    """The member of this name, in whichever target's folder it lies."""
    return next(content for full, content in members.items() if full.rpartition("/")[2] == name)


class Raw(str):
    """JSON that ``json.dumps`` would not write."""


MARK = "\ue000"
RAW = tuple(
    Raw(text)
    for text in (
        "1e999", "-1e999", "NaN", "-Infinity", "9" * 4000, "9" * 5000,
        *("[" * depth + "]" * depth for depth in (100, 450, 900, 100_000)),
        '{"x":' * 450 + "0" + "}" * 450,
    )
)  # fmt: skip
INTEGERS = (
    -(2**63), -(2**31), -64, -2, -1, 0, 1, 2, 3, 4, 16, 63, 64, 65, 128, 4096, 2**20, 2**31 - 1,
    2**31, 2**32, 2**40 - 64, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 10**40, True, False,
)  # fmt: skip
FLOATS = (-1.0, -0.0, 5e-324, 1e-30, 0.5, 1.5, 1e30, 1e308, -1e308)
DTYPES = (
    "float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64", "bool",
    "float8_e4m3fn", "float8_e5m2", "complex64", "complex128", "quint8", "Tensor", "__class__",
)  # fmt: skip
TEXTS = (
    "", " ", "\0", "../x", "/etc/passwd", "..\\x", "a" * 100_000, "\ud800", "\x1b[2J", "%s%n",
    "{0.__class__}", "__import__('os')", "channels_last", "contiguous", "strided", "image",
)  # fmt: skip


OTHERS: tuple[Callable[[], Any], ...] = (
    lambda: None, list, dict, lambda: [[]], lambda: {"": {}}, lambda: [None] * 20_000,
    lambda: {"input": 0}, lambda: {"input": -1}, lambda: [10**9] * 4, lambda: [0] * 17,
)  # fmt: skip


def places(data: Any, path: Path = ()) -> Iterator[Path]:
    """The path to everything in a JSON value."""
    for key in data if isinstance(data, dict) else range(len(data)):
        yield (*path, key)
        if isinstance(data[key], dict | list):
            yield from places(data[key], (*path, key))


def at(data: Any, path: Path) -> Any:
    return functools.reduce(lambda box, key: box[key], path, data)


def by_kind(data: Any) -> dict[Path, list[Path]]:
    """Paths by what they are paths to: numbers in them do not count."""
    kinds: dict[Path, list[Path]] = {}
    for path in places(data):
        kinds.setdefault(tuple("*" if isinstance(k, int) else k for k in path), []).append(path)
    return kinds


def lie_about(rng: random.Random, data: Any, *, twins: bool = False) -> None:
    """One field gets a wrong value, in place.

    Args:
        twins: the same in all buckets of a program, half of the time.
    """
    kinds = by_kind(data)
    kind = rng.choice(sorted(kinds, key=str))
    path = rng.choice(kinds[kind])
    value = _wrong(rng, at(data, path), [at(data, other) for other in kinds[kind]])
    paths = [path]
    if twins and path[0] == "buckets" and len(path) > 3 and rng.random() < 0.5:
        paths = [p for p in kinds[kind] if (p[0], *p[2:]) == (path[0], *path[2:])]
    for one in paths:
        box = at(data, one[:-1])
        if value is _GONE:
            with contextlib.suppress(LookupError):  # an earlier lie put one box in two places
                del box[one[-1]]
        else:
            box[one[-1]] = copy.deepcopy(value)


_GONE = object()


def _wrong(rng: random.Random, value: Any, alike: list[Any]) -> Any:
    chance = rng.random()
    if chance < 0.04:
        return _GONE
    if chance < 0.14:
        return rng.choice(OTHERS)()
    if chance < 0.18:
        return rng.choice(RAW)
    if chance < 0.36:  # what the plan says elsewhere
        return rng.choice(alike)
    if isinstance(value, bool):
        return rng.choice((not value, 0, 1, "true"))
    if isinstance(value, int):
        near = (value + 1, value - 1, 2 * value, -value, value + 64, value // 2, float(value))
        return rng.choice((*INTEGERS, *near))
    if isinstance(value, float):
        return rng.choice((*FLOATS, -value, value * 2, int(value), str(value)))
    if isinstance(value, str):
        return rng.choice((rng.choice(TEXTS), rng.choice(DTYPES), rng.choice(_kernels()),
                           rng.choice(_operators()), f"../{value}", value.upper()))  # fmt: skip
    if isinstance(value, list):
        changed = (value[::-1], value * 2, value[:-1], [*value, 1], [value], value * 500)
        return rng.choice(changed)
    if isinstance(value, dict):
        return {f"{k}x" if rng.random() < 0.5 else k: v for k, v in value.items()}
    return rng.choice((*INTEGERS, *TEXTS[:4]))


@functools.cache
def _kernels() -> tuple[str, ...]:
    return tuple(row.id for row in catalog.KERNELS)


@functools.cache
def _operators() -> tuple[str, ...]:
    return (*sorted({row.op for row in catalog.KERNELS}), *sorted(ALLOWED), "aten::set_",
            "aten::resize_", "aten::from_file", "aten::as_strided", "prims::run")  # fmt: skip


def dumped(data: Any) -> bytes:
    """JSON text; numbers that are none stand in it as they are."""

    def marked(value: Any) -> Any:
        if isinstance(value, Raw):
            return f"{MARK}{value}{MARK}"
        if isinstance(value, dict):
            return {k: marked(v) for k, v in value.items()}
        return [marked(v) for v in value] if isinstance(value, list) else value

    mark = json.dumps(MARK)[1:-1]
    text = json.dumps(marked(data))
    return text.replace(f'"{mark}', "").replace(f'{mark}"', "").encode()


# --- a member with a lie in it --------------------------------------------------------------------


def program(rng: random.Random, members: Members) -> bytes:
    data = json.loads(member(members, "program.json"))
    for _ in range(rng.choice((1, 1, 2))):
        lie_about(rng, data, twins=True)
    return dumped(data)


def steps(rng: random.Random, members: Members) -> bytes:
    """Out of order, twice, gone, or run by another kernel; the same in every bucket."""
    data = json.loads(member(members, "program.json"))
    count = len(data["buckets"][0]["steps"])
    one, other, kind = rng.randrange(count), rng.randrange(count), rng.randrange(6)
    kernel = rng.choice(catalog.KERNELS)
    for bucket in data["buckets"]:
        made = bucket["steps"]
        if kind == 0:
            made[one], made[other] = made[other], made[one]
        elif kind == 1:
            made.insert(other, copy.deepcopy(made[one]))
        elif kind == 2:
            del made[one]
        elif kind == 3:
            made[one]["inputs"], made[other]["inputs"] = made[other]["inputs"], made[one]["inputs"]
        elif kind == 4:
            made[one]["kernel"] = kernel.id
            made[one]["op"] = rng.choice((made[one]["op"], kernel.op))
        else:
            made[one]["attrs"] = copy.deepcopy(made[other]["attrs"])
    return dumped(data)


def memory(rng: random.Random, members: Members) -> bytes:
    """A buffer where another lies, the arena of another size, a workspace that is a value."""
    data = json.loads(member(members, "program.json"))
    bucket = rng.choice(data["buckets"])
    one, other = rng.choice(bucket["buffers"]), rng.choice(bucket["buffers"])
    step, kind = rng.choice(bucket["steps"]), rng.randrange(5)
    if kind == 0:
        one["offset"] = other["offset"]
    elif kind == 1:
        bucket["arena_bytes"] = rng.choice((0, 64, bucket["arena_bytes"] - 64, 2**39, 2**40))
    elif kind == 2:
        step["workspace"] = rng.choice((other["name"], data["inputs"][0]))
    elif kind == 3:
        one["offset"] = 64 * rng.randrange(bucket["arena_bytes"] // 64 + 2)
    else:
        axis = rng.randrange(-1, 5)
        one["slice"] = {"of": other["name"], "axis": axis, "start": rng.choice((0, 0, 4, 1, -4))}
        one["offset"] = rng.choice((None, one["offset"]))
        one["format"] = rng.choice((one["format"], "strided", "channels_last"))
    return dumped(data)


def tensors(rng: random.Random, content: bytes) -> bytes:
    """Other numbers, shapes or names; or a header that lies about them."""
    held = load(content)
    if not held or rng.random() < 0.5:
        (length,) = struct.unpack_from("<Q", content)
        data = json.loads(content[8 : 8 + length])
        lie_about(rng, data)
        header = dumped(data)
        if rng.random() < 0.1:
            length = rng.choice((0, 1, 2**31, 2**62, 2**64 - 1, len(content)))
            return struct.pack("<Q", length) + header + content[8:]
        return struct.pack("<Q", len(header)) + header + content[8 + len(header) :]
    name = rng.choice(sorted(held))
    tensor, kind = held[name], rng.randrange(6)
    if kind == 0 and tensor.is_floating_point():
        value = rng.choice((math.nan, math.inf, -math.inf, 3e38))
        held[name] = torch.full_like(tensor, value)
    elif kind == 1:
        held[name] = tensor.flatten()[None] if rng.random() < 0.5 else tensor.flatten()[:0]
    elif kind == 2:
        held[rng.choice(("image", "scores", "../x", "", *held))] = held.pop(name)
    elif kind == 3:
        held[name] = tensor.to(rng.choice((torch.float64, torch.int8, torch.float16, torch.bool)))
    elif kind == 4:
        held[name] = held[rng.choice(sorted(held))].clone()
    else:
        held["more"] = torch.zeros(3)
    return save({n: t.contiguous() for n, t in held.items()})


def names(rng: random.Random, members: Members) -> bytes:
    """Other names for the stored tensors: missing ones, or another's."""
    data = json.loads(member(members, "tensors.json"))
    lie_about(rng, data)
    return dumped(data)


def lines(rng: random.Random, content: bytes) -> bytes:
    """JSON lines: one with a lie, one twice, none, or what is no line."""
    data = [json.loads(line) for line in content.splitlines()]
    kind = rng.randrange(4) if data else 3
    if kind == 0:
        rng.shuffle(data)
        data += data[:1]
    elif kind <= 2:
        lie_about(rng, data)
    text = b"".join(dumped(line) + b"\n" for line in data)
    return text + (rng.choice((b"[", b"\xff\xfe", b"null\n", b"{}\n")) if kind == 3 else b"")


def changed(rng: random.Random, members: Members) -> dict[str, bytes]:
    """The members that are other ones now, by ``honest``'s names."""
    kinds: tuple[Callable[[], dict[str, bytes]], ...] = (
        lambda: {"program": program(rng, members)},
        lambda: {"program": program(rng, members)},
        lambda: {"program": program(rng, members)},
        lambda: {"program": steps(rng, members)},
        lambda: {"program": memory(rng, members)},
        lambda: {"weights": tensors(rng, members["weights.safetensors"])},
        lambda: {"golden": tensors(rng, members["golden.safetensors"])},
        lambda: {"tensors": names(rng, members)},
        lambda: {"tuning": lines(rng, member(members, "tuning.jsonl"))},
        lambda: {"lock": lines(rng, member(members, "lock.jsonl"))},
        lambda: {"manifest": _manifest(rng, members)},
    )
    return rng.choice(kinds)()


def _manifest(rng: random.Random, members: Members) -> bytes:
    data = json.loads(members["manifest.json"])
    hashes = data.pop("members")
    lie_about(rng, data)
    return dumped({**data, "members": hashes})
