"""Mutated plans by the thousand: each is refused by a ``TessellaError``, or answers as before.

``python -m tests.artifacts.fuzz_plans 10000 [seed]`` runs as many and prints what became of them.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import random
import resource
import struct
import sys
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch import nn

from tessella import compiler, runtime
from tessella.artifacts.plan import MANIFEST, archive_of, from_bytes, to_bytes
from tessella.core.errors import TessellaError
from tessella.core.spec import DimRange, TensorSpec
from tests.compiler.networks import build, graph_of, plan

Members = dict[str, bytes]


class Tiny(nn.Module):
    """A convolution, pooling, arena buffers, a program, a view, a fallback, a product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(18, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.max_pool2d(self.conv(x).relu(), 2, 2)
        x = torch.cumsum(x.sigmoid() ** 1.3 + (-x).exp() ** 0.3, 2)
        return self.fc(x.flatten(1)).softmax(1)


@functools.cache
def subject() -> tuple[bytes, nn.Module]:
    """A plan's bytes, and the module that it must answer like."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Tiny().eval()
    return to_bytes(build(module, TensorSpec(name="image", dtype="float32", shape=(1, 1, 6, 6)))), (
        module
    )


class Small(nn.Module):
    """What int8 has: layers on codes, a residual with a factor of its own, codes pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 8, 1)
        self.third, self.fc = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(72, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.max_pool2d(self.first(x).relu(), 2, 2)).relu()
        return self.fc((self.third(x) + x).relu().flatten(1))


@functools.cache
def rounded_subject() -> tuple[bytes, Callable[[torch.Tensor], torch.Tensor]]:
    """An int8 plan's bytes, and its own answers."""
    spec = TensorSpec(name="image", dtype="float32", shape=(1, 1, 6, 6))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Small().eval()
        graph = graph_of(module, spec, DimRange(min=1, opt=2, max=2))
        images = [{"image": torch.randn(16, 1, 6, 6)}]
    made = plan(graph, precision="int8", calibration=compiler.calibrate(graph, images))
    content = to_bytes(made)
    engine = runtime.load(from_bytes(content))
    return content, lambda x: engine(image=x)["scores"]


def members_of(content: bytes) -> Members:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def honest(members: Members, **changed: bytes) -> bytes:
    """The plan with other members (``program=…`` is program.json), and hashes that vouch for them.

    An author who means harm can hash anything.
    """
    names = {name.partition(".")[0]: name for name in members}
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
        members["tuning.jsonl"],
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
    data = json.loads(members["program.json"])
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        mutate_json(rng, data)
    return honest(members, program=json.dumps(data, allow_nan=True).encode())


def manifest(rng: random.Random, content: bytes) -> bytes:
    members = members_of(content)
    data = json.loads(members[MANIFEST])
    mutate_json(rng, data)
    return archive_of({**members, MANIFEST: json.dumps(data).encode()})


MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    flip, flip_head, truncate, insert, lie, rearrange, cross, manifest,
    program, program, program, program, program, program,
)  # fmt: skip


# --- the judge ------------------------------------------------------------------------------------


@dataclass
class Report:
    """What became of the plans: counts by mutation and outcome, and what must not have happened."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    grown_mb: float = 0.0


def outcome(content: bytes, answer: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """``refused``, ``same``, or what went wrong."""
    try:
        engine = runtime.load(from_bytes(content))
    except TessellaError:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    for count in (1, 2, 3):
        x = torch.randn(count, 1, 6, 6, generator=torch.Generator().manual_seed(count))
        (made,) = engine(x).values()
        with torch.inference_mode():
            if not torch.allclose(made, answer(x), rtol=1e-3, atol=1e-4):
                return f"another answer at batch {count}"
    return "same"


def fuzz(count: int, seed: int = 0, *, rounded: bool = False) -> Report:
    """Judge ``count`` mutated plans; the same seed gives the same mutations of the same plan."""
    content, answer = rounded_subject() if rounded else subject()
    assert outcome(content, answer) == "same"
    report = Report()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for index in range(count):
        rng = random.Random(f"{seed}/{index}")
        mutation = rng.choice(MUTATIONS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a name twice in a ZIP; what torch says of odd shapes
            changed = mutation(rng, content)
            start = time.perf_counter()
            found = outcome(changed, answer)
        report.slowest_s = max(report.slowest_s, time.perf_counter() - start)
        short = found if found in ("refused", "same") else "failed"
        report.outcomes[mutation.__name__, short] += 1
        if short == "failed":
            report.failures.append(f"{seed}/{index} {mutation.__name__}: {found}")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report.grown_mb = (after - before) / 1024
    return report


if __name__ == "__main__":
    began = time.perf_counter()
    done = fuzz(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for (name, what), times in sorted(done.outcomes.items()):
        print(f"{name:12} {what:8} {times}")
    print(*done.failures[:40], sep="\n")
    print(
        f"{len(done.failures)} failures, {time.perf_counter() - began:.1f} s,"
        f" slowest {done.slowest_s:.2f} s, {done.grown_mb:.0f} MB more"
    )
    sys.exit(bool(done.failures))
