"""Calls of machine code one after another, between which no thread leaves.

Without it, each of a network's steps wakes torch's threads and waits until all of them have come
and gone, and a thread from which another process has taken its core holds up every step. Here the
threads come once. Of a step each takes items while there are some, and goes on when those that took
any are done: a thread that has not come is not waited for, and one that waits for long sleeps, so
that the one that it waits for may have its core. One thread of two begins with the first half of
the items, the other with the second, and then helps: so each mostly reads what it wrote a step ago,
which lies in its own caches.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch

from tessella.device.x86.assembler import Assembler, At
from tessella.device.x86.code import CACHE_LINE, NUMBER, MachineCode, Ready, require_instructions

# numbers of a step's row, and behind them, in a cache line of their own, those of its call
FUNCTION, MOST, ENTERED, ACTIVE, GIVEN = 0, 1, 2, 3, CACHE_LINE // NUMBER
TABLE, COUNT = 1, 2  # numbers of a call, behind its counter
STEPS, ROWS, HALF_BYTES, CAME, SECONDS, NANOSECONDS = range(6)  # numbers of the chain's call
MANY = 2**31 - 1  # threads
# of 40 ns, before a thread that waits lets others have its core, and between two times
SPINS = 5000
YIELDS = 4  # so often it stays ready, then it sleeps: of 20 µs it wakes after some 90
SCHED_YIELD, NANOSLEEP = 24, 35  # Linux' numbers of the system calls
# A thread that only yields stays ready, and the system moves none to its core that waits behind
# another process (load 9 on two cores, MobileNetV3-L b8, sleeping after 0.2 ms: 304 · 234,
# 308 · 277 and 256 · 231 ms)
NAP_NS = 20_000

T = TypeVar("T")


class Chain:
    """Calls as one, to be called as each of them is. Not for two threads at once."""

    def __init__(self, calls: Sequence[Ready]) -> None:
        self._calls = calls  # hold what the rows have addresses of
        longest = max(len(call.numbers) for call in calls)
        half = -(-longest // GIVEN) * GIVEN
        begun = np.zeros((len(calls), GIVEN + 2 * half), np.int64)
        for row, call in zip(begun, calls, strict=True):
            row[FUNCTION] = call.code.address
            row[MOST], *halves = _halves(call)
            for begin, numbers in zip((GIVEN, GIVEN + half), halves, strict=True):
                row[begin : begin + len(numbers)] = numbers
        self._begun = begun
        self._memory = torch.empty(begun.nbytes + CACHE_LINE, dtype=torch.uint8, device="cpu")
        aligned = -self._memory.data_ptr() % CACHE_LINE
        place = self._memory[aligned : aligned + begun.nbytes]
        self._rows = place.numpy().view(np.int64).reshape(begun.shape)
        self._most = int(begun[:, MOST].max())
        self._given = (ctypes.c_int64 * 6)(
            len(calls), place.data_ptr(), half * NUMBER, 0, 0, NAP_NS
        )
        self._code = _machine_code()

    def __call__(self, _: object = None) -> None:
        self._rows[...] = self._begun
        self._given[CAME] = 0
        self._code.call(self._given, min(self._most, torch.get_num_threads()))


def _halves(call: Ready) -> tuple[int, list[int], list[int]]:
    """How many threads may take part in a call, and what it is given for both halves of its items;
    for all and for none where the workspace has too few parts for threads that do both.
    """
    most, first, second = call.most, list(call.numbers), list(call.numbers)
    has_parts = len(call.counters) > 1
    middle = -(-call.items.count // 2)
    if most == 1 or (has_parts and (most or 0) < 2 * torch.get_num_threads()):
        middle = call.items.count
    elif has_parts:
        assert most is not None, "as many as there are parts"
        most //= 2
        second[call.counters[-1]] = most
    second[TABLE] += middle * call.items.row_bytes
    first[COUNT], second[COUNT] = middle, call.items.count - middle
    return MANY if most is None else most, first, second


def chained(calls: Sequence[T], ready: Callable[[T], Ready | None]) -> Iterator[T | Chain]:
    """The calls, those together that follow one another.

    Args:
        ready: what a call is as machine code; None if it is not, or not that alone.
    """
    for is_ready, some in itertools.groupby(calls, lambda call: ready(call) is not None):
        together = list(some)
        if is_ready and len(together) > 1:
            yield Chain([made for call in together if (made := ready(call)) is not None])
        else:
            yield from together


class _Assembler(Assembler):
    """And what only this code does."""

    def pause(self) -> None:
        self._emit("pause", b"\xf3\x90")

    def system_call(self) -> None:
        """Of the number in rax. It overwrites rax, rcx and r11."""
        self._emit("syscall", b"\x0f\x05")


@functools.cache
def _machine_code() -> MachineCode:
    return MachineCode(written().code())


def written() -> Assembler:
    """The code. r12: a step's row; r13: steps that are left; rbp: bytes of half a call's numbers,
    and r14: of those, where in a row the thread's own half lies, from ``GIVEN`` on; r15: the call.
    """
    a = _Assembler(require_instructions())
    with a.function(NUMBER):  # a function finds the stack as the system's calls leave it
        a.move("r15", "rdi")
        for to, number in (("r13", STEPS), ("r12", ROWS), ("rbp", HALF_BYTES)):
            a.load(to, At(base="r15", distance=number * NUMBER))
        _choose_half(a)
        with a.counted("step", "r13"):
            a.set("rax", 1)
            a.fetch_add(_of(ENTERED), "rax")
            a.load("rcx", _of(MOST))
            a.compare("rax", "rcx")
            a.jump_if("jge", "too many")
            _take_part(a)
            a.label("too many")
            _wait(a)
            a.add("r12", GIVEN * NUMBER)
            a.add("r12", "rbp")
            a.add("r12", "rbp")
    return a


def _of(number: int) -> At:
    """A number of the step's row."""
    return At(base="r12", distance=number * NUMBER)


def _choose_half(a: Assembler) -> None:
    """Of two threads that come one after the other each has another half."""
    a.set("rax", 1)
    a.fetch_add(At(base="r15", distance=CAME * NUMBER), "rax")
    a.set("r14", 0)
    a.label("which")
    a.compare("rax", 1)
    a.jump_if("jl", "begin")
    a.move("r14", "rbp")
    a.jump_if("je", "begin")
    a.set("r14", 0)
    a.subtract("rax", 2)
    a.jump("which")
    a.label("begin")


def _take_part(a: _Assembler) -> None:
    """The thread's own half, then what is left of the other."""
    # first active, then asks for items: who sees neither item nor active may go on
    a.set("rax", 1)
    a.fetch_add(_of(ACTIVE), "rax")
    for half in ("own", "other"):
        a.move("rdi", "r12")
        a.add("rdi", GIVEN * NUMBER)
        if half == "own":
            a.add("rdi", "r14")
        else:
            a.add("rdi", "rbp")
            a.subtract("rdi", "r14")
        _jump_if_taken(a, f"nothing of its {half}")
        a.call(_of(FUNCTION))
        a.label(f"nothing of its {half}")
    a.set("rax", -1)
    a.fetch_add(_of(ACTIVE), "rax")


def _wait(a: _Assembler) -> None:
    """Until all items are taken, and those that took them are done."""
    a.set("r8", YIELDS)
    a.set("rbx", SPINS)
    a.label("wait")
    a.move("rdi", "r12")
    a.add("rdi", GIVEN * NUMBER)
    for half in ("first", "second"):
        _jump_if_taken(a, f"{half} taken")
        a.jump("pause")
        a.label(f"{half} taken")
        a.add("rdi", "rbp")
    a.load("rax", _of(ACTIVE))
    a.compare("rax", 0)
    a.jump_if("je", "done")
    a.label("pause")
    a.pause()
    a.subtract("rbx", 1)
    a.jump_if("jne", "wait")
    a.set("rax", SCHED_YIELD)
    a.subtract("r8", 1)
    a.compare("r8", 0)
    a.jump_if("jge", "let others")
    a.move("rdi", "r15")
    a.add("rdi", SECONDS * NUMBER)
    a.set("rsi", 0)
    a.set("rax", NANOSLEEP)
    a.label("let others")
    a.system_call()
    a.set("rbx", SPINS)
    a.jump("wait")
    a.label("done")


def _jump_if_taken(a: Assembler, label: str) -> None:
    """Where nobody finds an item any more of the half whose numbers begin at rdi."""
    a.load("rax", At(base="rdi"))
    a.load("rcx", At(base="rdi", distance=COUNT * NUMBER))
    a.compare("rax", "rcx")
    a.jump_if("jge", label)
