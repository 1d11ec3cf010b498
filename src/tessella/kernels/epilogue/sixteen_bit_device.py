"""Activations of 8-bit results, on the device, to the precision of 16 bits.

A tile's epilogue is straight code, and bringing it is what the tile waits for. e4m3 keeps 4 bits of
a number, so 11 are enough on the way, and one instruction then makes two elements. Of special
functions a multiprocessor makes 16 a clock: two for each SiLU of 512 channels at 80², 32 images,
are 58 µs of an H200 [derived].
"""

from __future__ import annotations

from tessella.device.hopper import gl, gluon

ONE = gl.constexpr(1.0)


@gluon.jit
def gelu(x, gamma):
    """``gamma · x Φ(x)`` as float16, of float32; gamma a float32 number, or None for 1, as
    ``sixteen_bit.in_sixteen_bits`` wants it.

    As ``gluon_device.gelu``, by a polynomial of degree 4: log2(1 - Φ(z)) on [0, 5.5] to 3e-4 of
    the result's scale. Rounded to e4m3, at most 0.65 of a step from the exact number (0.5 at best),
    and 1 % of random numbers become another e4m3 number. NaN stays. Each thread has pairs.
    """
    factor = ONE if gamma is None else gamma
    factor = gl.full(x.shape, factor, gl.float32, layout=x.type.layout)
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 h, n, p, g, c0, c1, c2, c3, c4, least, zero;
        mov.b32 c4, 0x18E618E6;
        mov.b32 c3, 0x28992899;
        mov.b32 c2, 0xB7B7B7B7;
        mov.b32 c1, 0x3C8E3C8E;
        mov.b32 c0, 0xBC02BC02;
        mov.b32 least, 0xC580C580;
        mov.b32 zero, 0x00000000;
        cvt.rn.f16x2.f32 h, $2, $1;
        cvt.rn.f16x2.f32 g, $4, $3;
        or.b32 n, h, 0x80008000;
        max.f16x2 n, n, least;
        fma.rn.f16x2 p, c4, n, c3;
        fma.rn.f16x2 p, p, n, c2;
        fma.rn.f16x2 p, p, n, c1;
        fma.rn.f16x2 p, p, n, c0;
        ex2.approx.f16x2 p, p;
        max.NaN.f16x2 h, h, zero;
        fma.rn.f16x2 h, n, p, h;
        mul.rn.f16x2 $0, h, g;
        }""",
        "=r,f,f,f,f",
        [x, factor],
        dtype=gl.float16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def silu(x, gamma):
    """``gamma · x / (1 + exp(-x))`` of float32, as h + h tanh(h) with h = x / 2: its error is 2⁻¹¹
    of h, or less. One special function instead of two.
    """
    half = x * 0.5
    turned = gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=gl.float32, is_pure=True, pack=1
    )
    if gamma is not None:
        half = half * gamma
    return half + half * turned
