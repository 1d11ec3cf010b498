"""Places in shared memory that a copy is written to while a product that runs on may read them.

``wgmma`` reads shared memory behind its warps' backs until it is waited for, and no barrier that
Triton sets between reads and copies waits for it. Triton 3.6 and 3.9 pipeline an operand that is
also summed in fewer places than the product needs, and only its timing makes the answer right. So
a kernel's text (TTGIR) is run here: whole numbers and places are known, everything else is not,
and every loop runs a few times. Reads into registers are left to the barriers; copies of other
warps (of a specialized kernel's partitions) are not seen.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tessella.device.launch import Launched

TURNS = 8  # of a loop with none inside: longer than a pipeline
OUTER_TURNS = 2

_LOCATION = re.compile(r" loc\((?:[^()]|\([^()]*\))*\)$")
_RESULT = re.compile(r"(%[\w.$-]+)(?::\d+)? = (.*)")
_NAME = re.compile(r"%[\w.$-]+(?:#\d+)?")
_OPERATION = re.compile(r'"?([\w.]+)"?')
_LOOP = re.compile(r"scf\.for (?:unsigned )?(%[\w.$-]+) = (\S+) to \S+ step ([^\s{]+)")
_CARRIED = re.compile(r"(%[\w.$-]+) = (%[\w.$#-]+)")
_PREDICATE = {
    "eq": operator.eq, "ne": operator.ne, "slt": operator.lt, "ult": operator.lt,
    "sle": operator.le, "ule": operator.le, "sgt": operator.gt, "ugt": operator.gt,
    "sge": operator.ge, "uge": operator.ge,
}  # fmt: skip
_NUMBERS: dict[str, Callable[[int, int], int]] = {
    "addi": operator.add, "subi": operator.sub, "muli": operator.mul, "andi": operator.and_,
    "ori": operator.or_, "xori": operator.xor, "remsi": operator.mod, "remui": operator.mod,
    "divsi": operator.floordiv, "divui": operator.floordiv,
}  # fmt: skip
_VIEWS = ("memdesc_trans", "memdesc_reshape", "memdesc_subslice", "memdesc_reinterpret")
_COPIES = ("async_copy_global_to_local", "async_tma_copy_global_to_local", "async_tma_gather")


class Place(NamedTuple):
    """An allocation, and which of its places; None is any."""

    buffer: str
    slot: int | None = None

    def meets(self, other: Place) -> bool:
        same = self.slot == other.slot or None in (self.slot, other.slot)
        return self.buffer == other.buffer and same


Value = int | Place | None


@dataclass
class _Line:
    text: str
    regions: list[list[_Line]] = field(default_factory=list)


def overwritten(launch: Launched) -> list[str]:
    """Each copy of a kernel into a place that a product may still read; none of CUDA C++."""
    asm = launch.compiled.asm
    return overwritten_in(asm["ttgir"]) if "ttgir" in asm else []


def overwritten_in(ttgir: str) -> list[str]:
    """The same of a kernel's text: both lines, once."""
    found: dict[str, None] = {}
    for line in _parsed(ttgir):
        if line.text.startswith("tt.func"):
            _Run(found).all(line.regions[0])
    return list(found)


def _parsed(ttgir: str) -> list[_Line]:
    """The functions of a module."""
    root: list[_Line] = []
    open_regions = [root]
    for raw in ttgir.splitlines():
        text = _LOCATION.sub("", raw).strip()
        if text.startswith("}"):
            open_regions.pop()
            if not text.endswith("{"):
                continue
            open_regions[-1][-1].regions.append([])
            open_regions.append(open_regions[-1][-1].regions[-1])
            continue
        if text.startswith("module"):
            open_regions.append(root)
            continue
        line = _Line(text)
        open_regions[-1].append(line)
        if text.endswith("{"):
            line.regions.append([])
            open_regions.append(line.regions[0])
    return root


class _Run:
    """One pass through a function's text."""

    def __init__(self, found: dict[str, None]) -> None:
        self.found = found
        self.values: dict[str, Value] = {}
        self.running: list[tuple[str, list[Place]]] = []  # products that nobody has waited for

    def all(self, lines: list[_Line]) -> list[Value]:
        """Run lines; what the last of them yields."""
        yielded: list[Value] = []
        for line in lines:
            match = _RESULT.match(line.text)
            result, text = match.groups() if match else ("", line.text)
            name = _OPERATION.match(text)
            operation = name.group(1) if name else ""
            if operation in ("scf.yield", "scf.condition"):
                yielded = [self.value(n) for n in _NAME.findall(text)]
            elif line.regions:
                self.results(result, self.regions(operation, text, line))
            else:
                self.results(result, [self.one(operation.rpartition(".")[2], text)])
        return yielded

    def value(self, name: str) -> Value:
        return self.values.get(name)

    def results(self, name: str, made: list[Value]) -> None:
        for number, value in enumerate(made):
            self.values[f"{name}#{number}"] = value
        self.values[name] = made[0] if made else None

    def regions(self, operation: str, text: str, line: _Line) -> list[Value]:
        if operation != "scf.for":  # of what is one way or another, both
            return [v for region in line.regions for v in self.all(region)]
        loop = _LOOP.match(text)
        assert loop, text
        at, first, step = loop.group(1), self.value(loop.group(2)), self.value(loop.group(3))
        _, _, carried = text.partition("iter_args(")
        pairs = _CARRIED.findall(carried.partition(") ->")[0])
        state = [self.value(before) for _, before in pairs]
        inner = any(_RESULT.sub(r"\2", each.text).startswith("scf.for") for each in line.regions[0])
        for turn in range(OUTER_TURNS if inner else TURNS):
            at_turn = None
            if isinstance(first, int) and isinstance(step, int):
                at_turn = first + turn * step
            self.values[at] = at_turn
            self.values.update({name: v for (name, _), v in zip(pairs, state, strict=True)})
            state = self.all(line.regions[0]) or state
        return state

    def one(self, operation: str, text: str) -> Value:
        names = _NAME.findall(text)
        given = [self.value(name) for name in names]
        if operation == "constant":
            number = re.search(r"constant (-?\d+) : i(?:32|64)|constant (true|false)$", text)
            return number and (
                int(number.group(1)) if number.group(1) else number.group(2) == "true"
            )
        if operation == "local_alloc":
            return Place(re.sub(r" : .*-> !ttg", " !ttg", text) + str(len(self.values)))
        if operation == "memdesc_index":
            place, slot = given[0], given[1] if len(given) > 1 else None
            if isinstance(place, Place):
                return Place(place.buffer, slot if isinstance(slot, int) else None)
        elif operation in _VIEWS:
            return given[0]
        elif operation == "warp_group_dot":
            places = [v for v in given[:2] if isinstance(v, Place)]
            self.running = [*self.running, (text, places)] if "isAsync = true" in text else []
        elif operation == "warp_group_dot_wait":
            pending = int(text.partition("pendings = ")[2].partition(" ")[0])
            self.running = self.running[len(self.running) - pending :] if pending else []
            return given[0]
        elif operation in _COPIES:
            for to in (v for v in given if isinstance(v, Place)):
                for product, places in self.running:
                    if any(to.meets(place) for place in places):
                        self.found[f"{text[:90]} is written while {product[:70]} may read it"] = (
                            None
                        )
        elif given and len(known := [v for v in given if isinstance(v, int)]) == len(given):
            return self.number(operation, text, known)
        return None

    def number(self, operation: str, text: str, given: list[int]) -> Value:
        if operation == "cmpi":
            predicate = re.search(r"cmpi (\w+)", text)
            return int(_PREDICATE[predicate.group(1)](*given)) if predicate else None
        if operation == "select":
            return given[1] if given[0] else given[2]
        if operation in ("extsi", "extui", "trunci", "index_cast"):
            return given[0]
        if operation in _NUMBERS and len(given) == 2 and (given[1] or "div" not in operation):
            return _NUMBERS[operation](*given)
        return None
