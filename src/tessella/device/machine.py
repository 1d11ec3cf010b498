"""What a GPU has, by its architecture: how many multiprocessors, and what blocks share in one.

From the CUDA C++ Programming Guide, technical specifications by compute capability, and from
``cuda_occupancy.h`` of the toolkit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

# bytes: bulk tensor copies (TMA) read and write at multiples of it, and Triton compiles other code
# for a pointer or a number that is none
ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The limits of one multiprocessor, and the units in which they are handed out.

    Attributes:
        multiprocessors: of the largest GPU that was sold with this architecture.
    """

    multiprocessors: int
    warps: int = 64
    blocks: int = 32
    threads_per_block: int = 1024
    registers: int = 65536
    registers_per_thread: int = 255
    register_unit: int = 256  # registers are allocated to a warp in multiples of this
    shared_bytes: int
    shared_unit: int = 128
    reserved_shared_bytes: int = 1024  # the system's share of each block

    def shared_bytes_of_block(self, residents: int = 1) -> int:
        """Shared memory that each of so many resident blocks can have."""
        return self.shared_bytes // residents - self.reserved_shared_bytes


ARCHITECTURES = {
    "sm_70": Architecture(
        multiprocessors=80, shared_bytes=96 * 1024, shared_unit=256, reserved_shared_bytes=0
    ),
    "sm_80": Architecture(multiprocessors=108, shared_bytes=164 * 1024),
    "sm_90": Architecture(multiprocessors=132, shared_bytes=228 * 1024),
}
HOPPER = ARCHITECTURES["sm_90"]


@functools.cache
def multiprocessors() -> int:
    """Multiprocessors of this machine's GPU; where there is none, of a Hopper GPU."""
    if not torch.cuda.is_available():
        return HOPPER.multiprocessors
    return torch.cuda.get_device_properties("cuda").multi_processor_count
