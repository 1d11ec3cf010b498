"""Fourier transforms as matrix products, and the product of two spectra: for fft and fft_tiling.

Along an image's width the frequencies are half-integers, 2π(u + ½)/T for u < T/2: the T real
numbers of a row become T/2 complex ones with none left over, and what wraps around comes back with
the sign reversed, which does not matter where it is thrown away. Along the height they are
integers, 2πv/T for v < T. A spectrum is a float32 tensor [2 (real, imaginary), T/2 · T (u, v),
channels, images].

Sources: G. Bongiovanni, P. Corsini, G. Frosini, "One-dimensional and two-dimensional generalized
discrete Fourier transforms", IEEE Trans. ASSP 24(1), 1976; M. Mathieu, M. Henaff, Y. LeCun, "Fast
training of convolutional networks through FFTs", 2014; N. Vasilache et al., "Fast convolutional
nets with fbfft", 2015 (tiles).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tessella.core.dtype import FLOATS, SIXTEEN_BIT
from tessella.core.integers import round_up
from tessella.device.launch import launch
from tessella.kernels.conv import tiles
from tessella.operations.problem import Problem

BLOCK_C = 16  # channels of a step of the product


def refusal(problem: Problem) -> str | None:
    """Why neither algorithm takes the problem, or None."""
    refused = tiles.refusal(problem, FLOATS)
    if refused is not None:
        return refused
    if problem.output.dtype not in FLOATS:
        return f"makes {', '.join(FLOATS)}, not {problem.output.dtype}"
    if len(problem.output.shape) != 4:
        return "two spatial axes only"
    if problem.attrs["groups"] != 1:
        return "one group only"
    return None


def outclassed(problem: Problem) -> str | None:
    """Small filters leave little to save, and tensor cores multiply 16 bits ten times as fast."""
    x, weight = problem["input"], problem["weight"]
    if x.dtype in SIXTEEN_BIT and max(weight.shape[2:]) <= 7:
        return "16 bits, filters up to 7×7: 2.2 times the fastest's time at best in 252 problems"
    return None


def device(constants: Mapping[int, torch.Tensor]) -> torch.device:
    """Where a bound kernel will run, as far as ``bind`` can know."""
    for tensor in constants.values():
        return tensor.device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@functools.cache
def width_matrix(
    period: int, points: tuple[int, ...], shape: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """Real numbers at ``points`` of a row → (u, real or imaginary): [len(points), T], padded."""
    angle = _angles(points, range(period // 2), period, 0.5)
    return _padded(torch.stack((angle.cos(), -angle.sin()), 2).flatten(1), shape, device)


@functools.cache
def height_matrix(
    period: int,
    points: tuple[int, ...],
    frequencies: range,
    shape: tuple[int, int],
    device: torch.device,
) -> torch.Tensor:
    """Complex numbers at ``points`` of a column → v: [(len(points), 2), (frequencies, 2)]."""
    return _padded(_complex(-_angles(points, frequencies, period, 0.0)), shape, device)


@functools.cache
def height_inverse(
    period: int,
    frequencies: range,
    points: tuple[int, ...],
    shape: tuple[int, int],
    device: torch.device,
) -> torch.Tensor:
    """Frequencies v of a column → their share of the complex numbers at ``points``: [(frequencies,
    2), (len(points), 2)].
    """
    matrix = _complex(_angles(points, frequencies, period, 0.0).T) / period
    return _padded(matrix, shape, device)


@functools.cache
def width_inverse(
    period: int, points: tuple[int, ...], shape: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """(u, real or imaginary) → real numbers at ``points`` of a row: [T, len(points)], padded.

    Twice the real part, for the frequencies −u − 1 that a real row's spectrum repeats conjugated.
    """
    angle = _angles(points, range(period // 2), period, 0.5).T
    matrix = torch.stack((angle.cos(), -angle.sin()), 1).flatten(0, 1) * (2 / period)
    return _padded(matrix, shape, device)


def _angles(points: tuple[int, ...], frequencies: range, period: int, shift: float) -> torch.Tensor:
    """2π (frequency + shift) · point / period, reduced exactly: [points, frequencies]."""
    twice = torch.tensor(frequencies) * 2 + int(2 * shift)
    turns = torch.outer(torch.tensor(points), twice) % (2 * period)
    return turns.double() * (math.pi / period)


def _complex(angle: torch.Tensor) -> torch.Tensor:
    """exp(i·angle) [A, B] as a real matrix [(A, 2), (B, 2)]: a row of (re, im) times it."""
    cos, sin = angle.cos(), angle.sin()
    rows = (torch.stack((cos, sin), 2), torch.stack((-sin, cos), 2))  # [A, B, 2] each
    return torch.stack(rows, 1).flatten(2).flatten(0, 1)


def _padded(matrix: torch.Tensor, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    made = torch.zeros(shape, dtype=torch.float32)
    made[: matrix.shape[0], : matrix.shape[1]] = matrix
    return made.to(device)


@triton.jit
def rounded(x, ROUND: tl.constexpr):
    """float32 to the nearest TF32 if ROUND: tensor cores would cut the last 13 bits off."""
    if ROUND:
        x = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _product(
    weights, images, out, C, KL, ML, weight_plane, image_plane, out_plane,
    BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
    EVEN_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[f, k, m] = Σ_c conj(weights[f, c, k]) · images[f, c, m], complex in two planes."""
    # one axis of blocks: the others end at 65535, and there may be more frequencies
    block = tl.program_id(0)
    across, down = ML // BLOCK_M, KL // BLOCK_K
    f = (block // (across * down)).to(tl.int64)
    k = block // across % down * BLOCK_K + tl.arange(0, BLOCK_K)
    m = block % across * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    w = weights + f * C * KL + c[:, None] * KL + k[None, :]
    x = images + f * C * ML + c[:, None] * ML + m[None, :]
    real = tl.zeros((BLOCK_K, BLOCK_M), tl.float32)
    imaginary = tl.zeros((BLOCK_K, BLOCK_M), tl.float32)
    for start in range(0, C, BLOCK_C):
        if EVEN_C:
            w_re, w_im = tl.load(w), tl.load(w + weight_plane)
            x_re, x_im = tl.load(x), tl.load(x + image_plane)
        else:
            inside = (start + c < C)[:, None]
            w_re = tl.load(w, mask=inside, other=0.0)
            w_im = tl.load(w + weight_plane, mask=inside, other=0.0)
            x_re = tl.load(x, mask=inside, other=0.0)
            x_im = tl.load(x + image_plane, mask=inside, other=0.0)
        w_re, w_im = tl.trans(w_re), tl.trans(w_im)
        real = tl.dot(w_re, x_re, real, input_precision=PRECISION)
        real = tl.dot(w_im, x_im, real, input_precision=PRECISION)
        imaginary = tl.dot(w_re, x_im, imaginary, input_precision=PRECISION)
        imaginary = tl.dot(w_im, -x_re, imaginary, input_precision=PRECISION)
        w += BLOCK_C * KL
        x += BLOCK_C * ML
    y = out + (f * KL + k[:, None]) * ML + m[None, :]
    tl.store(y, real)
    tl.store(y + out_plane, imaginary)


@triton.jit
def _product_of_few(
    weights, images, out, C, KL, weight_plane, image_plane, out_plane,
    BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """``_product`` for few images: the filters' spectrum is read once, at the memory's speed."""
    block = tl.program_id(0)
    down = KL // BLOCK_K
    f = (block // down).to(tl.int64)
    k = block % down * BLOCK_K + tl.arange(0, BLOCK_K)
    m = tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    w = weights + f * C * KL + c[:, None] * KL + k[None, :]
    x = images + f * C * BLOCK_M + c[:, None] * BLOCK_M + m[None, :]
    real = tl.zeros((BLOCK_C, BLOCK_K, BLOCK_M), tl.float32)
    imaginary = tl.zeros((BLOCK_C, BLOCK_K, BLOCK_M), tl.float32)
    for start in range(0, C, BLOCK_C):
        inside = (start + c < C)[:, None]
        w_re = tl.load(w, mask=inside, other=0.0)[:, :, None]
        w_im = tl.load(w + weight_plane, mask=inside, other=0.0)[:, :, None]
        x_re = tl.load(x, mask=inside, other=0.0)[:, None, :]
        x_im = tl.load(x + image_plane, mask=inside, other=0.0)[:, None, :]
        real += w_re * x_re + w_im * x_im
        imaginary += w_re * x_im - w_im * x_re
        w += BLOCK_C * KL
        x += BLOCK_C * BLOCK_M
    y = out + (f * KL + k[:, None]) * BLOCK_M + m[None, :]
    tl.store(y, tl.sum(real, 0))
    tl.store(y + out_plane, tl.sum(imaginary, 0))


def product(
    weights: torch.Tensor,
    images: torch.Tensor,
    out: torch.Tensor,
    *,
    block_k: int,
    block_m: int,
    precision: str,
    num_warps: int,
) -> None:
    """The spectrum of a correlation, in ``out``.

    Args:
        weights: [2, frequencies, C, K], K padded to a multiple of ``block_k``.
        images: [2, frequencies, C, M], M padded to a multiple of ``block_m``.
        out: [2, frequencies, K, M].
        block_m: below 16, M itself.
    """
    _, frequencies, c, k = weights.shape
    m = images.shape[3]
    planes = (weights.stride(0), images.stride(0), out.stride(0))
    if block_m < 16:
        launch(
            _product_of_few, (k // block_k * frequencies,), weights, images, out, c, k, *planes,
            BLOCK_K=block_k, BLOCK_M=block_m, BLOCK_C=max(1, 16 // block_m), num_warps=4,
        )  # fmt: skip
        return
    launch(
        _product,
        (m // block_m * (k // block_k) * frequencies,),
        weights, images, out, c, k, m, *planes,
        BLOCK_K=block_k, BLOCK_M=block_m, BLOCK_C=BLOCK_C, EVEN_C=c % BLOCK_C == 0,
        PRECISION=precision, num_warps=num_warps, num_stages=3,
    )  # fmt: skip


def workspace_bytes(problem: Problem, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes that ``carved`` takes; a constant weight's spectrum is not in the workspace."""
    constant = ("weights",) if problem.is_constant("weight") else ()
    parts = (math.prod(shape) for name, shape in shapes.items() if name not in constant)
    return sum(round_up(4 * part, 256) for part in parts)


def carved(workspace: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]) -> list[torch.Tensor]:
    """float32 tensors of these shapes, as parts of the workspace; as many as it has room for."""
    parts, start = [], 0
    for shape in shapes.values():
        end = start + 4 * math.prod(shape)
        if end > workspace.numel():
            break
        parts.append(workspace[start:end].view(torch.float32).view(shape))
        start = round_up(end, 256)
    return parts
