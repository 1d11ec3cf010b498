"""Machine code for x86-64 with AVX-512 or AVX2: the few instructions that our kernels are made of.

No compiler is needed where a plan is loaded, and none is asked: a kernel's loop is known when its
problem is known, and writing it down takes a millisecond or two. Operands stand as in Intel's
manual, the result first; addresses are a register and a distance.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: chapters 2.3 (VEX)
and 2.7 (EVEX), the opcodes in its chapters 3 to 5.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tessella.device.x86.opcodes import (
    COMPARISONS,
    CONVERSIONS,
    FIRST_AVX512,
    M0F,
    M0F3A,
    M0F38,
    NONE,
    ONLY_AVX512,
    VECTOR,
    X66,
    XF2,
    XF3,
)

REGISTERS = (
    "rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi",
    "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15",
)  # fmt: skip
NUMBER = {name: i for i, name in enumerate(REGISTERS)}

SAVED = ("rbx", "rbp", "r12", "r13", "r14", "r15")  # what a function gives back as it was

CONDITIONS = {"jge": 0x8D, "jl": 0x8C, "je": 0x84, "jne": 0x85}


@dataclass(frozen=True, kw_only=True)
class InstructionSet:
    """An instruction set, by its vector registers.

    Attributes:
        name: as the catalogue has it.
        vector_bytes: of a register.
        vectors: how many registers there are.
    """

    name: str
    vector_bytes: int
    vectors: int

    @property
    def lanes(self) -> int:
        """How many float32 numbers a register holds."""
        return self.vector_bytes // 4


AVX512 = InstructionSet(name="avx512", vector_bytes=64, vectors=32)
AVX2 = InstructionSet(name="avx2", vector_bytes=32, vectors=16)  # with FMA


@dataclass(frozen=True, kw_only=True)
class At:
    """An operand in memory, ``distance`` bytes behind the address that a register holds."""

    base: str
    distance: int = 0
    index: str | None = None  # one of the first eight registers, which is added too

    def __str__(self) -> str:
        sign = "-" if self.distance < 0 else "+"
        index = f"+{self.index}*1" if self.index else ""
        return f"[{self.base}{index}{sign}{abs(self.distance):#x}]"


_WRITTEN: dict[tuple[object, ...], tuple[list[str], bytes]] = {}  # as text and code, by ``once``


class Assembler:
    """Instructions, one method each; ``listing`` has them as text, as ``objdump`` says them.

    Vectors are named by number, and so are masks, which only AVX-512 has. A mask of a load or of a
    store leaves out the bytes, of a comparison and ``vmovaps`` the numbers, whose bit is 0.

    Args:
        instructions: AVX-512's or AVX2's.
    """

    def __init__(self, instructions: InstructionSet = AVX512) -> None:
        self.instructions = instructions
        self._wide = instructions == AVX512
        self._name = "zmm" if self._wide else "ymm"
        self._place = f"{self._name.upper()}WORD PTR"
        self.listing: list[str] = []
        self._begins: list[int] = []  # of each instruction of the listing
        self._code = bytearray()
        self._labels: dict[str, int] = {}
        self._jumps: list[tuple[int, str]] = []

    def code(self) -> bytes:
        """The machine code that was written, with the distances of its jumps filled in."""
        code = bytearray(self._code)
        for end, label in self._jumps:
            struct.pack_into("<i", code, end - 4, self._labels[label] - end)
        return bytes(code)

    def once(self, key: tuple[object, ...], write: Callable[[], None]) -> None:
        """Instructions without labels that this process writes once for each key: half of what the
        convolutions of a network are made of.
        """
        named = self.instructions, *key
        if named not in _WRITTEN:
            lines, begin = len(self.listing), len(self._code)
            write()
            _WRITTEN[named] = self.listing[lines:], bytes(self._code[begin:])
            return
        self._append(*_WRITTEN[named])

    def interleave(self, writes: Sequence[Callable[[Assembler], None]]) -> None:
        """Instructions without labels, of each writer one in turn: where each waits for the one
        before, a processor that looks some tens ahead finds others to do.
        """
        made = [Assembler(self.instructions) for _ in writes]
        for one, write in zip(made, writes, strict=True):
            write(one)
        for together in itertools.zip_longest(*(one._parts() for one in made)):
            for part in together:
                if part is not None:
                    self._append([part[0]], part[1])

    def _parts(self) -> list[tuple[str, bytes]]:
        """The instructions one by one, as text and code."""
        ends = [*self._begins[1:], len(self._code)]
        codes = [bytes(self._code[i:j]) for i, j in zip(self._begins, ends, strict=True)]
        return list(zip(self.listing, codes, strict=True))

    def _append(self, listing: list[str], code: bytes) -> None:
        self._begins += [len(self._code)] * len(listing)
        self.listing += listing
        self._code += code

    # labels and jumps

    def label(self, name: str) -> None:
        assert name not in self._labels, name
        self._labels[name] = len(self._code)

    def jump(self, label: str) -> None:
        self._emit("jmp", b"\xe9\0\0\0\0")
        self._jumps.append((len(self._code), label))

    def jump_if(self, condition: str, label: str) -> None:
        """Jump if the comparison, subtraction or addition just before had this outcome."""
        self._emit(condition, bytes((0x0F, CONDITIONS[condition])) + bytes(4))
        self._jumps.append((len(self._code), label))

    @contextmanager
    def counted(self, name: str, left: str | At) -> Iterator[None]:
        """A loop that ends when a register or a number in memory has been counted down to 0."""
        self.label(name)
        yield
        if isinstance(left, At):
            self.add_to_stored(left, -1)
        else:
            self.subtract(left, 1)
        self.jump_if("jne", name)

    @contextmanager
    def stepped(self, name: str, register: str, step: int, end: str | int) -> Iterator[None]:
        """A loop after each round of which a register grows by ``step``, until it is ``end``."""
        self.label(name)
        yield
        self.add(register, step)
        self.compare(register, end)
        self.jump_if("jne", name)

    @contextmanager
    def function(self, kept_bytes: int = 0) -> Iterator[None]:
        """All code: inside, all registers but rsp may be used, and so many bytes of the stack."""
        self.enter()
        if kept_bytes:
            self.subtract("rsp", kept_bytes)
        yield
        if kept_bytes:
            self.add("rsp", kept_bytes)
        self.leave()

    def enter(self) -> None:
        """Before anything else: all registers but rsp may be used then."""
        for register in SAVED:
            self._emit(f"push {register}", self._short(0x50, register))

    def leave(self) -> None:
        """Back to the caller, who may have been compiled without AVX."""
        self._emit("vzeroupper", b"\xc5\xf8\x77")
        for register in reversed(SAVED):
            self._emit(f"pop {register}", self._short(0x58, register))
        self._emit("ret", b"\xc3")

    # registers

    def set(self, register: str, number: int) -> None:
        """All 64 bits."""
        number &= 2**64 - 1
        i = NUMBER[register]
        head = bytes((0x48 | i >> 3, 0xB8 | i & 7))
        self._emit(f"movabs {register},{number:#x}", head + struct.pack("<Q", number))

    def move(self, to: str, source: str) -> None:
        self._emit(f"mov {to},{source}", self._pair(0x89, source, to))

    def load(self, to: str, source: At) -> None:
        self._emit(f"mov {to},QWORD PTR {source}", self._memory(b"\x8b", to, source))

    def load_short(self, to: str, source: At) -> None:
        """32 bits with their sign."""
        self._emit(f"movsxd {to},DWORD PTR {source}", self._memory(b"\x63", to, source))

    def store(self, to: At, source: str) -> None:
        self._emit(f"mov QWORD PTR {to},{source}", self._memory(b"\x89", source, to))

    def store_short(self, to: At, source: str) -> None:
        """The lower 32 bits of one of the first eight registers."""
        assert NUMBER[source] < 8
        code = self._memory(b"\x89", source, to, wide=False)
        self._emit(f"mov DWORD PTR {to},e{source[1:]}", code)

    def store_number(self, to: At, number: int) -> None:
        code = self._memory(b"\xc7", REGISTERS[0], to) + struct.pack("<i", number)
        self._emit(f"mov QWORD PTR {to},{number:#x}", code)

    def add_stored(self, to: str, source: At) -> None:
        self._emit(f"add {to},QWORD PTR {source}", self._memory(b"\x03", to, source))

    def add_to_stored(self, to: At, number: int) -> None:
        code = self._memory(b"\x81", REGISTERS[0], to) + struct.pack("<i", number)
        self._emit(f"add QWORD PTR {to},{number & (2**64 - 1):#x}", code)

    def load_if_negative(self, to: str, source: At) -> None:
        """If the register itself is negative."""
        self._emit(f"test {to},{to}", self._pair(0x85, to, to))
        self._emit(f"cmovs {to},QWORD PTR {source}", self._memory(b"\x0f\x48", to, source))

    def add(self, to: str, other: str | int) -> None:
        self._add("add", 0x01, 0, to, other)

    def subtract(self, to: str, other: str | int) -> None:
        self._add("sub", 0x29, 5, to, other)

    def compare(self, one: str, other: str | int) -> None:
        self._add("cmp", 0x39, 7, one, other)

    def clear_low_bits(self, register: str, count: int) -> None:
        """At most seven bits: an address becomes one that is divisible by 2 ** count."""
        i, kept = NUMBER[register], -(1 << count)
        said = f"{kept & (2**64 - 1):#x}"
        code = bytes((0x48 | i >> 3, 0x83, 0xE0 | i & 7)) + struct.pack("<b", kept)
        self._emit(f"and {register},{said}", code)

    def multiply(self, to: str, number: int) -> None:
        code = self._pair(0x69, to, to) + struct.pack("<i", number)
        self._emit(f"imul {to},{to},{number:#x}", code)

    def call(self, place: At) -> None:
        """A function whose address lies there."""
        code = self._memory(b"\xff", REGISTERS[2], place, wide=False)
        self._emit(f"call QWORD PTR {place}", code)

    def fetch_add(self, place: At, register: str) -> None:
        """Adds to memory as one step for all threads; the register gets what was there."""
        code = b"\xf0" + self._memory(b"\x0f\xc1", register, place)
        self._emit(f"lock xadd QWORD PTR {place},{register}", code)

    def prefetch(self, place: At, *, cache: int = 1) -> None:
        """Into the first cache, or the second."""
        code = self._memory(b"\x0f\x18", REGISTERS[cache], place, wide=False)
        self._emit(f"prefetcht{cache - 1} BYTE PTR {place}", code)

    # vectors

    def mask(self, mask: int, register: str) -> None:
        """The bits of one of the first eight registers."""
        assert NUMBER[register] < 8
        self._require_avx512()
        code = bytes((0xC4, 0xE1, 0xFB, 0x92, 0xC0 | mask << 3 | NUMBER[register]))
        self._emit(f"kmovq k{mask},{register}", code)

    def copy_mask(self, to: int, source: int) -> None:
        self._require_avx512()
        code = bytes((0xC4, 0xE1, 0xF8, 0x90, 0xC0 | to << 3 | source))
        self._emit(f"kmovq k{to},k{source}", code)

    def broadcast_bits(self, to: int, register: str) -> None:
        """The lower 32 bits of one of the first eight registers, in each lane."""
        assert NUMBER[register] < 8
        name, i = f"e{register[1:]}", NUMBER[register]
        if self._wide:
            self._vector(f"vpbroadcastd zmm{to},{name}", X66, M0F38, 0x7C, to, 0, i)
        else:
            self._vector(f"vmovd xmm{to},{name}", X66, M0F, 0x6E, to, 0, i, short=True)
            self._vector(f"vpbroadcastd ymm{to},xmm{to}", X66, M0F38, 0x58, to, 0, to)

    def broadcast(self, to: int, source: At) -> None:
        """32 bits, in each lane."""
        text = f"vbroadcastss {self._name}{to},DWORD PTR {source}"
        self._vector(text, X66, M0F38, 0x18, to, 0, source)

    def broadcast_short(self, to: int, source: At) -> None:
        """16 bits, in each half of each lane."""
        self._require_avx512()
        text = f"vpbroadcastw zmm{to},WORD PTR {source}"
        self._vector(text, X66, M0F38, 0x79, to, 0, source)

    def load_vector(self, to: int, source: At, mask: int = 0) -> None:
        """Zero where the mask is."""
        masked = f"{{k{mask}}}{{z}}" if mask else ""
        text = f"{self._name}{to}{masked},{self._place} {source}"
        self._copy(text, 0x6F, to, source, mask=mask, zero=bool(mask))

    def expand_words(self, to: int, source: At, mask: int) -> None:
        """The next 16 bits from memory for each lane of 16 that the mask has; the others are 0.

        AVX-512 with VBMI2, which every processor with AMX has.
        """
        self._require_avx512()
        text = f"vpexpandw zmm{to}{{k{mask}}}{{z}},ZMMWORD PTR {source}"
        self._vector(text, X66, M0F38, 0x62, to, 0, source, mask=mask, zero=True, wide=True)

    def store_vector(self, to: At, source: int, mask: int = 0) -> None:
        masked = f"{{k{mask}}}" if mask else ""
        text = f"{self._place} {to}{masked},{self._name}{source}"
        self._copy(text, 0x7F, source, to, mask=mask)

    def _copy(self, text: str, opcode: int, reg: int, place: At, **masked: Any) -> None:
        """Copy a vector from memory or to it, by bytes, since masks of AVX-512 count bytes here."""
        name, prefix = ("vmovdqu8", XF2) if self._wide else ("vmovdqu", XF3)
        self._vector(f"{name} {text}", prefix, M0F, opcode, reg, 0, place, **masked)

    def load_some(self, to: int, source: At, mask: int) -> None:
        """The lanes of AVX2 whose highest bit the vector ``mask`` has; the others are 0."""
        assert not self._wide, "AVX-512 has masks of its own"
        text = f"vmaskmovps ymm{to},ymm{mask},{self._place} {source}"
        self._vector(text, X66, M0F38, 0x2C, to, mask, source)

    def store_some(self, to: At, source: int, mask: int) -> None:
        """The lanes of AVX2 whose highest bit the vector ``mask`` has; nothing else is written."""
        assert not self._wide, "AVX-512 has masks of its own"
        text = f"vmaskmovps {self._place} {to},ymm{mask},ymm{source}"
        self._vector(text, X66, M0F38, 0x2E, source, mask, to)

    def copy_vector(self, to: int, source: int, mask: int = 0) -> None:
        masked = f"{{k{mask}}}" if mask else ""
        text = f"vmovaps {self._name}{to}{masked},{self._name}{source}"
        self._vector(text, NONE, M0F, 0x28, to, 0, source, mask=mask)

    def vector(self, name: str, to: int, one: int, other: int | At, mask: int = 0) -> None:
        """Write the instruction of this name in ``VECTOR``; zero where the mask is."""
        if name in ONLY_AVX512:
            self._require_avx512()
        registers = self._name
        said = f"{registers}{other}" if isinstance(other, int) else f"{self._place} {other}"
        masked = f"{{k{mask}}}{{z}}" if mask else ""
        text = f"{name} {registers}{to}{masked},{registers}{one},{said}"
        if name in FIRST_AVX512 and not self._wide:
            text = "{vex} " + text
        self._vector(text, *VECTOR[name], to, one, other, mask=mask, zero=bool(mask))

    def convert(self, name: str, to: int, source: int | At) -> None:
        """Write the instruction of this name in ``CONVERSIONS``; it rounds half to even."""
        said = f"{self._place} {source}" if isinstance(source, At) else f"{self._name}{source}"
        self._vector(f"{name} {self._name}{to},{said}", *CONVERSIONS[name], to, 0, source)

    def load_int8(self, to: int, source: At) -> None:
        """As many of them as a vector has lanes, as int32."""
        self._load_bytes("vpmovsxbd", 0x21, to, source)

    def load_uint8(self, to: int, source: At) -> None:
        """As many of them as a vector has lanes, as int32."""
        self._load_bytes("vpmovzxbd", 0x31, to, source)

    def _load_bytes(self, name: str, opcode: int, to: int, source: At) -> None:
        place = "XMMWORD" if self._wide else "QWORD"
        text = f"{name} {self._name}{to},{place} PTR {source}"
        self._vector(text, X66, M0F38, opcode, to, 0, source)

    def upper_half(self, to: int, source: int) -> None:
        """The upper 16 bytes of a vector as the lower ones of another (AVX2)."""
        assert not self._wide, "AVX-512 has four quarters"
        self._vector(f"vextracti128 xmm{to},ymm{source},0x1", X66, M0F3A, 0x39, source, 0, to)
        self._code.append(1)

    def in_half(self, name: str, to: int, one: int, other: int) -> None:
        """The instruction of this name in ``VECTOR`` on the lower 16 bytes (AVX2)."""
        assert not self._wide, "written for AVX2 alone"
        text = f"{name} xmm{to},xmm{one},xmm{other}"
        self._vector(text, *VECTOR[name], to, one, other, short=True)

    def swap_middle(self, to: int, source: int) -> None:
        """The lower 16 bytes with the second and the third 4 of them swapped (AVX2)."""
        assert not self._wide, "written for AVX2 alone"
        self._vector(f"vpshufd xmm{to},xmm{source},0xd8", X66, M0F, 0x70, to, 0, source, short=True)
        self._code.append(0xD8)

    def store_half(self, to: At, source: int) -> None:
        """The lower half of a vector's bytes: 16 (AVX2) or 32."""
        name, prefix = ("vmovdqu8", XF2) if self._wide else ("vmovdqu", XF3)
        half = "ymm" if self._wide else "xmm"
        text = f"{name} {half.upper()[0]}MMWORD PTR {to},{half}{source}"
        self._vector(text, prefix, M0F, 0x7F, source, 0, to, short=True)

    def store_upper_half(self, to: At, source: int) -> None:
        """The upper 32 bytes of a vector (AVX-512)."""
        self._require_avx512()
        text = f"vextracti32x8 YMMWORD PTR {to},zmm{source},0x1"
        self._vector(text, X66, M0F3A, 0x3B, source, 0, to)
        self._code.append(1)

    def store_quarter(self, to: At, source: int) -> None:
        """The lower quarter of a vector's bytes: 8 (AVX2) or 16."""
        if self._wide:
            text = f"vmovdqu8 XMMWORD PTR {to},xmm{source}"
            self._vector(text, XF2, M0F, 0x7F, source, 0, to, quarter=True)
        else:
            text = f"vmovq QWORD PTR {to},xmm{source}"
            self._vector(text, X66, M0F, 0xD6, source, 0, to, short=True)

    def shift_left(self, to: int, source: int, bits: int) -> None:
        """Shift each 32 bits of a vector by themselves."""
        text = f"vpslld {self._name}{to},{self._name}{source},{bits:#x}"
        self._vector(text, X66, M0F, 0x72, 6, to, source)
        self._code.append(bits)

    def load_bfloat16(self, to: int, source: At, mask: int = 0) -> None:
        """Sixteen of them as float32; zero where the mask, a bit for each, is."""
        self._require_avx512()
        self.load_words(to, source, mask)
        self.shift_left(to, to, 16)

    def load_words(self, to: int, source: At, mask: int = 0) -> None:
        """Sixteen times 16 bits, in the lower half of each lane, whose upper one is 0; nothing but
        zeros where the mask, a bit for each, is."""
        self._require_avx512()
        masked = f"{{k{mask}}}{{z}}" if mask else ""
        text = f"vpmovzxwd zmm{to}{masked},YMMWORD PTR {source}"
        self._vector(text, X66, M0F38, 0x33, to, 0, source, mask=mask, zero=bool(mask))

    def broadcast_bfloat16(self, to: int, source: At) -> None:
        """One of them as float32, in each lane."""
        self.broadcast_short(to, source)
        self.shift_left(to, to, 16)

    def store_bfloat16(self, to: At, source: int, mask: int = 0) -> None:
        """Sixteen float32, rounded, or those in the mask; the vector holds what was stored then."""
        self._require_avx512()
        text = f"vcvtneps2bf16 ymm{source},zmm{source}"
        self._vector(text, XF3, M0F38, 0x72, source, 0, source)
        if not mask:
            self.store_half(to, source)
            return
        text = f"vmovdqu16 YMMWORD PTR {to}{{k{mask}}},ymm{source}"
        self._vector(text, XF2, M0F, 0x7F, source, 0, to, mask=mask, short=True, wide=True)

    def compare_lanes(self, name: str, to: int, one: int, other: int | At, mask: int = 0) -> None:
        """Set the bit of each lane in mask ``to`` (AVX-512), or all bits of the lane in vector
        ``to`` (AVX2), where the comparison of this name in ``COMPARISONS`` holds, and clear the
        others; also those that ``mask`` has not.
        """
        made = f"k{to}{{k{mask}}}" if mask else f"k{to}" if self._wide else f"ymm{to}"
        said = f"{self._place} {other}" if isinstance(other, At) else f"{self._name}{other}"
        text = f"{name} {made},{self._name}{one},{said}"
        self._vector(text, NONE, M0F, 0xC2, to, one, other, mask=mask)
        self._code.append(COMPARISONS[name])

    # encoding

    def _require_avx512(self) -> None:
        """Where an instruction is written, not where a processor meets it and ends the process."""
        assert self._wide, f"{self.instructions.name} has no such instruction"

    def _emit(self, text: str, code: bytes) -> None:
        self._begins.append(len(self._code))
        self.listing.append(text)
        self._code += code

    def _short(self, opcode: int, register: str) -> bytes:
        i = NUMBER[register]
        return (b"\x41" if i > 7 else b"") + bytes((opcode | i & 7,))

    def _pair(self, opcode: int, register: str, other: str) -> bytes:
        reg, rm = NUMBER[register], NUMBER[other]
        return bytes((0x48 | reg >> 3 << 2 | rm >> 3, opcode, 0xC0 | (reg & 7) << 3 | rm & 7))

    def _memory(self, opcode: bytes, register: str, place: At, *, wide: bool = True) -> bytes:
        reg, base = NUMBER[register], NUMBER[place.base]
        prefix = 0x40 | wide << 3 | reg >> 3 << 2 | base >> 3
        head = bytes((prefix,)) if prefix != 0x40 else b""
        return head + opcode + _address(reg, place)

    def _add(self, name: str, opcode: int, digit: int, to: str, other: str | int) -> None:
        if isinstance(other, str):
            self._emit(f"{name} {to},{other}", self._pair(opcode, other, to))
            return
        i = NUMBER[to]
        if i:
            code = bytes((0x48 | i >> 3, 0x81, 0xC0 | digit << 3 | i & 7))
        else:  # rax has an opcode of its own
            code = bytes((0x48, 0x05 | digit << 3))
        said = f"{other & (2**64 - 1):#x}"
        self._emit(f"{name} {to},{said}", code + struct.pack("<i", other))

    def _vector(
        self,
        text: str,
        prefix: int,
        map: int,
        opcode: int,
        reg: int,
        second: int,
        rm: int | At,
        *,
        mask: int = 0,
        zero: bool = False,
        short: bool = False,
        quarter: bool = False,
        wide: bool = False,
    ) -> None:
        """EVEX for AVX-512, else VEX; the extra bits of registers stand inverted in both.

        Args:
            short: of half the register's bytes.
            quarter: of a quarter of them (AVX-512).
            wide: W is set, which tells such instructions of AVX-512 apart.
        """
        if not self._wide:
            assert not mask, "AVX2 has no masks"
            self._vex(text, prefix, map, opcode, reg, second, rm, long=not short)
            return
        if isinstance(rm, At):
            high, middle = 0, NUMBER[rm.base] >> 3
            tail = _address(reg, rm, scaled=True)
        else:
            high, middle = rm >> 4, rm >> 3 & 1
            tail = bytes((0xC0 | (reg & 7) << 3 | rm & 7,))
        extended = (reg >> 3 & 1) << 7 | high << 6 | middle << 5 | (reg >> 4) << 4
        length = (
            zero << 7 | (0 if quarter else 1 if short else 2) << 5 | (~second >> 4 & 1) << 3 | mask
        )
        third = wide << 7 | (~second & 15) << 3 | 4 | prefix
        head = bytes((0x62, extended ^ 0xF0 | map, third, length))
        self._emit(text, head + bytes((opcode,)) + tail)

    def _vex(
        self,
        text: str,
        prefix: int,
        map: int,
        opcode: int,
        reg: int,
        second: int,
        rm: int | At,
        *,
        long: bool,
    ) -> None:
        """Three bytes of VEX before the opcode: of AVX2's instructions and those on tiles.

        Args:
            long: of 32 bytes, not of 16.
        """
        if isinstance(rm, At):
            middle, tail = NUMBER[rm.base] >> 3, _address(reg, rm)
        else:
            assert rm < AVX2.vectors
            middle, tail = rm >> 3, bytes((0xC0 | (reg & 7) << 3 | rm & 7,))
        assert max(reg, second) < AVX2.vectors
        extended = (reg >> 3) << 7 | middle << 5
        last = (~second & 15) << 3 | long << 2 | prefix
        self._emit(text, bytes((0xC4, extended ^ 0xE0 | map, last, opcode)) + tail)


def _address(reg: int, place: At, *, scaled: bool = False) -> bytes:
    """ModRM with a distance of 32 bits, or of 8 where it fits, unless EVEX would scale that; some
    bases want one more byte.
    """
    base, more = NUMBER[place.base] & 7, b""
    assert NUMBER[place.index or "rax"] < 8, "an index is one of the first eight registers"
    if place.index is not None or base == NUMBER["rsp"]:
        more = bytes((NUMBER[place.index or "rsp"] << 3 | base,))  # rsp: none
        base = NUMBER["rsp"]
    short = -128 <= place.distance <= 127 and not scaled
    distance = struct.pack("<b" if short else "<i", place.distance)
    return bytes(((0x40 if short else 0x80) | (reg & 7) << 3 | base,)) + more + distance
