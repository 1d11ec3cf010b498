"""Mutated plans: each must be refused by a ``TessellaError``, or answer as before."""

from __future__ import annotations

import copy
import io
import json
import random
import struct
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Any

import torch

from tessella import runtime
from tessella.artifacts.archive import archive_of
from tessella.artifacts.plan import MANIFEST, from_bytes
from tessella.core.errors import ArtifactError, TessellaError
from tests.support.plans import fuzz_fields
from tests.support.plans.subjects import Subject

Members = dict[str, bytes]


def members_of(content: bytes) -> Members:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def honest(members: Members, **changed: bytes) -> bytes:
    """The plan with other members (``program=…`` is program.json), and hashes that vouch for them.

    An author who means harm can hash anything.
    """
    names = {PurePosixPath(name).stem: name for name in members}
    members = members | {names[n]: content for n, content in changed.items()}
    manifest = json.loads(members[MANIFEST])
    for name, content in members.items():
        if name != MANIFEST:
            entry = {"sha256": sha256(content).hexdigest(), "nbytes": len(content)}
            manifest["members"][name] = entry
    text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
    return archive_of({**members, MANIFEST: text.encode()})


# --- mutations of bytes ---------------------------------------------------------------------------


def flip(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def flip_head(rng: random.Random, content: bytes) -> bytes:
    """A byte of the ZIP's own headers, or of the directory."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        heads = [i.header_offset + rng.randrange(48) for i in archive.infolist()]
        heads.append(rng.randrange(archive.start_dir, len(content)))
    changed = bytearray(content)
    changed[rng.choice(heads)] = rng.randrange(256)
    return bytes(changed)


def truncate(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content))]


def insert(rng: random.Random, content: bytes) -> bytes:
    place = rng.choice((0, len(content), rng.randrange(len(content))))
    return content[:place] + rng.randbytes(rng.randrange(1, 40)) + content[place:]


def lie(rng: random.Random, content: bytes) -> bytes:
    """Sizes, offsets and counts of the directory that are not so."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        places = [archive.start_dir + at for at in (16, 20, 24, 28, 30, 32, 42)]
        places += [len(content) - 22 + at for at in (8, 10, 12, 16, 20)]
    changed = bytearray(content)
    value = rng.choice((0, 1, 2**16 - 1, 2**31, 2**32 - 1, rng.randrange(2**32)))
    struct.pack_into("<H", changed, rng.choice(places), value & 0xFFFF)
    if rng.random() < 0.5:
        struct.pack_into("<L", changed, rng.choice(places[:3]), value)
    return bytes(changed)


def rearrange(rng: random.Random, content: bytes) -> bytes:
    """Members swapped, missing, twice, renamed, or compressed: a bomb among them."""
    listed = list(members_of(content).items())
    at = rng.randrange(len(listed))
    name, inside = listed[at]
    compression = zipfile.ZIP_STORED
    kind = rng.randrange(7)
    if kind == 0:
        rng.shuffle(listed)
    elif kind == 1:
        listed.pop(at)
    elif kind == 2:
        listed.append((name, rng.choice((inside, b"", inside[:-1]))))
    elif kind == 3:
        new = (f"../{name}", f"/{name}", f"a/../{name}", f"..\\{name}", f"{name}/", "", "C:x")
        listed[at] = (rng.choice(new), inside)
    elif kind == 4:
        listed.append((rng.choice(("more.pkl", "../../x.py", "a" * 60000)), b"x"))
    elif kind == 5:
        compression = rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    else:
        compression = zipfile.ZIP_DEFLATED
        listed[at] = (name, b"\0" * (1 << 20))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for member, text in listed:
            archive.writestr(member or "x", text)
    return out.getvalue()


def cross(rng: random.Random, content: bytes) -> bytes:
    """A member in another's place, or noise, with honest hashes."""
    members = members_of(content)
    one = rng.choice(("program", "golden", "tuning", "weights"))
    choices = [
        fuzz_fields.member(members, "tuning.jsonl"),
        members["golden.safetensors"],
        members[MANIFEST],
        b"[" * 9999,
    ]
    return honest(members, **{one: rng.choice((*choices, rng.randbytes(64), b"", b"{}"))})


# --- mutations of what the JSON says, vouched for by honest hashes --------------------------------

JUNK: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 64, 10**9, -(10**9), 2**31, 2**63, 10**40, 1.5, 1e300, "",
    "x", "float32", "../x", "a" * 5000, [], {}, [0], [-1, -1], [10**9, 10**9], [[[]]],
    {"x": {"y": [1]}}, {"input": 0}, {"float": "nan"},
)  # fmt: skip


def _places(node: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in pairs:
        found.append((node, key))
        if isinstance(value, dict | list):
            _places(value, found)
    return found


def mutate_json(rng: random.Random, data: Any) -> None:
    """One change in place: deleted, another type, another number, swapped, repeated, added."""
    places = _places(data, [])
    box, key = rng.choice(places)
    kind = rng.randrange(8)
    if kind == 0:
        del box[key]
    elif kind <= 2:
        box[key] = copy.deepcopy(rng.choice(JUNK))
    elif kind == 3:
        numbers = [(b, k) for b, k in places if type(b[k]) is int]
        box, key = rng.choice(numbers or places)
        if type(box[key]) is int:
            box[key] += rng.choice((-64, -1, 1, 2, 64, 10**9, box[key], -2 * box[key]))
    elif kind == 4:
        other, name = rng.choice([(b, k) for b, k in places if type(b[k]) is type(box[key])])
        other[name], box[key] = copy.deepcopy(box[key]), copy.deepcopy(other[name])
    elif kind == 5 and isinstance(box, list):
        box.insert(rng.randrange(len(box) + 1), copy.deepcopy(box[key]))
    elif kind == 6 and isinstance(box, list):
        rng.shuffle(box)
    elif isinstance(box, dict):
        box[rng.choice(("more", "workspace", "config", "device", "offset"))] = rng.choice(JUNK)


def program(rng: random.Random, content: bytes) -> bytes:
    members = members_of(content)
    data = json.loads(fuzz_fields.member(members, "program.json"))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        mutate_json(rng, data)
    return honest(members, program=json.dumps(data, allow_nan=True).encode())


def manifest(rng: random.Random, content: bytes) -> bytes:
    members = members_of(content)
    data = json.loads(members[MANIFEST])
    mutate_json(rng, data)
    return archive_of({**members, MANIFEST: json.dumps(data).encode()})


def fields(rng: random.Random, content: bytes) -> bytes:
    members = members_of(content)
    changed = fuzz_fields.changed(rng, members)
    if "manifest" in changed:
        return archive_of({**members, MANIFEST: changed["manifest"]})
    return honest(members, **changed)


MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    flip, flip_head, truncate, insert, lie, rearrange, cross, manifest,
    program, program, program, *[fields] * 9,
)  # fmt: skip


def machine_code(rng: random.Random, content: bytes) -> bytes:
    """Bytes of compiled kernels, or what their records say, under honest hashes."""
    members = members_of(content)
    records = next(name for name in members if name.endswith("kernels.jsonl"))
    if rng.random() < 0.4:
        return honest(members, kernels=fuzz_fields.lines(rng, members[records]))
    name = rng.choice(sorted(n for n in members if n.endswith(".cubin")))
    code = garbled(rng, members[name])
    old, new = PurePosixPath(name).stem, sha256(code).hexdigest()
    now = name.replace(old, new)
    codes = {now if n == name else n: c for n, c in members.items() if n.endswith(".cubin")}
    rest = {n: c for n, c in members.items() if n not in codes and n != name}
    data = json.loads(rest[MANIFEST])
    del data["members"][name]
    lines = rest[records].replace(old.encode(), new.encode())
    rest |= {MANIFEST: json.dumps(data).encode(), records: lines}
    return honest({**rest, **dict(sorted({**codes, now: code}.items()))})


def garbled(rng: random.Random, code: bytes) -> bytes:
    """An ELF file that is cut, or has other bytes in its header, its tables or its attributes."""
    changed = bytearray(code)
    kind = rng.randrange(5)
    if kind == 0:
        del changed[rng.randrange(len(changed)) :]
        return bytes(changed)
    start, length = ((0, 64), (len(changed) - 2000, 2000), (0, len(changed)))[kind % 3]
    for _ in range(rng.choice((1, 2, 8))):
        place = start + rng.randrange(length)
        if kind == 4:
            number = rng.choice(fuzz_fields.INTEGERS) & (2**64 - 1)
            changed[place : place + 8] = number.to_bytes(8, "little")
        else:
            changed[place] = rng.randrange(256)
    return bytes(changed)


# --- the judge ------------------------------------------------------------------------------------


def outcome(content: bytes, known: Subject) -> str:
    """``refused``, ``same``, or what went wrong.

    On a CPU a batch size first runs when it is asked for, and may be refused then, without answer.
    """
    try:
        plan = from_bytes(content)
        str(plan).encode()
        repr(plan).encode()
        engine = runtime.load(plan)
    except TessellaError as error:
        str(error).encode()
        return "refused"
    for count in (1, 2, 3):
        x = known.sample(count)
        try:
            (made,) = engine(x).values()
        except ArtifactError:
            return "refused"
        with torch.inference_mode():
            right = known.answer(x)
        if not (made - right).abs().max() <= known.tolerance * right.abs().max():  # and no NaN
            return f"differs at batch {count}"
    return "same"
