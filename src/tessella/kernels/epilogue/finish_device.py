"""The epilogue of Hopper's products and convolutions: of several texts the one with least code."""

from __future__ import annotations

from typing import NamedTuple

from tessella.device.hopper import gl, gluon
from tessella.kernels.epilogue.gluon_device import finish
from tessella.kernels.epilogue.int8_device import (
    float_of_int8,
    float_of_small,
    int8_of_float,
    is_clamp,
    quantize_sums,
)
from tessella.kernels.epilogue.sixteen_bit_device import gelu, silu


class Ending(NamedTuple):
    """What is done to sums; constants of the compiler.

    Attributes:
        FOLDED: scale and bias are ``int8.folded``'s.
        SMALL: ``int8.small_sums``: int32 sums are at most 2^22.
        SIXTEEN_BITS: ``sixteen_bit.in_sixteen_bits``.
    """

    ACTIVATION: str | None
    FOLDED: bool = False
    SMALL: bool = False
    SIXTEEN_BITS: bool = False


@gluon.jit
def finish_tile(
    sums, scale, bias, residual, alpha, beta, gamma, ENDING: gl.constexpr, dtype: gl.constexpr
):
    """``gluon_device.finish`` in fewer instructions where the result has 8 bits.

    int8 is read and made without conversions, behind a SiLU by one special function; fp8 behind a
    GELU in pairs of float16.
    ``ENDING``: an ``Ending``, or a record that has its fields too.
    """
    ACTIVATION: gl.constexpr = ENDING.ACTIVATION
    FOLDED: gl.constexpr = ENDING.FOLDED
    SMALL: gl.constexpr = ENDING.SMALL
    if dtype == gl.int8 and is_clamp(ACTIVATION):
        made = quantize_sums(
            sums, scale, bias, residual, alpha, beta, gamma, FOLDED, SMALL, ACTIVATION
        )
    elif ENDING.SIXTEEN_BITS:
        if SMALL:
            sums = float_of_small(sums)
        if residual is not None and dtype == gl.int8:
            residual = float_of_int8(residual)
        x = finish(sums, scale, bias, residual, alpha, beta, None, None, gl.float32)
        made = int8_of_float(silu(x, gamma)) if dtype == gl.int8 else gelu(x, gamma).to(dtype)
    else:
        MADE: gl.constexpr = gl.float32 if dtype == gl.int8 else dtype
        if SMALL:
            sums = float_of_small(sums)
        if residual is not None and dtype == gl.int8:
            residual = float_of_int8(residual)
        made = finish(sums, scale, bias, residual, alpha, beta, gamma, ACTIVATION, MADE)
        if dtype == gl.int8:
            made = int8_of_float(made)
    return made
