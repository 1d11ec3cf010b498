"""Machine code in this process: memory that may run, and torch's threads to run it."""

from __future__ import annotations

import ctypes
import functools
import mmap
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tessella.core.errors import KernelError
from tessella.core.processor import may_use, on_tiles, tiles_refusal, widest_allowed
from tessella.device.x86.assembler import AVX2, AVX512, Assembler, At, InstructionSet

CACHE_LINE = 64  # bytes: at a multiple of it a workspace's parts begin
MAX_BYTES = 2**31 - 1  # distances have 32 bits
NUMBER = 8  # bytes, in tables and in what a function is given
_COUNTER, _ITEMS, _COUNT, _FIRST = range(4)  # numbers of a call: those of ``run`` come last
# instruction sets beside those of vectors alone, each with the one that it extends
EXTENDED = {
    "avx2_vnni": AVX2,
    "avx512_vnni": AVX512,
    "avx512_bf16": AVX512,
    "amx_int8": AVX512,
    "amx_bf16": AVX512,
}
TORCH = re.compile(r"/libtorch_cpu\.so$")  # it names the OpenMP whose threads it uses


@functools.cache
def instructions() -> InstructionSet | None:
    """The widest vectors that torch uses here and ``TESSELLA_ISA`` allows, or None if no code of
    ours is written for them."""
    here = {"AVX512": AVX512, "AVX2": AVX2}.get(torch.backends.cpu.get_cpu_capability())
    return AVX2 if here and (widest_allowed() or "").startswith("avx2") else here


def require_instructions() -> InstructionSet:
    """``instructions()`` where ``refusal`` has been asked."""
    here = instructions()
    assert here is not None, "asked for in spite of refusal()"
    return here


def refusal(isa: str) -> str | None:
    """Why this machine cannot run code of an instruction set, or None.

    It can if that is the widest of its own, or one of ``EXTENDED`` that extends the widest.
    """
    here, extended = instructions(), EXTENDED.get(isa)
    vectors = isa if extended is None else extended.name
    if here is None or here.name != vectors:
        return f"needs a processor whose widest vectors are those of {vectors}"
    if extended is not None and not may_use(isa):
        return f"this processor has no {isa}, or TESSELLA_ISA forbids it"
    if on_tiles(isa) and (why := tiles_refusal()) is not None:
        return why
    return _refusal()


@functools.cache
def _refusal() -> str | None:
    if _parallel() is None:
        return "finds no OpenMP in this process, whose threads it would use"
    try:
        _executable(b"\xc3")
    except OSError:
        return "this system gives no memory that may run"
    return None


def adds_in_32_bits() -> bool:
    """Whether code of ours multiplies int8 with VNNI or AMX here, whose sums nothing leaves."""
    return any(refusal(isa) is None for isa in ("amx_int8", "avx512_vnni", "avx2_vnni"))


def has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 (AVX512_BF16)."""
    return instructions() == AVX512 and may_use("avx512_bf16")


class MachineCode:
    """A function of one address, which all of torch's threads call at the same time.

    At that address, which rdi holds, stand a counter from 0, by which threads take their items,
    the address of the items and how many there are, and the numbers that ``run`` was given.

    Args:
        held: what the code has addresses of.
    """

    def __init__(self, code: bytes, *held: object) -> None:
        parallel = _parallel()
        assert parallel is not None, "asked for in spite of refusal()"
        self._parallel, self._held = parallel, held
        self._memory, self.address = _executable(code)
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)

    def call(self, given: object, threads: int) -> None:
        """Call it with the address of some numbers."""
        if threads == 1:
            self._alone(given)
        else:
            self._parallel(self.address, given, threads, 0)

    def run(self, items: Table, *numbers: int, threads: int) -> None:
        """Run it on all items."""
        kind, pack = _call_of(_FIRST + len(numbers))
        self.call(kind.from_buffer_copy(pack(0, items.address, items.count, *numbers)), threads)

    def ready(
        self,
        items: Table,
        *numbers: int,
        most: int | None,
        counts: bool = False,
        held: object = None,
    ) -> Ready:
        """``run`` with these numbers, as a function that may be called again and again.

        Args:
            most: threads at most.
            counts: the last number is a counter from 0, too.
            held: what the numbers have addresses of, but for the tensors of the call.
        """
        counters = (_COUNTER, _FIRST + len(numbers) - 1) if counts else (_COUNTER,)
        return Ready(self, items, (0, items.address, items.count, *numbers), most, counters, held)


class Ready:
    """Machine code and what it is given: a call that reads and writes the same memory each time.
    Not for two threads at once.

    Attributes:
        numbers: all that it is given; those at ``counters`` begin as 0: that of ``items``, and
            perhaps that of the workspace's parts, of which there are ``most``.
        most: threads at most.
    """

    def __init__(
        self,
        code: MachineCode,
        items: Table,
        numbers: tuple[int, ...],
        most: int | None,
        counters: tuple[int, ...],
        held: object,
    ) -> None:
        self.code, self.numbers, self.most, self._held = code, numbers, most, held
        kind, pack = _call_of(len(numbers))
        self.items, self.counters = items, counters
        self._given = kind.from_buffer_copy(pack(*numbers))

    def __call__(self, _: object = None) -> None:
        for counter in self.counters:
            self._given[counter] = 0
        self.code.call(self._given, 1 if self.most == 1 else _threads(self.most))


@dataclass(frozen=True)
class Launch:
    """Machine code on tensors: what a kernel is bound to.

    Attributes:
        numbers: what the code is given, of the inputs and ``out`` behind them; of a workspace also
            where that begins, and a counter by which threads take parts of it.
        few: it is not worth waking a thread.
        into: the input whose memory the result takes, where no ``out`` is given.
        needed: bytes of the workspace.
        parts: of the workspace: more threads than that find none.
        workspace: where it is always the same one.
    """

    made: MachineCode
    items: Table
    numbers: Callable[..., tuple[int, ...]]
    few: bool = False
    into: int | None = None
    needed: int = 0
    parts: int | None = None
    workspace: torch.Tensor | None = None

    def __call__(
        self,
        *inputs: torch.Tensor,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if workspace is not None:
            self._require(workspace)
        result = self.result(*inputs, out=out)
        given = self._given(workspace, *inputs, result)
        self.made.run(self.items, *given, threads=_threads(self._most))
        return result

    def within(self, workspace: torch.Tensor) -> Launch:
        """The same with a workspace of its own: uint8.

        Raises:
            KernelError: it is too small.
        """
        self._require(workspace)
        return replace(self, workspace=workspace)

    def _require(self, workspace: torch.Tensor) -> None:
        if workspace.nbytes < self.needed:
            raise KernelError(
                "the workspace is too small",
                seen=f"{workspace.nbytes} bytes",
                fix=f"{self.needed} bytes",
            )

    @property
    def _most(self) -> int | None:
        return 1 if self.few else self.parts

    def _given(self, workspace: torch.Tensor | None, *tensors: torch.Tensor) -> tuple[int, ...]:
        numbers = self.numbers(*tensors)
        if not self.needed:
            return numbers
        workspace = self.workspace if workspace is None else workspace
        if workspace is None:
            raise TypeError("asks for a workspace")
        begin = workspace.data_ptr()
        return *numbers, begin + -begin % CACHE_LINE, 0

    def result(self, *inputs: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Where the result of these inputs lies."""
        if out is not None:
            return out
        if self.into is None:
            raise TypeError("a result needs a place")
        return inputs[self.into]

    def at(self, *inputs: torch.Tensor, out: torch.Tensor | None) -> Ready:
        """The call on tensors that stay where they are, ready: their addresses are asked for once,
        which is 1.5 of a call's 2 µs, and more where its code is cold.
        """
        given = self._given(None, *inputs, self.result(*inputs, out=out))
        counts = self.needed > 0
        # factors of a norm, for one, are nobody's but those of ``numbers``
        return self.made.ready(self.items, *given, most=self._most, counts=counts, held=self)


def _threads(most: int | None) -> int:
    """Torch's, or fewer."""
    return torch.get_num_threads() if most is None else min(most, torch.get_num_threads())


@functools.cache
def _call_of(numbers: int) -> tuple[Any, Callable[..., bytes]]:
    """So many numbers in memory, and what packs them: a third of the time of ctypes' own."""
    return ctypes.c_int64 * numbers, struct.Struct(f"{numbers}q").pack


class Table:
    """Rows of numbers, all of one length, that code reads by their address.

    Args:
        held: what the rows have addresses of.
    """

    def __init__(
        self, rows: npt.NDArray[np.int64] | Sequence[Sequence[int]], *held: object
    ) -> None:
        self.count, self._held = len(rows), held
        self._numbers = np.ascontiguousarray(rows, np.int64)
        self.address = self._numbers.ctypes.data
        self.row_bytes = self._numbers.strides[0]


def given(number: int) -> At:
    """The place in memory of a number that ``run`` was given, counted from 0."""
    return At(base="rdi", distance=(_FIRST + number) * NUMBER)


def require_inside(name: str, begins: torch.Tensor, spans: torch.Tensor, nbytes: int) -> None:
    """Refuse code that would read or write beside a tensor: asked of each row of a table.

    Args:
        name: of the tensor, for the error.
        begins: where each row begins, in bytes from the tensor's first.
        spans: how many bytes it reads or writes from there on.
        nbytes: how far the tensor reaches.

    Raises:
        KernelError: a row lies outside.
    """
    first, last = int(begins.min()), int((begins + spans).max())
    if first < 0 or last > nbytes or int(spans.min()) < 0:
        raise KernelError(
            f"machine code would leave its {name}",
            seen=f"bytes {first} to {last} of {nbytes}",
            fix="report the problem that it was asked for",
        )


@contextmanager
def each_item(a: Assembler, to: str, row: int) -> Iterator[None]:
    """Code for each item that no other thread has taken; after it the loop ``next`` goes on."""
    take_item(a, to, row)
    yield
    a.jump("next")
    a.label("done")


def take_item(a: Assembler, to: str, row: int) -> None:
    """Code that begins the loop ``next``: the address of the next item, a row of so many numbers,
    that no other thread has taken, or to the label ``done`` after the last. It uses rax.
    """
    a.label("next")
    a.set("rax", 1)
    a.fetch_add(At(base="rdi", distance=_COUNTER * NUMBER), "rax")
    a.load(to, At(base="rdi", distance=_COUNT * NUMBER))
    a.compare("rax", to)
    a.jump_if("jge", "done")
    a.multiply("rax", row * NUMBER)
    a.load(to, At(base="rdi", distance=_ITEMS * NUMBER))
    a.add(to, "rax")


def take_part(a: Assembler, to: str, part: At, taken: At, part_bytes: int) -> None:
    """Code that gives a thread its own part of the workspace, whose address goes to a register.

    Args:
        part: where the call has the workspace's begin; ``taken``: its counter, of parts.
    """
    a.set(to, 1)
    a.fetch_add(taken, to)
    a.multiply(to, part_bytes)
    a.add_stored(to, part)


def _executable(code: bytes) -> tuple[mmap.mmap, int]:
    """Memory that may run and no longer be written to, and its address; ``OSError`` if not."""
    memory = mmap.mmap(-1, len(code))
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if protect(address, len(code), mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "mprotect")
    return memory, address


@functools.cache
def _parallel() -> Callable[..., None] | None:
    """``GOMP_parallel`` of torch's OpenMP: GNU's; LLVM's and Intel's have it too."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    for file in dict.fromkeys(line.split()[-1] for line in maps.read_text().splitlines()):
        if TORCH.search(file):
            # Looked up as torch's own: scikit-learn brings a second libgomp, and threads of both
            # that wait for work take each other's cores (a LeNet 0.2 ms, 2 to 10 with both).
            library = ctypes.CDLL(file)
            if hasattr(library, "GOMP_parallel"):
                function = library["GOMP_parallel"]
                address, number = ctypes.c_void_p, ctypes.c_uint
                function.argtypes, function.restype = (address, address, number, number), None
                return function
    return None
