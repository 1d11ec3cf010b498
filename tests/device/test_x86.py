"""Machine code for AVX-512 and AVX2: each instruction beside what binutils disassembles."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tessella.device.x86 import chain, code, tiles
from tessella.device.x86.assembler import (
    AVX2,
    AVX512,
    REGISTERS,
    Assembler,
    At,
    InstructionSet,
)
from tessella.device.x86.opcodes import CONVERSIONS, ONLY_AVX512, VECTOR

HERE = code.instructions() or AVX512
REFUSAL = code.refusal(HERE.name)
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
FREE = [r for r in REGISTERS if r != "rsp"]


def disassembled(written: bytes, folder: Path) -> list[str]:
    """GNU objdump's words, an instruction each."""
    (folder / "code").write_bytes(written)
    told = subprocess.run(
        ["objdump", "-D", "-b", "binary", "-mi386:x86-64", "-Mintel", str(folder / "code")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = [line.split("\t") for line in told.splitlines()]
    return [" ".join(row[2].split("#")[0].split()) for row in rows if len(row) > 2]


def told_of(a: Assembler, folder: Path) -> list[str]:
    """What the written code is, but for where jumps lead: that is another test."""
    told = disassembled(a.code(), folder)
    return [t.split()[0] if t.startswith("j") else t for t in told]


def test_every_instruction_with_every_register(tmp_path: Path) -> None:
    a = Assembler()
    a.enter()
    for base in REGISTERS:
        place = At(base=base, distance=-0x1234)
        a.store_number(place, 0x345)
        a.add_to_stored(place, -1)
        a.prefetch(place)
        a.prefetch(place, cache=2)
        a.call(place)
    for register in FREE:
        a.set(register, 0x1234567890ABCDEF)
        a.set(register, -1)
        a.load(register, At(base="r12", distance=0x778))
        a.load_short(register, At(base="rbp", distance=4))
        if register in REGISTERS[:8]:
            a.store_short(At(base="r14", distance=-4), register)
        a.store(At(base="rsp", distance=8), register)
        a.add_stored(register, At(base="rdi", distance=8))
        a.load_if_negative(register, At(base="rsp", distance=16))
        a.fetch_add(At(base="r13"), register)
        a.multiply(register, 0x999)
        a.clear_low_bits(register, 6)
        for number in (0x7FFFFFF0, -0x7000):
            a.add(register, number)
            a.subtract(register, number)
            a.compare(register, number)
        for other in ("rax", "rbp", "r8", "r15"):
            a.move(register, other)
            a.add(register, other)
            a.subtract(register, other)
            a.compare(register, other)
    a.leave()
    assert told_of(a, tmp_path) == a.listing
    assert told_of(chain.written(), tmp_path) == chain.written().listing  # has its own


@pytest.mark.parametrize("isa", [AVX512, AVX2], ids=lambda isa: isa.name)
def test_every_vector_instruction(isa: InstructionSet, tmp_path: Path) -> None:
    a, last = Assembler(isa), isa.vectors - 1
    names = [name for name in VECTOR if isa == AVX512 or name not in ONLY_AVX512]
    for base in REGISTERS:
        place = At(base=base, distance=-0x1234)
        a.broadcast(last - 1, At(base=base, index="rdx", distance=0x40))
        a.broadcast(last // 2 + 2, place)
        for register in (0, last // 3, last // 2 + 3, last):
            a.load_vector(register, place)
            a.store_vector(place, register)
            a.load_int8(register, place)
            a.load_uint8(register, place)
            for name in names:
                a.vector(name, register, last - register, place)
            for name in CONVERSIONS:
                a.convert(name, register, place)
    for register in REGISTERS[:8]:
        a.broadcast_bits(last - 1, register)
    for one in (0, 7, 8, last // 2, last // 2 + 1, last):
        a.copy_vector(one, last - one)
        a.shift_left(one, last - one, 23)
        for name in CONVERSIONS:
            a.convert(name, one, last - one)
        for name in names:
            a.vector(name, one, last - one, (last // 2 + 1) ^ one)
    assert told_of(a, tmp_path) == a.listing


def test_what_only_avx512_has(tmp_path: Path) -> None:
    a = Assembler()
    for base in REGISTERS:
        place = At(base=base, distance=-0x1234)
        a.load_bfloat16(5, place)
        a.load_bfloat16(28, place)
        a.load_bfloat16(9, place, 2)
        a.broadcast_short(6, place)
        a.load_bfloat16(21, place, 4)
        a.broadcast_bfloat16(30, place)
        a.store_bfloat16(place, 20)
        a.store_bfloat16(place, 17, 2)
        a.load_vector(18, place, 3)
        a.expand_words(9, place, 1)
        a.expand_words(26, place, 7)
        a.store_vector(place, 31, 7)
        a.store_half(place, 17)
        a.store_upper_half(place, 30)
        a.store_quarter(place, 21)
    for register in REGISTERS[:8]:
        a.mask(6, register)
    for one in (0, 7, 8, 15, 16, 31):
        a.compare_lanes("vcmpordps", 2, one, 31 - one, mask=2)
        a.compare_lanes("vcmpnltps", 7, one, At(base="r10", distance=64))
        a.vector("vscalefps", one, 31 - one, one ^ 8, mask=3)
        a.copy_mask(1, 5)
        a.copy_vector(one, 31 - one, 4)
    assert told_of(a, tmp_path) == a.listing


def test_what_only_avx2_has(tmp_path: Path) -> None:
    a = Assembler(AVX2)
    for one in (0, 7, 8, 15):
        a.compare_lanes("vcmpunordps", one, 15 - one, one ^ 8)
        a.compare_lanes("vcmpnltps", one, 15 - one, At(base="rax", distance=32))
        a.upper_half(one, 15 - one)
        a.swap_middle(one, 15 - one)
        a.in_half("vpmaxsb", one, 15 - one, one ^ 8)
        for base in REGISTERS:
            a.store_half(At(base=base, distance=0x80), one)
            a.store_quarter(At(base=base, distance=0x7F), one)
            a.load_some(one, At(base=base, index="rdx", distance=8), 15 - one)
            a.store_some(At(base=base, distance=-8), one, one ^ 8)
    assert told_of(a, tmp_path) == a.listing


def test_instructions_on_tiles(tmp_path: Path) -> None:
    a = tiles.TileAssembler()
    for base in REGISTERS:
        with a.configured(At(base=base, distance=0x1234), At(base=base, distance=-64)):
            a.release_tiles()
        for index in ("rax", "rbp", "rdi"):
            place = At(base=base, index=index, distance=0x40)
            a.load_tile(7, place)
            a.load_tile(0, place, streamed=True)
            a.store_tile(place, 5)
    for tile in range(tiles.TILES):
        a.zero_tile(tile)
        for name in tiles.PRODUCTS:
            a.multiply_tiles(name, tile, (tile + 3) % 8, (tile + 5) % 8)
    assert told_of(a, tmp_path) == a.listing


@pytest.mark.skipif(
    code.refusal("amx_int8") is not None, reason="needs a processor with AMX, and Linux's leave"
)
def test_tiles_multiply_and_are_left_as_they_were() -> None:
    """3 rows of 16 bytes by 5 columns; a configuration of the caller is there afterwards."""
    x = torch.randint(0, 256, (3, 16), dtype=torch.uint8)
    w = torch.randint(-128, 128, (16, 5), dtype=torch.int8)
    words = w.reshape(4, 4, 5).transpose(1, 2).contiguous()
    out, kept = torch.empty(3, 5, dtype=torch.int32), torch.zeros(2, 64, dtype=torch.uint8)
    ours = tiles.configuration([3, 3, 4], [20, 16, 20])
    theirs = tiles.configuration([7], [12])
    places = (x, words, out, kept, ours, theirs)
    a, (at_x, at_w, at_out, at_kept, at_ours, at_theirs) = (
        tiles.TileAssembler(),
        (t.data_ptr() for t in places),
    )
    with a.function():
        for register, number in (("rax", at_theirs), ("rcx", at_kept), ("rdx", at_ours)):
            a.set(register, number)
        before, during = At(base="rcx"), At(base="rcx", distance=64)
        with a.configured(At(base="rax"), before):
            with a.configured(At(base="rdx"), during):
                a.zero_tile(0)
                for tile, address, stride in ((1, at_x, 16), (2, at_w, 20)):
                    a.set("r8", address)
                    a.set("rax", stride)
                    a.load_tile(tile, At(base="r8", index="rax"))
                a.multiply_tiles("tdpbusd", 0, 1, 2)
                a.set("r8", at_out)
                a.set("rax", 20)
                a.store_tile(At(base="r8", index="rax"), 0)
            with a.configured(At(base="rdx"), during):
                a.release_tiles()
    code.MachineCode(a.code(), places).run(code.Table([]), threads=1)
    assert torch.equal(out.long(), x.long() @ w.long())
    assert torch.equal(kept[1], theirs)  # found by the second of ours, as the first had left it


@pytest.mark.parametrize(
    "write",
    [
        lambda a: a.mask(6, "rax"),
        lambda a: a.copy_mask(1, 5),
        lambda a: a.compare_lanes("vcmpordps", 2, 1, 0, mask=2),
        lambda a: a.vector("vaddps", 1, 2, 3, mask=4),
        lambda a: a.load_bfloat16(5, At(base="rax")),
        lambda a: a.store_bfloat16(At(base="rax"), 5),
        lambda a: a.broadcast_bfloat16(5, At(base="rax")),
        lambda a: a.load_vector(5, At(base="rax"), 3),
        lambda a: a.expand_words(5, At(base="rax"), 3),
        lambda a: a.copy_vector(1, 2, 3),
        lambda a: a.store_upper_half(At(base="rax"), 5),
        *(partial(Assembler.vector, name=n, to=0, one=1, other=2) for n in ONLY_AVX512),
    ],
)
def test_what_avx2_has_not_is_not_written_for_it(write: Callable[[Assembler], None]) -> None:
    with pytest.raises(AssertionError):
        write(Assembler(AVX2))


def test_interleaved_instructions_are_those_of_each_writer_in_turn(tmp_path: Path) -> None:
    def write(x: int, a: Assembler) -> None:
        a.load_vector(x, At(base="r9", distance=32 * x))
        a.shift_left(x, x, 23)  # its last byte is written behind the others
        if x:
            a.once(("doubled", x), lambda: a.vector("vaddps", x, x, x))

    a, alone = Assembler(AVX2), [Assembler(AVX2) for _ in range(3)]
    for x, one in enumerate(alone):
        write(x, one)
    a.interleave([partial(write, x) for x in range(3)])
    turns = itertools.zip_longest(*(one.listing for one in alone))
    assert a.listing == [text for turn in turns for text in turn if text]
    assert told_of(a, tmp_path) == a.listing


def test_jumps_go_where_they_say(tmp_path: Path) -> None:
    a = Assembler()
    a.label("begin")
    a.compare("rcx", 5)
    for condition in ("je", "jne", "jge"):
        a.jump_if(condition, "end")
    a.jump("begin")
    a.label("end")
    with a.function():
        pass
    told = disassembled(a.code(), tmp_path)
    begins = re.findall(r"^(?:j\w+) (0x\w+)$", "\n".join(told), re.MULTILINE)
    end = 7 + 3 * 6 + 5
    assert [int(b, 16) for b in begins] == [end, end, end, 0]


def counting() -> code.MachineCode:
    """Adds each row's number to memory, where it is told by the table."""
    a = Assembler()
    with a.function():
        a.load("r8", code.given(0))
        with code.each_item(a, "rcx", 2):
            a.load("r9", At(base="rcx"))
            a.add("r9", "r8")
            a.load("rax", At(base="rcx", distance=8))
            a.fetch_add(At(base="r9"), "rax")
    return code.MachineCode(a.code())


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_take_each_item_once(threads: int) -> None:
    rows = [(8 * (i % 7), i + 1) for i in range(1000)]
    table = code.Table(rows)
    made = counting()
    sums = torch.zeros(7, dtype=torch.int64)
    for _ in range(3):
        made.run(table, sums.data_ptr(), threads=threads)
    right = torch.zeros(7, dtype=torch.int64)
    for place, number in rows:
        right[place // 8] += 3 * number
    assert torch.equal(sums, right)


def test_callers_do_not_share_their_counters() -> None:
    rows = [(0, 1)] * 5000
    table = code.Table(rows)
    made = counting()
    sums = [torch.zeros(1, dtype=torch.int64) for _ in range(6)]

    def work(mine: torch.Tensor) -> None:
        for _ in range(20):
            made.run(table, mine.data_ptr(), threads=2)

    workers = [threading.Thread(target=work, args=(mine,)) for mine in sums]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [int(mine) for mine in sums] == [100_000] * 6


def test_memory_that_runs_cannot_be_written() -> None:
    memory, address = code._executable(b"\xc3")
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, rights, *_ = line.split()
        begin, end = (int(n, 16) for n in where.split("-"))
        if begin <= address < end:
            assert rights.startswith("r-x")
            break
    else:
        pytest.fail("not found")
    assert len(memory) == 1


def test_threads_are_those_of_torch() -> None:
    """scikit-learn brings an OpenMP of its own; loaded later, it lies before torch's."""
    code_ = (
        "import torch, ctypes, sklearn.datasets\n"
        "from pathlib import Path\n"
        "from tessella.device.x86 import code\n"
        "ours = ctypes.cast(code._parallel(), ctypes.c_void_p).value\n"
        "lines = [l.split() for l in Path('/proc/self/maps').read_text().splitlines()]\n"
        "inside = lambda l: int(l[0].split('-')[0], 16) <= ours < int(l[0].split('-')[1], 16)\n"
        "print(next(l[-1] for l in lines if inside(l)))"
    )
    said = subprocess.check_output([sys.executable, "-c", code_], text=True)
    assert Path(said.strip()).is_relative_to(Path(torch.__file__).parent)
