"""What a GPU has, by its architecture: the one table that targets, kernels and plans ask.

From the CUDA C++ Programming Guide, technical specifications by compute capability, and from
``cuda_occupancy.h`` of the toolkit. Nothing here imports torch.

Rates are from NVIDIA's data sheets of V100 SXM2, T4, A100 SXM 40 GB, A10, L4, H100 SXM and HGX B200
(those of L4, H100 and B200 state sparse products, twice the dense ones), and from the white paper
"NVIDIA RTX Blackwell GPU Architecture" for the RTX 5090.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# What machine code of ours can want of a GPU: copies to shared memory that a thread does not wait
# for, a next kernel that starts before this one ends (``overlap``), bulk copies of tiles, products
# of four warps from shared memory, and tensor cores by the types that they multiply in Triton's
# code. Turing's are for libraries only: Triton 3.9 writes its products by the plain units, with
# 7 KB of spilled registers a thread (a convolution in float16, tiles of 128 × 64).
Feature = Literal[
    "cp_async", "dependent_launch", "tma", "wgmma", "sparse_mma",
    "fp16_mma", "bf16_mma", "tf32_mma", "int8_mma", "fp8_mma",
]  # fmt: skip

_AMPERE: frozenset[Feature] = frozenset(
    {"cp_async", "sparse_mma", "fp16_mma", "bf16_mma", "tf32_mma", "int8_mma"}
)
_ADA: frozenset[Feature] = _AMPERE | {"fp8_mma"}
# Blackwell has tcgen05 in the place of wgmma
_BLACKWELL: frozenset[Feature] = _ADA | {"dependent_launch", "tma"}
_HOPPER: frozenset[Feature] = _BLACKWELL | {"wgmma"}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The most that one GPU does a second, by its maker: no GPU reaches all of it.

    Products are dense and add up in 32 bits. Who has no tensor cores for a type multiplies it as
    float32.

    Attributes:
        memory_gb: 10⁹ bytes read or written.
        float32, tf32, float16, int8, fp8: 10¹² operations (a multiply-add is two) of products.
    """

    memory_gb: float
    float32: float
    tf32: float = 0.0
    float16: float = 0.0
    int8: float = 0.0
    fp8: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The limits of one multiprocessor, and the units in which they are handed out.

    Attributes:
        chips: names that people know it by.
        has: what machine code of ours may use.
        multiprocessors: of the largest GPU that was sold with this architecture.
        shared_bytes: of one multiprocessor.
        rates: of the first of its chips, by which a plan is estimated for a GPU that is not here.
    """

    chips: str
    rates: Rates
    has: frozenset[Feature] = frozenset()
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
        chips="V100",
        rates=Rates(memory_gb=900, float32=15.7, float16=125),
        multiprocessors=80,
        shared_bytes=96 << 10,
        shared_unit=256,
        reserved_shared_bytes=0,
    ),
    "sm_75": Architecture(
        chips="T4, RTX 20",
        rates=Rates(memory_gb=320, float32=8.1, float16=65, int8=130),
        multiprocessors=72,
        warps=32,
        blocks=16,
        shared_bytes=64 << 10,
        shared_unit=256,
        reserved_shared_bytes=0,
    ),
    "sm_80": Architecture(
        chips="A100, A30",
        rates=Rates(memory_gb=1555, float32=19.5, tf32=156, float16=312, int8=624),
        has=_AMPERE,
        multiprocessors=108,
        shared_bytes=164 << 10,
    ),
    "sm_86": Architecture(
        chips="A10, RTX 30",
        rates=Rates(memory_gb=600, float32=31.2, tf32=62.5, float16=125, int8=250),
        has=_AMPERE,
        multiprocessors=84,
        warps=48,
        blocks=16,
        shared_bytes=100 << 10,
    ),
    "sm_89": Architecture(
        chips="L4, L40, RTX 40",
        rates=Rates(memory_gb=300, float32=30.3, tf32=60, float16=121, int8=242, fp8=242),
        has=_ADA,
        multiprocessors=142,
        warps=48,
        blocks=24,
        shared_bytes=100 << 10,
    ),
    "sm_90": Architecture(
        chips="H100, H200",
        rates=Rates(memory_gb=3350, float32=67, tf32=495, float16=989, int8=1979, fp8=1979),
        has=_HOPPER,
        multiprocessors=132,
        shared_bytes=228 << 10,
    ),
    "sm_100": Architecture(
        chips="B200, B100",
        rates=Rates(memory_gb=7700, float32=75, tf32=1100, float16=2250, int8=4500, fp8=4500),
        has=_BLACKWELL,
        multiprocessors=148,
        shared_bytes=228 << 10,
    ),
    "sm_120": Architecture(
        chips="RTX 50, RTX PRO 6000",
        # The white paper halves fp8 that adds up in 32 bits, as it does float16, to 419. Measured
        # by cuBLASLt it is not: 774 on an RTX 5090 (github.com/xzwgit/gpu-flops-bench), and 185,
        # eight times float32's peak, on an RTX 5060 Ti (github.com/QuantumDrizzy/BLACKWALL). An RTX
        # 4090 does halve it (354 to int8's 676); the L4, by which sm_89 is estimated, does not.
        rates=Rates(memory_gb=1792, float32=105, tf32=105, float16=210, int8=838, fp8=838),
        has=_BLACKWELL,
        multiprocessors=188,
        warps=48,
        blocks=24,
        shared_bytes=100 << 10,
    ),
}
# what plans are built for; Volta is in the table for its occupancy alone: CUDA 13 writes nothing
# for it
GPU_TARGETS = tuple(name for name in ARCHITECTURES if name != "sm_70")
TARGETS = ("cpu", *GPU_TARGETS, "reference")


def is_gpu(target: str) -> bool:
    """Whether a target is a GPU's."""
    return target in GPU_TARGETS


def has(target: str, feature: Feature) -> bool:
    """Whether a target is a GPU's that has this."""
    return is_gpu(target) and feature in ARCHITECTURES[target].has


def capability(target: str) -> int:
    """A GPU's compute capability in one number: 86 of ``sm_86``."""
    return int(target.removeprefix("sm_"))


def target_of(major: int, minor: int) -> str | None:
    """The target for a compute capability: its own, or the nearest older one.

    What the older one has, the GPU has too, but for the architecture's own instructions
    (``wgmma``), which no target from ``sm_100`` on claims. None for a GPU that is older than all.
    """
    older = [t for t in GPU_TARGETS if capability(t) <= 10 * major + minor]
    return older[-1] if older else None


def is_own(target: str, major: int, minor: int) -> bool:
    """Whether machine code for the target is that of a GPU of this compute capability.

    A GPU without a target of its own computes as the nearest one does, by code that is compiled
    for itself: Triton writes ``sm_120a``, which an ``sm_121`` does not run.
    """
    return capability(target) == 10 * major + minor
