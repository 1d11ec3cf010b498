"""Convolution by Fourier transforms of whole images.

Each transform is two passes, along rows and along columns, and each pass a matrix product with a
constant matrix (dft.py): for the sides that images have, that costs less than moving the spectra.
An infinity or NaN in an image reaches all its outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tessella.core.integers import round_up
from tessella.device.launch import launch
from tessella.device.packing import packed
from tessella.kernels.catalog import Call
from tessella.kernels.conv.fourier import dft
from tessella.kernels.conv.tiles import on_plain_units
from tessella.kernels.epilogue.triton_device import cast, finish
from tessella.operations.epilogue import Epilogue
from tessella.operations.problem import Problem

outclassed = dft.outclassed
LARGEST_PERIOD = 1024


@triton.jit
def _forward_rows(
    image, matrix, out, batch, inner, lines, width, frequencies, columns,
    stride_n, stride_c, stride_h, stride_w, plane,
    BLOCK_U: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """out[u, h, (c, n)] = Σ_w matrix[w, u] · image[n, c, h, w], complex in two planes."""
    h = tl.program_id(2)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    u = tl.program_id(1) * BLOCK_U + tl.arange(0, BLOCK_U)
    n = r % inner
    c = r // inner
    there = (n < batch) & (r < columns)
    at = image + n.to(tl.int64) * stride_n + c.to(tl.int64) * stride_c + h * stride_h
    real = tl.zeros((BLOCK_U, BLOCK_R), tl.float32)
    imaginary = tl.zeros((BLOCK_U, BLOCK_R), tl.float32)
    for start in range(0, width, BLOCK_W):
        w = start + tl.arange(0, BLOCK_W)
        mask = (w < width)[:, None] & there[None, :]
        x = tl.load(at[None, :] + w[:, None] * stride_w, mask=mask, other=0.0).to(tl.float32)
        mask = (w < width)[None, :] & (u < frequencies)[:, None]
        angle = matrix + w[None, :] * (2 * frequencies) + 2 * u[:, None]
        real = tl.dot(tl.load(angle, mask=mask, other=0.0), x, real, input_precision="ieee")
        sine = tl.load(angle + 1, mask=mask, other=0.0)
        imaginary = tl.dot(sine, x, imaginary, input_precision="ieee")
    to = out + (u.to(tl.int64) * lines + h)[:, None] * columns + r[None, :]
    mask = (u < frequencies)[:, None] & (r < columns)[None, :]
    tl.store(to, real, mask=mask)
    tl.store(to + plane, imaginary, mask=mask)


@triton.jit
def _columns(
    source, matrix, out, columns, source_plane, out_plane, A, B,
    BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_A: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """out[u, b, r] = Σ_a source[u, a, r] · matrix[a, b], complex: source and out in two planes."""
    u = tl.program_id(2).to(tl.int64)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    source += u * A * columns
    out += u * B * columns
    real = tl.zeros((BLOCK_B, BLOCK_R), tl.float32)
    imaginary = tl.zeros((BLOCK_B, BLOCK_R), tl.float32)
    for start in range(0, A, BLOCK_A):
        a = start + tl.arange(0, BLOCK_A)
        at = source + a[:, None].to(tl.int64) * columns + r[None, :]
        mask = (a < A)[:, None] & (r < columns)[None, :]
        x_re = tl.load(at, mask=mask, other=0.0)
        x_im = tl.load(at + source_plane, mask=mask, other=0.0)
        # matrix[(a, 2), (b, 2)] holds cosine, −sine; sine, cosine: the first column is enough
        at = matrix + a[None, :] * (4 * B) + 2 * b[:, None]
        mask = (a < A)[None, :] & (b < B)[:, None]
        cosine = tl.load(at, mask=mask, other=0.0)
        sine = tl.load(at + 2 * B, mask=mask, other=0.0)
        real = tl.dot(cosine, x_re, real, input_precision="ieee")
        real = tl.dot(sine, x_im, real, input_precision="ieee")
        imaginary = tl.dot(cosine, x_im, imaginary, input_precision="ieee")
        imaginary = tl.dot(sine, -x_re, imaginary, input_precision="ieee")
    to = out + b[:, None].to(tl.int64) * columns + r[None, :]
    mask = (b < B)[:, None] & (r < columns)[None, :]
    tl.store(to, dft.rounded(real, ROUND), mask=mask)
    tl.store(to + out_plane, dft.rounded(imaginary, ROUND), mask=mask)


@triton.jit
def _inverse_rows(
    source, matrix, out, epilogue, sizes, strides, residual_strides, plane,
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_U: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """out[n, k, h, w] = epilogue(Σ_u source[u, h, (k, n)] · matrix[u, w])."""
    bias, residual, scale, alpha, beta = epilogue
    batch, inner, filters, lines, width, frequencies, columns = sizes
    stride_n, stride_c, stride_h, stride_w = strides
    residual_n, residual_c, residual_h, residual_w = residual_strides
    h = tl.program_id(2)
    w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_R, BLOCK_W), tl.float32)
    for start in range(0, frequencies, BLOCK_U):
        u = start + tl.arange(0, BLOCK_U)
        at = source + (u.to(tl.int64) * lines + h)[None, :] * columns + r[:, None]
        mask = (u < frequencies)[None, :] & (r < columns)[:, None]
        x_re = tl.load(at, mask=mask, other=0.0)
        x_im = tl.load(at + plane, mask=mask, other=0.0)
        angle = matrix + 2 * u[:, None] * width + w[None, :]
        mask = (u < frequencies)[:, None] & (w < width)[None, :]
        cosine = tl.load(angle, mask=mask, other=0.0)
        sine = tl.load(angle + width, mask=mask, other=0.0)
        acc = tl.dot(x_re, cosine, acc, input_precision="ieee")
        acc = tl.dot(x_im, sine, acc, input_precision="ieee")
    n = r % inner
    k = r // inner
    there = (n < batch) & (k < filters)
    mask = there[:, None] & (w < width)[None, :]
    biases, scales, residuals = None, None, None
    if bias is not None:
        biases = tl.load(bias + k, mask=there, other=0.0)[:, None]
    if scale is not None:
        scales = tl.load(scale + k, mask=there, other=0.0)[:, None]
    if residual is not None:
        at = residual + n.to(tl.int64) * residual_n + k.to(tl.int64) * residual_c + h * residual_h
        residuals = tl.load(at[:, None] + w[None, :] * residual_w, mask=mask, other=0.0)
    y = finish(acc, scales, biases, residuals, alpha, beta, None, ACTIVATION)
    to = out + n.to(tl.int64) * stride_n + k.to(tl.int64) * stride_c + h * stride_h
    tl.store(to[:, None] + w[None, :] * stride_w, cast(y, out.dtype.element_ty), mask=mask)


# ------------------------------------------------------------------ how large the transforms are
@dataclass(frozen=True, kw_only=True)
class Period:
    """Sides of the transform: the image and its padding on one side; the other wraps onto it."""

    height: int
    width: int

    @classmethod
    def of(cls, problem: Problem) -> Period:
        sides = (*problem["input"].shape[2:], *problem.attrs["padding"])
        height, width = (
            max(side + padding, (n - 1) * d + 1)
            for side, padding, n, d in zip(
                sides[:2], sides[2:], problem["weight"].shape[2:], problem.attrs["dilation"]
            )
        )
        return cls(height=height, width=width + width % 2)

    @property
    def half(self) -> int:
        return self.width // 2


def fits(problem: Problem) -> str | None:
    refused = dft.refusal(problem)
    if refused is not None:
        return refused
    period = Period.of(problem)
    if max(period.height, period.width) > LARGEST_PERIOD:
        return f"images of at most {LARGEST_PERIOD} pixels a side, padding included"
    if not problem.output_is_empty:
        largest = max(math.prod(s) for s in _shapes(problem, 128, 64).values())
        if largest >= 2**31:
            return "more than 2³¹ numbers in a spectrum"
    return None


def configs(problem: Problem) -> tuple[dict[str, Any], ...]:
    """Blocks of the product: as many images as there are, and not many more."""
    if problem.output_is_empty:
        return ({},)
    batch, filters = problem["input"].shape[0], problem["weight"].shape[0]
    block_k = 64 if filters > 32 else 32
    if batch < 16:
        return ({"block_m": 1 << (batch - 1).bit_length(), "block_k": block_k * 2},)
    sizes = [m for m in (16, 32, 64) if m <= max(16, batch)]
    return tuple({"block_m": m, "block_k": block_k} for m in reversed(sizes))


def _shapes(problem: Problem, block_k: int, block_m: int) -> dict[str, tuple[int, ...]]:
    """Spectra, and what lies between two passes: it shares one part of the workspace."""
    period = Period.of(problem)
    filters, channels, lines, _ = problem["weight"].shape
    images = round_up(problem["input"].shape[0], block_m)
    filters = round_up(filters, block_k)
    frequencies = period.half * period.height
    between = max(
        lines * channels * filters * (not problem.is_constant("weight")),
        problem["input"].shape[2] * channels * images,
        problem.output.shape[2] * filters * images,
    )
    return {
        "between": (2 * period.half * between,),
        "images": (2, frequencies, channels, images),
        "products": (2, frequencies, filters, images),
        "weights": (2, frequencies, channels, filters),
    }


def workspace_bytes(problem: Problem, **config: Any) -> int:
    if problem.output_is_empty:
        return 0
    return dft.workspace_bytes(problem, _shapes(problem, **(config or configs(problem)[0])))


# ------------------------------------------------------------------ calls
def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    """Filters that are constant are transformed here, once."""
    if problem.output_is_empty:
        return lambda *inputs, out, workspace=None: out
    chosen = config or configs(problem)[0]
    block_k, block_m = chosen["block_k"], chosen["block_m"]
    period = Period.of(problem)
    shapes = _shapes(problem, block_k, block_m)
    plain = on_plain_units(problem)
    precision = "ieee" if plain else "tf32"
    dilation, stride, padding = (problem.attrs[n] for n in ("dilation", "stride", "padding"))
    of_filter = _points(problem["weight"].shape[2:], dilation)
    of_image = _points(problem["input"].shape[2:], (1, 1), padding)
    of_output = _points(problem.output.shape[2:], stride)
    device = dft.device(constants)  # a captured call must not make the matrices
    for points in (of_filter, of_image):
        forward_matrices(period, points, device)
    inverse_matrices(period, of_output, device)

    def of_filters(
        weight: torch.Tensor, between: torch.Tensor, spectrum: torch.Tensor
    ) -> torch.Tensor:
        forward(weight, between, spectrum, period, of_filter, not plain)
        return spectrum

    def pack(weight: torch.Tensor) -> torch.Tensor:
        c, k = shapes["weights"][2:]
        between = weight.new_empty(2 * period.half * weight.shape[2] * c * k, dtype=torch.float32)
        spectrum = weight.new_zeros(shapes["weights"], dtype=torch.float32)
        return of_filters(weight, between, spectrum)

    weights = None
    if 1 in constants:
        how = ("conv2d.fft", period, block_k, dilation, precision)
        weights = packed(constants[1], how, pack)

    def call(*inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor) -> torch.Tensor:
        x, weight, epilogue = problem.product_operands(constants, inputs)
        between, images, products, *own = dft.carved(workspace, shapes)
        spectrum = of_filters(weight, between, own[0]) if weights is None else weights
        forward(x, between, images, period, of_image, not plain)
        dft.product(spectrum, images, products, block_k=block_k, block_m=block_m,
                    precision=precision, num_warps=8 if block_m == 64 else 4)  # fmt: skip
        inverse(epilogue, products, between, out, period, of_output)
        return out

    return call


Points = tuple[tuple[int, ...], tuple[int, ...]]  # of rows, of columns, on the transform's grid


def _points(sides: Sequence[int], spread: Sequence[int], first: Sequence[int] = (0, 0)) -> Points:
    rows, columns = (tuple(range(f, f + n * s, s)) for n, s, f in zip(sides, spread, first))
    return rows, columns


def forward_matrices(
    period: Period, points: Points, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrices of the forward transform, for rows and for columns."""
    lines, width = (len(p) for p in points)
    of_rows = dft.width_matrix(period.width, points[1], (width, period.width), device)
    frequencies, shape = range(period.height), (2 * lines, 2 * period.height)
    return of_rows, dft.height_matrix(period.height, points[0], frequencies, shape, device)


def inverse_matrices(
    period: Period, points: Points, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrices of the inverse transform, for columns and for rows."""
    lines, width = (len(p) for p in points)
    frequencies, shape = range(period.height), (2 * period.height, 2 * lines)
    of_columns = dft.height_inverse(period.height, frequencies, points[0], shape, device)
    of_rows = dft.width_inverse(period.width, points[1], (period.width, width), device)
    return of_columns, of_rows


def forward(
    image: torch.Tensor,
    between: torch.Tensor,
    spectrum: torch.Tensor,
    period: Period,
    points: Points,
    round_to_tf32: bool,
) -> None:
    """image [N, C, H, W], whose rows and columns lie at ``points`` → [2, frequencies, C, N]."""
    lines, width = image.shape[2:]
    of_rows, of_columns = forward_matrices(period, points, image.device)
    inner = spectrum.shape[3]
    columns = spectrum.shape[2] * inner
    launch(
        _forward_rows,
        (-(-columns // 64), -(-period.half // 64), lines),
        image, of_rows, between, image.shape[0], inner, lines, width, period.half, columns,
        *image.stride(), period.half * lines * columns,
        BLOCK_U=64, BLOCK_R=64, BLOCK_W=16, num_warps=8,
    )  # fmt: skip
    columns_pass(
        between, of_columns, spectrum, lines, period.height, period, columns, round_to_tf32
    )


def columns_pass(
    source: torch.Tensor,
    matrix: torch.Tensor,
    out: torch.Tensor,
    before: int,
    after: int,
    period: Period,
    columns: int,
    round_to_tf32: bool,
) -> None:
    """[2, u, before, columns] → [2, u, after, columns]."""
    launch(
        _columns,
        (-(-columns // 32), -(-after // 64), period.half),
        source, matrix, out, columns, period.half * before * columns,
        period.half * after * columns, before, after,
        BLOCK_B=64, BLOCK_R=32, BLOCK_A=16, ROUND=round_to_tf32, num_warps=8,
    )  # fmt: skip


def inverse(
    epilogue: Epilogue[torch.Tensor],
    spectrum: torch.Tensor,
    between: torch.Tensor,
    out: torch.Tensor,
    period: Period,
    points: Points,
) -> None:
    """Outputs from their spectra [2, frequencies, filters, images], epilogue included."""
    filters, inner = spectrum.shape[2:]
    columns = filters * inner
    lines, width = out.shape[2:]
    of_columns, of_rows = inverse_matrices(period, points, out.device)
    columns_pass(spectrum, of_columns, between, period.height, lines, period, columns, False)
    bias, residual, scale = epilogue.bias, epilogue.residual, epilogue.scale
    beta = float(epilogue.beta)
    launch(
        _inverse_rows,
        (-(-width // 64), -(-columns // 64), lines),
        between, of_rows, out, (bias, residual, scale, float(epilogue.alpha), beta),
        (out.shape[0], inner, out.shape[1], lines, width, period.half, columns), out.stride(),
        (0,) * 4 if residual is None else residual.stride(), period.half * lines * columns,
        BLOCK_R=64, BLOCK_W=64, BLOCK_U=16,
        ACTIVATION=epilogue.activation, num_warps=8,
    )  # fmt: skip
