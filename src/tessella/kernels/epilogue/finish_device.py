"""The epilogue of Hopper's products and convolutions: of several texts the one with least code."""

from __future__ import annotations

from tessella.device.hopper import gl, gluon
from tessella.kernels.epilogue.gluon_device import finish
from tessella.kernels.epilogue.int8_device import (
    float_of_int8,
    float_of_small,
    int8_of_float,
    is_clamp,
    quantize_sums,
)
from tessella.kernels.epilogue.sixteen_bit_device import gelu


@gluon.jit
def finish_tile(
    sums,
    scale,
    bias,
    residual,
    alpha,
    beta,
    gamma,
    FOLDED: gl.constexpr,
    SMALL: gl.constexpr,
    SIXTEEN_BITS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    dtype: gl.constexpr,
):
    """``gluon_device.finish`` in fewer instructions where the result has 8 bits.

    int8 is read and made without conversions, and fp8 behind a GELU in pairs of float16.

    Args:
        FOLDED, SMALL: as in ``int8_device.quantize_sums``; FOLDED only where that is asked.
        SIXTEEN_BITS: ``sixteen_bit.in_sixteen_bits``.
    """
    if dtype == gl.int8 and is_clamp(ACTIVATION):
        made = quantize_sums(
            sums, scale, bias, residual, alpha, beta, gamma, FOLDED, SMALL, ACTIVATION
        )
    elif SIXTEEN_BITS:
        x = finish(sums, scale, bias, residual, alpha, beta, None, None, gl.float32)
        made = gelu(x, gamma).to(dtype)
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
