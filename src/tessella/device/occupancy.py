"""Occupancy: how many blocks of a kernel one multiprocessor holds at a time.

The rules are those of the CUDA occupancy calculator: warps, registers and shared memory are handed
out in units, and the scarcest of them decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessella.core.architectures import ARCHITECTURES
from tessella.core.errors import UsageError
from tessella.core.integers import ceil_div, round_up


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Resident blocks and warps, their share of the most that fit, and what limits them."""

    blocks: int
    warps: int
    share: float
    limited_by: str

    def __str__(self) -> str:
        blocks = "1 block" if self.blocks == 1 else f"{self.blocks} blocks"
        return f"{blocks} a multiprocessor, occupancy {self.share:.0%}, limit: {self.limited_by}"


def occupancy(
    *, threads: int, registers: int, shared_bytes: int, target: str = "sm_90"
) -> Occupancy:
    """Blocks that fit a multiprocessor at once.

    Args:
        threads: of a block.
        registers: of a thread.
        shared_bytes: of a block, static and dynamic, without the system's reserve.
        target: one of ``ARCHITECTURES``.

    Raises:
        UsageError: not one such block can run there.
    """
    unit = ARCHITECTURES[target]
    warps = ceil_div(threads, 32)
    of_warp = round_up(32 * max(registers, 1), unit.register_unit)
    of_block = round_up(shared_bytes + unit.reserved_shared_bytes, unit.shared_unit)
    # warps come from four schedulers, each with a quarter of the registers
    resident_warps = 4 * (unit.registers // 4 // of_warp)
    limits = {
        "warps": unit.warps // warps,
        "registers": resident_warps // warps,
        "shared memory": unit.shared_bytes // max(of_block, 1),
        "blocks": unit.blocks,
    }
    limited_by = min(limits, key=limits.__getitem__)
    blocks = limits[limited_by]
    if blocks == 0 or threads > unit.threads_per_block or registers > unit.registers_per_thread:
        raise UsageError(
            f"a multiprocessor of {target} cannot hold one such block",
            seen=f"{threads} threads of {registers} registers, {shared_bytes} bytes",
            fix=f"use up to {unit.threads_per_block} threads, {unit.registers_per_thread} registers"
            f" a thread, {unit.registers} a block, and "
            f"{unit.shared_bytes_of_block()} bytes of shared memory",
        )
    return Occupancy(
        blocks=blocks,
        warps=blocks * warps,
        share=blocks * warps / unit.warps,
        limited_by=limited_by,
    )
