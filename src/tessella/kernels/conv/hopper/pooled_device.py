"""CUDA C++ of a convolution of few channels and the maximum over its windows, for Hopper.

A block is one group of four warps. It walks down a *band* of windows, 28 of them wide: each warp
has seven, for which it makes 16 pixels of every row of the convolution. Its lane ``4g + q`` holds
the pixels 2g and 2g + 1, and of them the sums of channels 16q … 16q + 15: what a window needs of a
row are these two and the first of lane ``4(g + 1) + q``; what it makes leaves as 16 bytes or 32.

The left matrix are the runs of ``direct``: under one row of the filter a pixel reads one run of
neighbouring values. Lane q multiplies words ``Gq … Gq + G - 1`` of it, for both of its pixels; for
ResNet's three words the lanes of a warp never ask a bank for two of them. A sum may be taken in any
order, so the weight is packed in this one. A run that the next row of the convolution reads again,
under another row of the filter, stays in registers: of a 7×7 filter with stride 2 five of seven.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tessella.device.cuda_source import INSTRUCTIONS, TYPES, cuda_source
from tessella.kernels.epilogue.cuda import ACTIVATIONS, KINDS, NONE, VECTORS, activation_source

THREADS = 128
CHANNELS = 64  # of the result
WINDOWS = 28  # of a band, along a row: seven a warp
PIXELS = 4 * 14 + 2  # of a row of the convolution that they read
LEAST_SHARED_BYTES = 49 << 10  # only for more than 48 KB the driver is told to prefer it to L1
BLOCK_BYTES = 8192  # of packed weight: 64 channels, four products deep
NAMES = {"float16": "f16", "bfloat16": "bf16"}
_INSTRUCTIONS = cuda_source(__package__, "pooled.cuh")  # that only this kernel uses
_KERNEL = cuda_source(__package__, "pooled.cu")
# activations that keep the order of numbers
ORDERED: dict[str | None, str] = {
    None: "x",
    "relu": "larger(x, 0.0f)",
    "relu6": ACTIVATIONS["relu6"],
}


@dataclass(frozen=True, kw_only=True)
class Stem:
    """The layer and its windows, in numbers; they are constants of the source.

    Attributes:
        images, height, width: of what is read, ``channels`` together in every pixel.
        taps_h, taps_w, stride_h, stride_w, padding_h, padding_w: of the convolution.
        middle_h, middle_w: what it makes.
        pool_padding_h, pool_padding_w: of the windows, 3×3 with stride 2.
        out_h, out_w: how many there are.
        rows: of windows in a band.
        stages: that are loaded ahead, ``stride_h`` rows of the image each.
    """

    images: int
    height: int
    width: int
    channels: int
    taps_h: int
    taps_w: int
    stride_h: int
    stride_w: int
    padding_h: int
    padding_w: int
    middle_h: int
    middle_w: int
    pool_padding_h: int
    pool_padding_w: int
    out_h: int
    out_w: int
    rows: int = 1
    stages: int = 4

    @property
    def run(self) -> int:
        """Values under one row of the filter."""
        return self.taps_w * self.channels

    @property
    def shift(self) -> int:
        """Values before a run, which count nothing, so that it begins with a whole word."""
        return self.padding_w * self.channels % 2

    @property
    def words(self) -> int:
        """Of a run, for each lane."""
        return -(-(self.shift + self.run) // 8)

    @property
    def depth(self) -> int:
        """Of a sum, in parts of eight values."""
        return self.taps_h * self.words

    @property
    def moved(self) -> bool:
        """Whether the last of an odd number of parts finds room in others, which saves a product.

        Where lane 3 has no word in the last part of any row of taps, it takes those that lanes 0, 1
        and 2 have in the very last: one each in rows that follow each other by ``stride_h``, so
        that what moves on with a row is put in anew.
        """
        free = 2 * (4 * self.words - 1) >= self.shift + self.run
        return self.depth % 2 == 1 and free and self.taps_h > 1 + 2 * self.stride_h

    @property
    def products(self) -> int:
        """Instructions of a row of the convolution."""
        return (self.depth - self.moved + 1) // 2

    @property
    def weight_bytes(self) -> int:
        return -(-self.products // 4) * BLOCK_BYTES

    @property
    def step(self) -> int:
        """Words from a pixel of the convolution to the next one."""
        return self.stride_w * self.channels // 2

    @property
    def first(self) -> int:
        """The word of a row of the image where the first band's first run begins; below zero."""
        pixels = self.pool_padding_w * self.stride_w + self.padding_w
        return -(pixels * self.channels + self.shift) // 2

    @property
    def lead(self) -> int:
        """Words that are loaded before it: requests begin with a sector of 32 bytes."""
        return self.first % 8

    @property
    def pitch(self) -> int:
        """Words of a row that are loaded at a time, a multiple of 16 bytes."""
        return -(-(self.lead + (PIXELS - 1) * self.step + 4 * self.words) // 4) * 4

    @property
    def stage_bytes(self) -> int:
        return -(-4 * self.stride_h * self.pitch // 128) * 128

    @property
    def bands(self) -> int:
        """Of an image, one below another."""
        return -(-self.out_h // self.rows)

    @property
    def across(self) -> int:
        """Bands side by side."""
        return -(-self.out_w // WINDOWS)

    @property
    def tasks(self) -> int:
        return self.images * self.bands * self.across

    @property
    def shared_bytes(self) -> int:
        """Of a block: weight, stages, biases, barriers, and what aligning may cost."""
        stages = self.stages * (self.stage_bytes + 16)
        return max(self.weight_bytes + stages + 4 * CHANNELS + 8 + 1024, LEAST_SHARED_BYTES)


def source(
    stem: Stem,
    *,
    dtype: str,
    out: str,
    bias: str | None,
    rescaled: bool,
    activation: str | None,
    blocks: int,
    machine: str | None = None,
) -> str:
    """The code for one layer; element types by torch's names.

    Args:
        rescaled: the activation's result is multiplied by ``gamma``.
        blocks: of a multiprocessor: so many must find registers.
        machine: instead of what only this GPU has.
    """
    derived = (
        "run", "shift", "words", "depth", "products", "weight_bytes", "step", "first", "lead",
        "pitch", "stage_bytes", "bands", "across", "moved",
    )  # fmt: skip
    settings = {
        **{n: value for n, value in asdict(stem).items() if n != "images"},  # of any number
        **{name: getattr(stem, name) for name in derived},
        "windows": WINDOWS,
        "out": KINDS[out],
        "bias": NONE if bias is None else KINDS[bias],
        "rescaled": int(rescaled),
        "blocks": blocks,
    }
    constants = "".join(
        f"constexpr int {name.upper()} = {int(value)};\n" for name, value in settings.items()
    )
    machine = machine or INSTRUCTIONS + _INSTRUCTIONS + _multiply(NAMES[dtype])
    activate = activation_source(ORDERED[activation])
    return constants + "typedef float Sum;\n" + TYPES + machine + VECTORS + activate + _KERNEL


def _multiply(name: str) -> str:
    """The instruction: 16 pixels a warp from registers, 16 deep, by 64 channels."""
    registers = ", ".join(f"%{i}" for i in range(32))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(32))
    return f"""
template <bool ADDS> __device__ __forceinline__
void multiply(float (&d)[32], u32 a, u32 b, u32 c, u32 e, u64 weight) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %37, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.{name}.{name} {{{registers}}}, "
    "{{%32, %33, %34, %35}}, %36, p, 1, 1, 0;\\n}}"
    : {outputs} : "r"(a), "r"(b), "r"(c), "r"(e), "l"(weight), "n"((int)ADDS));
}}
"""
