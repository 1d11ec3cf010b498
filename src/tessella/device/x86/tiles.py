"""Machine code on the tiles of AMX: eight registers of up to 16 rows of 64 bytes.

Linux gives their state to a process that asks for it (``core.processor``), and saves it with a
thread's other registers only then. Code of ours finds the tiles as another library's code in the
same thread has configured them, and leaves them so.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18; Linux,
Documentation/arch/x86/xstate.rst.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from tessella.core.errors import KernelError
from tessella.core.processor import tiles_refusal
from tessella.device.x86.assembler import Assembler, At
from tessella.device.x86.opcodes import M0F38, NONE, X66, XF2, XF3

TILES, ROWS, ROW_BYTES = 8, 16, 64  # palette 1
CONFIGURATION_BYTES = 64
_COLUMNS, _ROWS = 16, 48  # where a configuration has the rows' bytes, and how many rows there are

# sums in 32 bits of products of four bytes each, or of two bfloat16
PRODUCTS = {
    "tdpbssd": (XF2, 0x5E),  # signed by signed
    "tdpbsud": (XF3, 0x5E),
    "tdpbusd": (X66, 0x5E),
    "tdpbuud": (NONE, 0x5E),
    "tdpbf16ps": (XF3, 0x5C),
}


def require_tiles() -> None:
    """Ask for tiles before code on them is made: without leave it ends the process.

    Raises:
        KernelError: Linux does not let this process use them.
    """
    if (why := tiles_refusal()) is not None:
        raise KernelError(
            "this process may not use the tiles of AMX",
            seen=why,
            fix="choose another algorithm, mend what is seen, or use Linux 5.16 or newer",
        )


def configuration(rows: Sequence[int], row_bytes: Sequence[int]) -> torch.Tensor:
    """What ``configured`` reads from memory: of each tile, from the first on, how many rows it has
    (at most 16) and of how many bytes (at most 64); uint8 [64].
    """
    assert len(rows) == len(row_bytes) <= TILES
    assert all(0 < r <= ROWS for r in rows)
    assert all(0 < b <= ROW_BYTES and b % 4 == 0 for b in row_bytes)
    made = torch.zeros(CONFIGURATION_BYTES, dtype=torch.uint8)
    made[0] = 1
    made[_ROWS : _ROWS + len(rows)] = torch.tensor(rows, dtype=torch.uint8)
    widths = torch.tensor(row_bytes, dtype=torch.int16).view(torch.uint8)
    made[_COLUMNS : _COLUMNS + len(widths)] = widths
    return made


class TileAssembler(Assembler):
    """An assembler for AVX-512 and tiles, which are named by number.

    A tile in memory is the address of its first row and, in the index register, the bytes from a
    row to the next.
    """

    @contextmanager
    def configured(self, place: At, kept: At) -> Iterator[None]:
        """Inside, tiles are as the configuration at ``place`` says, and as they were behind it.

        Args:
            kept: 64 bytes for the configuration that the tiles had.
        """
        self._tile(f"sttilecfg {kept}", X66, 0x49, 0, 0, kept)
        self._tile(f"ldtilecfg {place}", NONE, 0x49, 0, 0, place)
        yield
        self._tile(f"ldtilecfg {kept}", NONE, 0x49, 0, 0, kept)

    def release_tiles(self) -> None:
        """No tile is configured behind it."""
        self._emit("tilerelease", b"\xc4\xe2\x78\x49\xc0")

    def zero_tile(self, to: int) -> None:
        self._tile(f"tilezero tmm{to}", XF2, 0x49, to, 0, 0)

    def load_tile(self, to: int, source: At, *, streamed: bool = False) -> None:
        """All rows of a tile.

        Args:
            streamed: they will not be read again soon.
        """
        assert source.index is not None, "rows lie apart"
        name, prefix = ("tileloaddt1", X66) if streamed else ("tileloadd", XF2)
        self._tile(f"{name} tmm{to},{source}", prefix, 0x4B, to, 0, source)

    def store_tile(self, to: At, source: int) -> None:
        assert to.index is not None, "rows lie apart"
        self._tile(f"tilestored {to},tmm{source}", XF3, 0x4B, source, 0, to)

    def multiply_tiles(self, name: str, sums: int, one: int, other: int) -> None:
        """Write the instruction of this name in ``PRODUCTS``: each row of ``one`` by all columns
        of ``other``, whose rows hold four bytes (two bfloat16) of each column, added to ``sums``.
        """
        assert len({sums, one, other}) == 3, "three tiles"
        prefix, opcode = PRODUCTS[name]
        self._tile(f"{name} tmm{sums},tmm{one},tmm{other}", prefix, opcode, sums, other, one)

    def _tile(
        self, text: str, prefix: int, opcode: int, reg: int, second: int, rm: int | At
    ) -> None:
        self._vex(text, prefix, M0F38, opcode, reg, second, rm, long=False)
