"""CUDA C++ of the sparse product for Hopper: what Gluon has no instruction for.

The weight is the sparse operand, so channels are a tile's rows and what the layer reads its
columns: out[row, channel] = Σ weight[channel, k] · x[row, k]. One group of warps loads: values and
x by TMA in rows of 128 bytes with TMA's swizzle, metadata as one copy. The others multiply from
shared memory, and turn their sums through it, so that results leave with channels innermost.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessella.device.cuda_source import INSTRUCTIONS, TYPES, cuda_source
from tessella.kernels.epilogue.cuda import ACTIVATIONS, KINDS, NONE, VECTORS, activation_source
from tessella.operations.epilogue import Epilogue

_KERNEL = cuda_source(__package__, "wgmma.cu")

ROW_BYTES = 128  # of a stage's values; of x it is twice as much
PAD = 4  # floats between columns of sums: no bank is asked twice, and vectors stay aligned
NAMES = {"float16": "f16", "bfloat16": "bf16", "int8": "s8"}


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a product is cut.

    Attributes:
        channels, rows: of a block's result; multiples of 64 and of 8.
        stages: that are loaded ahead.
    """

    channels: int
    rows: int
    stages: int

    @property
    def groups(self) -> int:
        """Warpgroups that multiply, of 128 threads each."""
        return min(2, self.channels // 64)

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    def stage_bytes(self, itemsize: int) -> int:
        """Bytes of a stage: values of the weight, metadata, and rows of the input."""
        metadata = self.channels // 64 * 128 * 4 * words(itemsize)
        return ROW_BYTES * self.channels + 2 * ROW_BYTES * self.rows + metadata

    def shared_bytes(self, itemsize: int) -> int:
        """Shared memory of a block: stages or sums, barriers, and room for aligning them."""
        sums = 4 * self.rows * (self.channels + PAD)
        return max(self.stages * self.stage_bytes(itemsize), sums) + 16 * self.stages + 1024


def words(itemsize: int) -> int:
    """Registers of metadata that a thread has for 64 channels of a stage."""
    return 2 if itemsize == 2 else 4


def depth(itemsize: int) -> int:
    """How many elements along the reduction a stage holds."""
    return 2 * ROW_BYTES // itemsize


def source(
    tiling: Tiling,
    dtype: str,
    out: str,
    epilogue: Epilogue[str],
    *,
    rescaled: bool,
    machine: str | None = None,
) -> str:
    """The code for one tiling and one epilogue; element types by torch's names.

    Args:
        epilogue: its numbers do not matter here: they are arguments of the kernel.
        rescaled: the activation's result is multiplied by ``gamma``.
        machine: instead of ``INSTRUCTIONS`` and the instruction that multiplies.
    """
    itemsize = 1 if dtype == "int8" else 2
    settings = {
        "CHANNELS": tiling.channels,
        "ROWS": tiling.rows,
        "STAGES": tiling.stages,
        "GROUPS": tiling.groups,
        "ITEM": itemsize,
        "OUT": KINDS[out],
        "BIAS": NONE if epilogue.bias is None else KINDS[epilogue.bias],
        "RESIDUAL": NONE if epilogue.residual is None else KINDS[epilogue.residual],
        "SCALED": int(epilogue.scale is not None),
        "RESCALED": int(rescaled),
        "PAD": PAD,
    }
    constants = "".join(f"constexpr int {name} = {value};\n" for name, value in settings.items())
    sums = "typedef int Sum;\n" if itemsize == 1 else "typedef float Sum;\n"
    machine = machine or INSTRUCTIONS + _multiply(tiling.rows, dtype)
    activate = activation_source(ACTIVATIONS[epilogue.activation])
    return constants + sums + TYPES + machine + VECTORS + activate + _KERNEL


def _multiply(rows: int, dtype: str) -> str:
    """The instruction: 64 channels by ``rows``, 64 bytes of each row of x."""
    count = rows // 2
    kind, register = ("s32", "r") if dtype == "int8" else ("f32", "f")
    step, tail = (64, "") if dtype == "int8" else (32, ", 1, 1, 0, 0")
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+{register}"(d[{i}])' for i in range(count))
    name = f"m64n{rows}k{step}.{kind}.{NAMES[dtype]}.{NAMES[dtype]}"
    return f"""
template <int SELECTOR> __device__ __forceinline__
void multiply(Sum (&d)[{count}], u64 a, u64 b, u32 places) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, 1, 0;\\n"
    "wgmma.mma_async.sp.sync.aligned.{name} {{{registers}}}, "
    "%{count}, %{count + 1}, %{count + 2}, %{count + 3}, p{tail};\\n}}"
    : {outputs} : "l"(a), "l"(b), "r"(places), "n"(SELECTOR));
}}
"""
