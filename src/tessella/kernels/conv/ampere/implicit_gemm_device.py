"""CUDA C++ of a convolution as a matrix product by ``mma.sync``, for GPUs from Ampere on.

A block multiplies pixels × filters; stages of both operands come by ``cp.async``, whose rows are
turned so that neither copies nor ``ldmatrix`` meet a bank twice. For every pixel that a thread
loads, it keeps where the first tap reads and a bit a tap: whether that is inside the image. Results
leave through shared memory, 16 bytes a thread; the residual comes the same way, with the first
stages where there is room.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessella.device.cuda_source import CONVERSIONS, TYPES, cuda_source
from tessella.kernels.epilogue.cuda import ACTIVATIONS, KINDS, NONE, activation_source
from tessella.operations.epilogue import Epilogue

INSTRUCTIONS = cuda_source(__package__, "instructions.cuh")
_KERNEL = cuda_source(__package__, "implicit_gemm.cu")
NAMES = {"float16": "f16", "bfloat16": "bf16", "int8": "s8"}
ITEMS = {"float16": 2, "bfloat16": 2, "int8": 1}  # bytes


@dataclass(frozen=True)
class Tile:
    """How a product is cut: a configuration.

    Attributes:
        pixels, filters: of a block's result.
        depth: of a stage, in bytes of a pixel or a filter.
        warps_m, warps_n: how many share a block's pixels and filters.
        stages: in shared memory.
        blocks: of a multiprocessor: so many must find registers.
        early: the residual has room of its own, and is loaded before the products.
        persistent: a block makes one tile after another, and loads the next one's first stages
            while it stores.
        patches: above 0 all taps read the same pixels in shared memory, which are so often there:
            for one part of the channels, or for the next one too.
    """

    pixels: int
    filters: int
    depth: int
    warps_m: int
    warps_n: int
    stages: int
    blocks: int
    early: bool = False
    persistent: bool = False
    patches: int = 0

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def stage_bytes(self) -> int:
        return self.depth * ((0 if self.patches else self.pixels) + self.filters)

    def result_bytes(self, itemsize: int) -> int:
        return itemsize * self.pixels * self.filters

    def patch_bytes(self, beside: int) -> int:
        """Of patches, with so many pixels that taps read beside a tile's, and of a row of zeros."""
        return self.depth * (self.patches * (self.pixels + beside) + 1) if self.patches else 0

    def shared_bytes(self, itemsize: int, beside: int = 0) -> int:
        """Of a block: stages and patches, and the result behind them or in their place."""
        loaded = self.stages * self.stage_bytes + self.patch_bytes(beside)
        result = self.result_bytes(itemsize)
        return loaded + result if self.early or self.persistent else max(loaded, result)


def source(
    tile: Tile,
    dtype: str,
    out: str,
    epilogue: Epilogue[str],
    *,
    taps: bool,
    deeper: bool,
    beside: int,
    rescaled: bool,
    machine: str | None = None,
) -> str:
    """The code for one tile and one epilogue; element types by torch's names.

    Args:
        taps: the filter has more than one tap, or reads beside the image.
        deeper: a stage is deeper than the channels, so that taps begin within it.
        beside: pixels that taps read beside those of a tile.
        rescaled: the activation's result is multiplied by ``gamma``.
        machine: instead of what only a GPU has.
    """
    settings = {
        "BM": tile.pixels,
        "BN": tile.filters,
        "ROW_BYTES": tile.depth,
        "WARPS_M": tile.warps_m,
        "WARPS_N": tile.warps_n,
        "STAGES": tile.stages,
        "BLOCKS": tile.blocks,
        "ITEM": ITEMS[dtype],
        "OUT": KINDS[out],
        "OUT_ITEM": ITEMS[out],
        "BIAS": NONE if epilogue.bias is None else KINDS[epilogue.bias],
        "SCALE": NONE if epilogue.scale is None else KINDS[epilogue.scale],
        "RESIDUAL": int(epilogue.residual is not None),
        "EARLY": int(tile.early),
        "PERSISTENT": int(tile.persistent),
        "TAPS": int(taps),
        "DEEPER": int(deeper),
        "PATCHES": tile.patches,
        "PATCH_ROWS": tile.pixels + beside if tile.patches else 0,
        "RESCALED": int(rescaled),
        "ALPHA": int(epilogue.alpha != 1),
        "BETA": int(epilogue.beta != 1),
        "RELU": int(epilogue.activation == "relu"),
    }
    constants = "".join(f"constexpr int {name} = {value};\n" for name, value in settings.items())
    sums = "typedef int Sum;\n" if dtype == "int8" else "typedef float Sum;\n"
    activate = activation_source(ACTIVATIONS[epilogue.activation])
    machine = machine or CONVERSIONS + INSTRUCTIONS + multiply_source(dtype)
    return constants + sums + TYPES + machine + activate + _KERNEL


def multiply_source(dtype: str) -> str:
    """The instruction: 16 rows by 8 columns, 32 bytes deep."""
    kind, register, depth = ("s32", "r", 32) if dtype == "int8" else ("f32", "f", 16)
    name = f"m16n8k{depth}.row.col.{kind}.{NAMES[dtype]}.{NAMES[dtype]}.{kind}"
    sums = ", ".join(f'"+{register}"(d[{i}])' for i in range(4))
    return f"""
__device__ __forceinline__ void multiply(Sum (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {{
  asm("mma.sync.aligned.{name} {{%0, %1, %2, %3}}, "
      "{{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
      : {sums}
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}}
"""
