"""Occupancy: how many blocks of a kernel one multiprocessor holds at a time.

The rules and the numbers are those of the CUDA occupancy calculator (CUDA C++ Programming Guide,
technical specifications by compute capability).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Multiprocessor:
    """What blocks share, and in which units it is handed out."""

    warps: int
    blocks: int
    registers: int
    register_unit: int  # registers are allocated to a warp in multiples of this
    shared_bytes: int
    shared_unit: int
    reserved_shared_bytes: int  # the system's share of each block


MULTIPROCESSORS = {
    "sm_90": Multiprocessor(
        warps=64,
        blocks=32,
        registers=65536,
        register_unit=256,
        shared_bytes=228 * 1024,
        shared_unit=128,
        reserved_shared_bytes=1024,
    )
}


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Resident blocks and warps, their share of the most that fit, and what limits them."""

    blocks: int
    warps: int
    share: float
    limited_by: str


def occupancy(
    *, threads: int, registers: int, shared_bytes: int, target: str = "sm_90"
) -> Occupancy:
    """Blocks that fit a multiprocessor at once.

    Args:
        threads: of a block.
        registers: of a thread.
        shared_bytes: of a block, without the system's reserve.
    """
    unit = MULTIPROCESSORS[target]
    warps = _up(threads, 32) // 32
    of_warp = _up(32 * max(registers, 1), unit.register_unit)
    of_block = _up(shared_bytes + unit.reserved_shared_bytes, unit.shared_unit)
    # warps come from four schedulers, each with a quarter of the registers
    resident_warps = 4 * (unit.registers // 4 // of_warp)
    limits = {
        "warps": unit.warps // warps,
        "registers": resident_warps // warps,
        "shared memory": unit.shared_bytes // of_block,
        "blocks": unit.blocks,
    }
    limited_by = min(limits, key=limits.__getitem__)
    blocks = limits[limited_by]
    return Occupancy(
        blocks=blocks,
        warps=blocks * warps,
        share=blocks * warps / unit.warps,
        limited_by=limited_by,
    )


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
