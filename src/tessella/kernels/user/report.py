"""What an operator of a user's own launched, for people: grid, block, registers, occupancy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tessella.core.architectures import ARCHITECTURES
from tessella.device.launch import Launched, Resources
from tessella.device.occupancy import Occupancy

Where = Literal["gpu", "interpreter", "reference", "compiled"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """One launch.

    Attributes:
        where: ``gpu``; ``interpreter`` (Triton's, on the CPU); ``compiled`` only; or ``reference``:
            this is what a GPU would have launched, the numbers came from the reference.
        grid: blocks along x, y and z.
        block: threads along x, y and z.
        resources: None where the kernel was not compiled.
        occupancy: likewise.
    """

    where: Where
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    resources: Resources | None = None
    occupancy: Occupancy | None = None

    @property
    def warps(self) -> int:
        """Threads of a block."""
        return -(-math.prod(self.block) // 32)

    def __str__(self) -> str:
        grid, block = ("×".join(str(n) for n in shape) for shape in (self.grid, self.block))
        text = f"{self.kernel}: grid {grid}, block {block} ({self.warps} warps)"
        if self.resources is not None:
            used = self.resources
            text += f", {used.registers} registers, {used.shared_bytes} bytes shared"
            text += f", {used.spilled_bytes} spilled" if used.spilled_bytes else ""
        if self.occupancy is not None:
            text += f": {self.occupancy}"
        return text + _NOTES[self.where]


_NOTES: dict[Where, str] = {
    "gpu": "",
    "compiled": " [compiled, not run]",
    "interpreter": " [no GPU: Triton's interpreter]",
    "reference": " [no GPU: its reference gave the result]",
}


def report(
    where: Where, kernel: str, block: tuple[int, ...], launched: Launched, target: str
) -> Report:
    """The launch with what the compiled kernel takes, where it was compiled."""
    if launched.compiled is None:
        return Report(where=where, kernel=kernel, grid=launched.grid, block=block)
    used = launched.resources()
    if used.threads > math.prod(block):  # specialized warps come on top
        block = (used.threads,)
    held = used.occupancy(target) if target in ARCHITECTURES else None
    return Report(
        where=where,
        kernel=kernel,
        grid=launched.grid,
        block=block,
        resources=used,
        occupancy=held,
    )
