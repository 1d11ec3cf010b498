"""Convolution by Fourier transforms of overlapping tiles of up to 32×32 pixels (overlap-save).

Three kernels: tiles (and filters) → spectra, a complex matrix product at each frequency, spectra →
outputs with the epilogue; a transform is two products with constant matrices (dft.py). With a
stride only the outputs that are wanted are transformed back. An infinity or NaN reaches all outputs
of its tiles.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.core.integers import power_of_two, round_up
from tessella.device.launch import launch
from tessella.device.packing import packed
from tessella.kernels.catalog import Call
from tessella.kernels.conv.fourier import dft
from tessella.kernels.conv.tiles import on_plain_units
from tessella.kernels.epilogue.triton_device import cast, finish
from tessella.operations.epilogue import Epilogue
from tessella.operations.problem import Problem

outclassed = dft.outclassed
LARGEST_TILE = 32
WARPS = 8  # of a block that transforms
PASS_NUMBERS = 2**27  # of one spectrum, at most: larger batches go in several passes


@triton.jit
def _forward(
    image, matrices, spectrum, sizes, strides, grid, inner, plane,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PERIOD: tl.constexpr, SIGN: tl.constexpr,
    I: tl.constexpr, J: tl.constexpr, U: tl.constexpr,
    TILES: tl.constexpr, CHANNELS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Spectra of TILES tiles in each of CHANNELS channels; a filter is an image of one tile.

    Even and odd rows are transformed apart, to v < T/2. Their sum is the spectrum there, and their
    difference (SIGN −1; the sum again if the rows lie an even number apart) that at v + T/2.
    ``grid`` is tiles down and across, the steps between them, and the padding.
    """
    width_matrix, even_matrix, odd_matrix = matrices
    tiles, first, channels, height, width = sizes
    stride_n, stride_c, stride_h, stride_w = strides
    tiles_h, tiles_w, step_h, step_w, pad_h, pad_w = grid
    ENTRIES: tl.constexpr = TILES * CHANNELS
    entry = tl.arange(0, ENTRIES)
    m = tl.program_id(0) * TILES + entry % TILES
    c = tl.program_id(1) * CHANNELS + entry // TILES
    there = (m < tiles) & (c < channels)
    tile = first + m
    n = tile // (tiles_h * tiles_w)
    top = tile // tiles_w % tiles_h * step_h - pad_h
    left = tile % tiles_w * step_w - pad_w
    base = n.to(tl.int64) * stride_n + c.to(tl.int64) * stride_c
    even = _rows(image + base, width_matrix, even_matrix, there, top, left, height, width,
                 stride_h, stride_w, 0, ROWS, COLUMNS, ENTRIES, I, J, U)  # fmt: skip
    # between the steps: or the loads of one begin in the one before, and registers spill
    tl.debug_barrier()
    odd = _rows(image + base, width_matrix, odd_matrix, there, top, left, height, width,
                stride_h, stride_w, 1, ROWS, COLUMNS, ENTRIES, I, J, U)  # fmt: skip
    u = tl.arange(0, U)
    v = tl.arange(0, 2 * U) // 2
    imaginary = tl.arange(0, 2 * U) % 2
    wanted = (u < PERIOD // 2)[:, None] & (v < PERIOD // 2)[None, :]
    mask = there[:, None, None] & wanted[None, :, :]
    pitch = channels * inner
    offset = (u[:, None] * PERIOD + v[None, :]) * pitch + imaginary[None, :] * plane
    at = spectrum + (c * inner + m)[:, None, None] + offset[None, :, :]
    tl.store(at, dft.rounded(even + odd, ROUND), mask=mask)
    tl.store(at + PERIOD // 2 * pitch, dft.rounded(even + SIGN * odd, ROUND), mask=mask)


@triton.jit
def _rows(
    image, width_matrix, height_matrix, there, top, left, height, width, stride_h, stride_w,
    odd, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ENTRIES: tl.constexpr,
    I: tl.constexpr, J: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """What every other row of the tiles adds to their spectra: [ENTRIES, u, (v, re | im)]."""
    i = 2 * tl.arange(0, I) + odd
    j = tl.arange(0, J)
    h = top[:, None] + i[None, :]
    w = left[:, None] + j[None, :]
    in_h = there[:, None] & (i < ROWS)[None, :] & (h >= 0) & (h < height)
    in_w = (j < COLUMNS)[None, :] & (w >= 0) & (w < width)
    at = image[:, None, None] + h[:, :, None] * stride_h + w[:, None, :] * stride_w
    x = tl.load(at, mask=in_h[:, :, None] & in_w[:, None, :], other=0.0).to(tl.float32)
    u = tl.arange(0, 2 * U)
    matrix = tl.load(width_matrix + j[:, None] * (2 * U) + u[None, :])
    x = tl.dot(tl.reshape(x, (ENTRIES * I, J)), matrix, input_precision="ieee")
    tl.debug_barrier()
    x = tl.permute(tl.reshape(x, (ENTRIES, I, U, 2)), (0, 2, 1, 3))
    row = tl.arange(0, 2 * I)
    matrix = tl.load(height_matrix + row[:, None] * (2 * U) + u[None, :])
    x = tl.dot(tl.reshape(x, (ENTRIES * U, 2 * I)), matrix, input_precision="ieee")
    return tl.reshape(x, (ENTRIES, U, 2 * U))


@triton.jit
def _inverse(
    spectrum, matrices, out, epilogue, sizes, strides, residual_strides, grid, inner, plane,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PERIOD: tl.constexpr, LOW: tl.constexpr,
    I: tl.constexpr, J: tl.constexpr, U: tl.constexpr,
    TILES: tl.constexpr, CHANNELS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Outputs of TILES tiles in each of CHANNELS output channels, epilogue included.

    The first LOW rows are the sum of what even and odd frequencies v give, and rows T/2 below them,
    if there are more, the difference. ``epilogue`` is bias, residual, scale, alpha and beta.
    """
    even_matrix, odd_matrix, width_matrix = matrices
    bias, residual, scale, alpha, beta = epilogue
    tiles, first, channels, rows, height, width = sizes
    stride_n, stride_c, stride_h, stride_w = strides
    residual_n, residual_c, residual_h, residual_w = residual_strides
    tiles_h, tiles_w = grid
    ENTRIES: tl.constexpr = TILES * CHANNELS
    entry = tl.arange(0, ENTRIES)
    m = tl.program_id(0) * TILES + entry % TILES
    k = tl.program_id(1) * CHANNELS + entry // TILES
    there = (m < tiles) & (k < channels)
    u = tl.arange(0, U)
    v = tl.arange(0, 2 * U)
    wanted = (u < PERIOD // 2)[:, None] & (v < PERIOD)[None, :]
    mask = there[:, None, None] & wanted[None, :, :]
    pitch = rows * inner
    offset = (u[:, None] * PERIOD + (v // 2 * 2)[None, :]) * pitch + (v % 2 * plane)[None, :]
    at = spectrum + (k * inner + m)[:, None, None] + offset[None, :, :]
    i = tl.arange(0, 2 * I)
    even = tl.reshape(tl.load(at, mask=mask, other=0.0), (ENTRIES * U, 2 * U))
    matrix = tl.load(even_matrix + v[:, None] * (2 * I) + i[None, :])
    even = tl.dot(even, matrix, input_precision="ieee")  # (entry, u), (i, re | im)
    odd = tl.reshape(tl.load(at + pitch, mask=mask, other=0.0), (ENTRIES * U, 2 * U))
    matrix = tl.load(odd_matrix + v[:, None] * (2 * I) + i[None, :])
    odd = tl.dot(odd, matrix, input_precision="ieee")
    tile = first + m
    n = (tile // (tiles_h * tiles_w)).to(tl.int64)
    top = tile // tiles_w % tiles_h * ROWS
    left = tile % tiles_w * COLUMNS
    out += n * stride_n + k.to(tl.int64) * stride_c
    biases, scales = None, None
    if bias is not None:
        biases = tl.load(bias + k, mask=there, other=0.0)[:, None, None]
    if scale is not None:
        scales = tl.load(scale + k, mask=there, other=0.0)[:, None, None]
    if residual is not None:
        residual += n * residual_n + k.to(tl.int64) * residual_c
    for half in tl.static_range(2 if ROWS > LOW else 1):
        x = even + odd if half == 0 else even - odd
        x = tl.permute(tl.reshape(x, (ENTRIES, U, I, 2)), (0, 2, 1, 3))
        j = tl.arange(0, J)
        matrix = tl.load(width_matrix + v[:, None] * J + j[None, :])
        x = tl.dot(tl.reshape(x, (ENTRIES * I, 2 * U)), matrix, input_precision="ieee")
        x = tl.reshape(x, (ENTRIES, I, J))
        i = half * LOW + tl.arange(0, I)
        h = top[:, None] + i[None, :]
        w = left[:, None] + j[None, :]
        in_h = there[:, None] & (h < height) & (i < (ROWS if half == 1 else LOW))[None, :]
        in_w = (j < COLUMNS)[None, :] & (w < width)
        mask = in_h[:, :, None] & in_w[:, None, :]
        residuals = None
        if residual is not None:
            at = residual[:, None, None] + h[:, :, None] * residual_h + w[:, None, :] * residual_w
            residuals = tl.load(at, mask=mask, other=0.0)
        x = finish(x, scales, biases, residuals, alpha, beta, None, ACTIVATION)
        at = out[:, None, None] + h[:, :, None] * stride_h + w[:, None, :] * stride_w
        tl.store(at, cast(x, out.dtype.element_ty), mask=mask)


# ------------------------------------------------------------------ how a problem is cut
@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a problem is cut into tiles.

    Attributes:
        period: a tile's side, T.
        kept: outputs of a tile, by axis.
        grid: tiles of an image, by axis.
        tiles: of all images.
        reach: (filter side − 1) · dilation + 1, by axis.
    """

    period: int
    kept: tuple[int, int]
    grid: tuple[int, int]
    tiles: int
    reach: tuple[int, int]

    @classmethod
    def of(cls, problem: Problem, tile: int) -> Cut:
        stride = problem.attrs["stride"]
        batch, _, *outputs = problem.output.shape
        reach = _reach(problem)
        kept = tuple(min(p, (tile - e) // s + 1) for p, e, s in zip(outputs, reach, stride))
        grid = tuple(-(-p // k) for p, k in zip(outputs, kept))
        return cls(period=tile, kept=kept, grid=grid, tiles=batch * math.prod(grid), reach=reach)

    @property
    def frequencies(self) -> int:
        return self.period * (self.period // 2)

    @property
    def entries(self) -> int:
        """Tiles of a channel that a block transforms at once: as many as its registers hold."""
        return 8 if self.period > 16 else 16

    @property
    def half(self) -> int:
        """Half the frequencies of an axis, in a power of two."""
        return max(8, power_of_two(self.period // 2))


def _reach(problem: Problem) -> tuple[int, int]:
    sides = zip(problem["weight"].shape[2:], problem.attrs["dilation"])
    return tuple((n - 1) * d + 1 for n, d in sides)


def fits(problem: Problem) -> str | None:
    refused = dft.refusal(problem)
    if refused is not None:
        return refused
    if max(_reach(problem)) > LARGEST_TILE:
        return f"filters reach over at most {LARGEST_TILE} pixels, not {max(_reach(problem))}"
    filters, channels = problem["weight"].shape[:2]
    if 2 * LARGEST_TILE**2 * (filters + 128) * (channels + 16) >= 2**31:
        return "more than 2³¹ numbers in the filters' spectra"
    return None


# blocks of the product: filters, tiles, warps, and the time of an H200 (11×11 of MISSION's table,
# tiles of 26) over the best: 75 µs on the plain units, 73 µs on tensor cores
_PLAIN = ((64, 32, 4, 1.0), (128, 32, 8, 1.07), (64, 64, 8, 1.1), (128, 64, 8, 1.2))
_TENSOR = ((128, 64, 8, 1.0), (64, 64, 4, 1.09), (64, 32, 4, 1.2))
_FEW_TILES = (64, 16, 4, 1.5)


def configs(problem: Problem) -> tuple[dict[str, Any], ...]:
    """Configurations by estimated time: of the four best tile sides, the two best blocks of the
    product.
    """
    if problem.output_is_empty:
        return ({},)
    blocks = (*(_PLAIN if on_plain_units(problem) else _TENSOR), _FEW_TILES)
    offers: list[tuple[float, int, dict[str, Any]]] = []
    for tile in range(8, LARGEST_TILE + 1, 2):
        if tile < max(_reach(problem)):
            continue
        cut = Cut.of(problem, tile)
        times = [(_estimate_us(problem, cut, k, m, loss), k, m, w) for k, m, w, loss in blocks]
        for place, (time_us, k, m, warps) in enumerate(sorted(times)[:2]):
            config = {"tile": tile, "block_k": k, "block_m": m, "warps": warps}
            offers.append((time_us, place, config))
    firsts = sorted(time_us for time_us, place, _ in offers if place == 0)[:4]
    tiles = {
        config["tile"] for time_us, place, config in offers if place == 0 and time_us in firsts
    }
    best = sorted((o for o in offers if o[2]["tile"] in tiles), key=lambda o: o[0])
    return tuple(config for _, _, config in best[:8])


def _estimate_us(problem: Problem, cut: Cut, block_k: int, block_m: int, loss: float) -> float:
    """The estimated time: products at 38 TFLOP/s, transforms at 20, spectra at 3.5 TB/s, written
    and read.
    """
    filters, channels = problem["weight"].shape[:2]
    m, k = round_up(cut.tiles, block_m), round_up(filters, block_k)
    products = 8 * cut.frequencies * m * k * channels * loss
    constant = problem.is_constant("weight")
    numbers = m * channels + m * k + k * channels * (0.5 if constant else 1)
    entries = m * channels + m * filters + (0 if constant else filters * channels / 2)
    transforms = entries * 32 * cut.half**3
    return (products / 38e12 + transforms / 20e12 + numbers * cut.frequencies * 16 / 3.5e12) * 1e6


# ------------------------------------------------------------------ calls
def _spectra(problem: Problem, cut: Cut, block_k: int, block_m: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the spectra: of filters, of tiles, and of their product."""
    filters, channels = problem["weight"].shape[:2]
    a_pass = PASS_NUMBERS // (2 * cut.frequencies * max(channels, round_up(filters, block_k)))
    m = round_up(min(cut.tiles, max(a_pass, block_m)), block_m)
    k = round_up(filters, block_k)
    return {
        "images": (2, cut.frequencies, channels, m),
        "products": (2, cut.frequencies, k, m),
        "weights": (2, cut.frequencies, channels, k),
    }


def workspace_bytes(
    problem: Problem, *, tile: int = 32, block_k: int = 64, block_m: int = 32, **_: Any
) -> int:
    if problem.output_is_empty:
        return 0
    return dft.workspace_bytes(problem, _spectra(problem, Cut.of(problem, tile), block_k, block_m))


def bind(
    problem: Problem,
    constants: Mapping[int, torch.Tensor],
    *,
    tile: int = 32,
    block_k: int = 64,
    block_m: int = 32,
    warps: int = 4,
) -> Call:
    """Filters that are constant are transformed here, once.

    Args:
        tile: its side, even, at most 32.
        block_k, block_m, warps: of the product: filters, and tiles.
    """
    if problem.output_is_empty:
        return lambda *inputs, out, workspace=None: out
    cut = Cut.of(problem, tile)
    shapes = _spectra(problem, cut, block_k, block_m)
    plain = on_plain_units(problem)
    precision = "ieee" if plain else "tf32"
    dilation, (rows, columns) = problem.attrs["dilation"], problem["weight"].shape[2:]
    # a captured call must not make them
    device = dft.device(constants)
    inverse_matrices(cut, problem.attrs["stride"], device)
    forward_matrices(cut, (tile, tile), (1, 1), device)
    forward_matrices(cut, (rows, columns), dilation, device)

    def of_filters(weight: torch.Tensor, spectrum: torch.Tensor) -> torch.Tensor:
        filter_cut = Cut(period=tile, kept=(1, 1), grid=(1, 1), tiles=weight.shape[0], reach=(1, 1))
        forward(weight, spectrum, filter_cut, sides=(rows, columns), spread=dilation,
                step=(0, 0), padding=(0, 0), first=0, round_to_tf32=not plain)  # fmt: skip
        return spectrum

    weights = None
    if 1 in constants:
        weights = packed(
            constants[1],
            ("conv2d.fft_tiling", tile, block_k, dilation, precision),
            lambda w: of_filters(w, w.new_zeros(shapes["weights"], dtype=torch.float32)),
        )

    def call(*inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor) -> torch.Tensor:
        x, weight, epilogue = problem.product_operands(constants, inputs)
        images, products, *own = dft.carved(workspace, shapes)
        spectrum = of_filters(weight, own[0]) if weights is None else weights
        step = tuple(k * s for k, s in zip(cut.kept, problem.attrs["stride"]))
        for first in range(0, cut.tiles, images.shape[3]):
            forward(x, images, cut, sides=(tile, tile), spread=(1, 1), step=step,
                    padding=problem.attrs["padding"], first=first,
                    round_to_tf32=not plain)  # fmt: skip
            dft.product(spectrum, images, products, block_k=block_k, block_m=block_m,
                        precision=precision, num_warps=warps)  # fmt: skip
            inverse(problem, products, cut, out, epilogue, first=first)
        return out

    return call


def forward_matrices(
    cut: Cut, sides: tuple[int, int], spread: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """The matrices of the forward transform: for rows, for a column's even numbers, and for its odd
    ones.
    """
    rows, columns = (tuple(range(0, n * s, s)) for n, s in zip(sides, spread))
    i = max(8, triton.next_power_of_2((sides[0] + 1) // 2))
    j = max(16, triton.next_power_of_2(sides[1]))
    of_columns = functools.partial(
        dft.height_matrix,
        cut.period,
        frequencies=range(cut.period // 2),
        shape=(2 * i, 2 * cut.half),
        device=device,
    )
    of_rows = dft.width_matrix(cut.period, columns, (j, 2 * cut.half), device)
    return of_rows, of_columns(points=rows[::2]), of_columns(points=rows[1::2])


def inverse_matrices(
    cut: Cut, stride: tuple[int, int], device: torch.device
) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """How many rows are sums, and the inverse transform's matrices: of even and odd frequencies v,
    and of u.
    """
    rows, columns = (tuple(range(0, n * s, s)) for n, s in zip(cut.kept, stride))
    low = len(rows)
    if low > 16 and cut.period // 2 % stride[0] == 0:
        low = cut.period // 2 // stride[0]
    i = max(8, triton.next_power_of_2(low))
    j = max(16, triton.next_power_of_2(cut.kept[1]))
    even, odd = (
        dft.height_inverse(
            cut.period, range(odd, cut.period, 2), rows[:low], (2 * cut.half, 2 * i), device
        )
        for odd in (0, 1)
    )
    return low, even, odd, dft.width_inverse(cut.period, columns, (2 * cut.half, j), device)


def forward(
    image: torch.Tensor,
    spectrum: torch.Tensor,
    cut: Cut,
    *,
    sides: tuple[int, int],
    spread: tuple[int, int],
    step: tuple[int, int],
    padding: tuple[int, int],
    first: int,
    round_to_tf32: bool,
) -> None:
    """The spectra of tiles ``first``, …, as many as ``spectrum`` has room for.

    Args:
        image: [N, C, H, W].
        spectrum: [2, frequencies, C, tiles].
        sides: a tile's height and width, as far as they hold anything.
        spread: from one number of it to the next, on the grid of the transform.
        step: from one tile to the next in the image.
    """
    matrices = forward_matrices(cut, sides, spread, image.device)
    tiles = min(cut.tiles - first, spectrum.shape[3])
    channels = image.shape[1]
    across = 4 if image.stride(1) == 1 and channels > 1 else 1  # channels that lie together
    launch(
        _forward,
        (-(-tiles // (cut.entries // across)), -(-channels // across)),
        image, tuple(matrices), spectrum, (tiles, first, channels, *image.shape[2:]),
        image.stride(), (*cut.grid, *step, *padding), spectrum.shape[3], spectrum.stride(0),
        ROWS=sides[0], COLUMNS=sides[1], PERIOD=cut.period, SIGN=(-1) ** spread[0],
        I=matrices[1].shape[0] // 2, J=matrices[0].shape[0], U=cut.half,
        TILES=cut.entries // across, CHANNELS=across, ROUND=round_to_tf32, num_warps=WARPS,
    )  # fmt: skip


def inverse(
    problem: Problem,
    spectrum: torch.Tensor,
    cut: Cut,
    out: torch.Tensor,
    epilogue: Epilogue[torch.Tensor],
    *,
    first: int,
) -> None:
    """Outputs of the tiles ``first``, … from their spectra [2, frequencies, filters, tiles]."""
    low, *matrices = inverse_matrices(cut, problem.attrs["stride"], out.device)
    tiles = min(cut.tiles - first, spectrum.shape[3])
    channels = out.shape[1]
    across = 4 if out.stride(1) == 1 and channels > 1 else 1
    bias, residual, scale = epilogue.bias, epilogue.residual, epilogue.scale
    beta = float(epilogue.beta)
    launch(
        _inverse,
        (-(-tiles // (cut.entries // across)), -(-channels // across)),
        spectrum, tuple(matrices), out,
        (bias, residual, scale, float(epilogue.alpha), beta),
        (tiles, first, channels, spectrum.shape[2], *out.shape[2:]), out.stride(),
        (0,) * 4 if residual is None else residual.stride(),
        tuple(cut.grid), spectrum.shape[3], spectrum.stride(0),
        ROWS=cut.kept[0], COLUMNS=cut.kept[1], PERIOD=cut.period, LOW=low,
        I=matrices[0].shape[1] // 2, J=matrices[2].shape[1], U=cut.half,
        TILES=cut.entries // across, CHANNELS=across, ACTIVATION=epilogue.activation,
        num_warps=WARPS,
    )  # fmt: skip
