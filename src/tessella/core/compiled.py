"""Compiled kernels as data: the machine code, and what the launch of each kernel has to know.

A plan carries them, so that loading it compiles nothing. Machine code is stored once for all
launches that share it, under its hash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal

from tessella.core import cubin

MAX_KERNELS = 4096
MAX_ARGUMENTS, MAX_DEPTH = 256, 8  # of a function or a tuple; tuples in each other
MAX_SHARED_BYTES = 228 << 10
MAX_THREADS = 1024
MAX_SCRATCH_BYTES = 1 << 30  # of one block

# A parameter as machine code has it: an address, a number, or a tensor that TMA moves tiles of.
Type = Literal[
    "pointer", "i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64",
    "fp16", "bf16", "fp32", "fp64", "tensor",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a GPU's Tensor Memory Accelerator (TMA) moves tiles of a tensor.

    Attributes:
        element: the driver's number of the element type; ``element_bytes``: its size.
        box: the tile's shape.
        swizzle: the driver's number of the order of the bytes in shared memory.
    """

    element: int
    element_bytes: int
    box: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One argument that a launch passes to the machine code; other arguments were compiled in.

    Attributes:
        place: the argument's index in the function's signature, followed by an index for each tuple
            around the argument.
        tiles: how a ``tensor`` is tiled; such an argument stands for the tensor's TMA descriptor,
            its shape and its strides.
    """

    place: tuple[int, ...]
    type: Type
    tiles: Tiles | None = None


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """A kernel compiled for one kind of arguments, without its code.

    Attributes:
        key: what a launch asks for: equal keys, equal machine code (``device.ahead_of_time.key``).
        name: the function's name in the cubin.
        cubin: SHA-256 of the machine code.
        parameters: None where the calling code knows the arguments (CUDA C++).
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        cooperative: all blocks are resident at once, and may wait for each other.
        dependent: it may start before the kernel before it has ended.
        scratch_bytes: memory of a block that the launch has to find.
    """

    key: str
    name: str
    cubin: str
    parameters: tuple[Parameter, ...] | None
    threads: int
    shared_bytes: int
    cooperative: bool = False
    dependent: bool = False
    scratch_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class CompiledKernels:
    """Kernels by key, and machine code by hash."""

    kernels: tuple[CompiledKernel, ...] = ()
    cubins: Mapping[str, bytes] = field(default_factory=dict)

    def wrong(self, target: str) -> str | None:
        """Why these cannot be what compilers make for ``target``, or None; they may be anything."""
        if not self.kernels and not self.cubins:
            return None
        if not (target.startswith("sm_") and target[3:].isdecimal() and len(target) < 8):
            return f"machine code for a GPU in a plan for {target[:40]}"
        if len(self.kernels) > MAX_KERNELS:
            return f"{len(self.kernels)} kernels"
        keys = [k.key for k in self.kernels]
        if keys != sorted(set(keys)):
            return "kernels out of order, or twice"
        if {k.cubin for k in self.kernels} != set(self.cubins):
            return "machine code that is missing, or that no kernel uses"
        for name, code in self.cubins.items():
            if sha256(code).hexdigest() != name:
                return f"machine code {name[:80]} is not what its name says"
        checked = set()  # kernels that differ in their arguments only share machine code
        for kernel in self.kernels:
            if (kernel.cubin, kernel.name) not in checked:
                if reason := cubin.wrong(self.cubins[kernel.cubin], kernel.name, int(target[3:])):
                    return f"{kernel.name[:80]}: {reason}"
                checked.add((kernel.cubin, kernel.name))
            if reason := _wrong(kernel):
                return f"{kernel.name[:80]}: {reason}"
        return None


def _wrong(kernel: CompiledKernel) -> str | None:
    """Why the launch that a kernel's record describes is impossible, or None."""
    if not kernel.name.isidentifier() or len(kernel.name) > 1000:
        return "no name of a function"
    if not 1 <= kernel.threads <= MAX_THREADS:
        return f"{kernel.threads} threads in a block"
    if not 0 <= kernel.shared_bytes <= MAX_SHARED_BYTES:
        return f"{kernel.shared_bytes} bytes of shared memory"
    if not 0 <= kernel.scratch_bytes <= MAX_SCRATCH_BYTES:
        return f"{kernel.scratch_bytes} bytes of scratch memory"
    places = [p.place for p in kernel.parameters or ()]
    if places != sorted(set(places)) or not all(map(_can_be, places)):
        return f"parameters {str(places)[:80]}"
    for parameter in kernel.parameters or ():
        tiles = parameter.tiles
        if (tiles is None) != (parameter.type != "tensor"):
            return f"parameter {parameter.place} is {parameter.type}"
        if tiles is not None and not (
            1 <= len(tiles.box) <= 5
            and all(1 <= n <= 256 for n in tiles.box)
            and tiles.element_bytes in (1, 2, 4, 8)
            and 0 <= tiles.element <= 15
            and 0 <= tiles.swizzle <= 3
        ):
            return f"parameter {parameter.place} moves {tiles}"
    return None


def _can_be(place: tuple[int, ...]) -> bool:
    return 1 <= len(place) <= MAX_DEPTH and all(0 <= n < MAX_ARGUMENTS for n in place)
