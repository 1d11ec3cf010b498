"""CUDA C++ of a first layer, of few channels, by ``mma.sync``, for GPUs from Ampere on.

A block has rows of the image in shared memory and makes some rows of the result. The left matrix
are the runs of a pixel: under one row of the filter it reads one run of neighbouring values, whose
words lie where a lane wants them, for any pixel. So nothing is rearranged, and a row of the image
is read once a block.

Where windows are pooled, a block keeps the rows that some of them read in shared memory, and stores
the maxima: what the convolution makes never reaches memory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tessella.device.cuda_source import CONVERSIONS, TYPES, cuda_source
from tessella.kernels.conv.ampere.implicit_gemm_device import INSTRUCTIONS, multiply_source
from tessella.kernels.epilogue.cuda import ACTIVATIONS, KINDS, NONE, activation_source

_KERNEL = cuda_source(__package__, "direct.cu")
FILTERS = 64  # of a block


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The layer in numbers, which are constants of the source.

    Attributes:
        height, width, channels: of the image.
        out_h, out_w: what it makes.
        pool_h, pool_w: windows of 3×3 with stride 2 over that, whose maxima are the result; 0 if
            there are none.
        rows: of the result that a block makes.
        warps, mi: of a block, and how many tiles of 16 pixels each multiplies at a time.
        blocks: of a multiprocessor: so many must find registers.
        lines: rows of windows that are pooled at a time.
    """

    height: int
    width: int
    channels: int
    taps_h: int
    taps_w: int
    stride_h: int
    stride_w: int
    padding_h: int
    padding_w: int
    out_h: int
    out_w: int
    pool_h: int = 0
    pool_w: int = 0
    pool_padding_h: int = 0
    pool_padding_w: int = 0
    rows: int = 4
    warps: int = 4
    mi: int = 2
    blocks: int = 2
    lines: int = 1

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
        """Of a run, in fours."""
        return -(-(self.shift + self.run) // 8) * 4

    @property
    def step(self) -> int:
        """Words from a pixel of the result to the next one."""
        return self.stride_w * self.channels // 2

    @property
    def first(self) -> int:
        """The word of a row of the image where the first run begins: zero, or below."""
        return -(self.padding_w * self.channels + self.shift) // 2

    @property
    def lead(self) -> int:
        """Zeros before a row in shared memory, in words."""
        return -(self.first // 4) * 4

    @property
    def pitch(self) -> int:
        """Words of a row in shared memory: as far as any tile of 16 pixels reads."""
        pixels = -(-self.out_w // 16) * 16
        read = self.lead + self.first + (pixels - 1) * self.step + self.words
        return -(-max(read, self.lead + self.width * self.channels // 2) // 4) * 4

    @property
    def products(self) -> int:
        """Instructions below one another, of 16 values each."""
        return -(-self.taps_h * self.words // 8)

    @property
    def weight_pitch(self) -> int:
        """Bytes of a filter: an odd number of 16, so that eight of them lie in other banks."""
        return 32 * self.products + 16

    @property
    def bands(self) -> int:
        return -(-(self.pool_h or self.out_h) // self.rows)

    @property
    def made(self) -> int:
        """Rows that a block makes, before any are pooled."""
        return 2 * self.rows + 1 if self.pool_h else self.rows

    @property
    def parts(self) -> list[int]:
        """Rows that a block makes between two waits of all its threads."""
        if not self.pool_h:
            return [self.rows]
        lines = [min(self.lines, self.rows - line) for line in range(0, self.rows, self.lines)]
        return [2 * n + (i == 0) for i, n in enumerate(lines)]

    @property
    def read(self) -> int:
        """Rows of the image that a block reads."""
        return (self.made - 1) * self.stride_h + self.taps_h

    @property
    def shared_bytes(self) -> int:
        pixel = FILTERS * 2 if self.pool_h else 0
        kept = (2 * self.lines + 1) * self.out_w * pixel  # what windows read
        return FILTERS * (self.weight_pitch + 4) + 4 * self.read * self.pitch + kept


def source(
    layer: Layer,
    dtype: str,
    bias: str | None,
    *,
    rescaled: bool,
    activation: str | None,
    machine: str | None = None,
) -> str:
    """The code for one layer; element types by torch's names.

    Args:
        rescaled: the activation's result is multiplied by ``gamma``.
        machine: instead of what only a GPU has.
    """
    derived = ("run", "shift", "words", "step", "first", "lead", "pitch", "weight_pitch")
    settings = {
        **asdict(layer),
        **{name: getattr(layer, name) for name in derived},
        "filters": FILTERS,
        "kind": KINDS[dtype],
        "bias": NONE if bias is None else KINDS[bias],
        "rescaled": int(rescaled),
    }
    constants = "".join(
        f"constexpr int {name.upper()} = {value};\n" for name, value in settings.items()
    )
    machine = machine or CONVERSIONS + INSTRUCTIONS + multiply_source(dtype)
    sums = "typedef float Sum;\n"
    return constants + sums + TYPES + machine + activation_source(ACTIVATIONS[activation]) + _KERNEL
