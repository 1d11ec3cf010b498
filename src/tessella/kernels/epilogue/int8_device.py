"""8-bit integers on the device without conversion instructions: what bounds an epilogue's stores.

Those instructions make 16 results a clock and multiprocessor, additions 128. Three conversions an
element (sum, residual, result) bounded 8-bit convolutions with a residual: 93 µs for 64 → 256
channels at 56 × 56, 128 images, on an H200. A float32 of 2^23 and more holds an integer in its low
bits, so adding such a number converts.
"""

from __future__ import annotations

from tessella.device.hopper import gl, gluon
from tessella.kernels.epilogue import int8

SHIFT = gl.constexpr(int8.SHIFT)
BYTES = gl.constexpr(int8.BYTES)


@gluon.jit
def float_of_small(x):
    """int32 from -2^22 to 2^22 → float32."""
    return (x + 0x4B400000).to(gl.float32, bitcast=True) - SHIFT


@gluon.jit
def float_of_int8(x):
    """int8 → float32; four elements, or a multiple, in each thread."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 u, f0, f1, f2, f3;
        xor.b32 u, $4, 0x80808080;
        prmt.b32 f0, u, 0x4B000000, 0x7440;
        prmt.b32 f1, u, 0x4B000000, 0x7441;
        prmt.b32 f2, u, 0x4B000000, 0x7442;
        prmt.b32 f3, u, 0x4B000000, 0x7443;
        add.rn.f32 $0, f0, 0fCB000080;
        add.rn.f32 $1, f1, 0fCB000080;
        add.rn.f32 $2, f2, 0fCB000080;
        add.rn.f32 $3, f3, 0fCB000080;
        }""",
        "=f,=f,=f,=f,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def int8_of_float(x):
    """float32 → int8, half to even, saturated; four elements, or a multiple, in each thread."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 f0, f1, f2, f3;
        .reg .b32 low, high;
        max.f32 f0, $1, 0fC3000000;
        max.f32 f1, $2, 0fC3000000;
        max.f32 f2, $3, 0fC3000000;
        max.f32 f3, $4, 0fC3000000;
        min.f32 f0, f0, 0f42FE0000;
        min.f32 f1, f1, 0f42FE0000;
        min.f32 f2, f2, 0f42FE0000;
        min.f32 f3, f3, 0f42FE0000;
        add.rn.f32 f0, f0, 0f4B400000;
        add.rn.f32 f1, f1, 0f4B400000;
        add.rn.f32 f2, f2, 0f4B400000;
        add.rn.f32 f3, f3, 0f4B400000;
        prmt.b32 low, f0, f1, 0x0040;
        prmt.b32 high, f2, f3, 0x0040;
        prmt.b32 $0, low, high, 0x5410;
        }""",
        "=r,f,f,f,f",
        [x],
        dtype=gl.int8,
        is_pure=True,
        pack=4,
    )


@gluon.constexpr_function
def is_clamp(activation):
    """Whether an activation is a part of rounding to int8: what ``quantize_sums`` takes."""
    return activation is None or activation == "relu"


@gluon.jit
def quantize_sums(
    sums,
    scale,
    bias,
    residual,
    alpha,
    beta,
    gamma,
    FOLDED: gl.constexpr,
    SMALL: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """int8 of ``gamma * activation(alpha * scale * sums + bias + beta * residual)``.

    As ``finish`` and ``int8_of_float`` in about half the instructions, for the two activations that
    are a clamp: a tile's epilogue is straight code of some hundred elements, and of what it costs
    the most is bringing its instructions (an H200: 256 → 1024 channels at 14 × 14, 128 images, 39
    → 34 µs). All is counted in ranges: 128 steps behind a ReLU, else 256, so that one saturating
    multiply-add clamps for nothing. Off by 0.02 steps at most where ``int8.small_sums``
    and ``refusal`` are asked before: one integer of 100 is its neighbour. Exact floats of sums and
    residual (an addition an element each) leave one of 100,000, and cost 17 % there, 8 % at 128 →
    512 channels at 28 × 28, nothing where memory bounds.

    Args:
        sums: int32, or float32.
        scale, bias: as in ``finish``; with FOLDED both are given, as ``int8.vectors``
            makes them.
        residual: int8, or None.
        SMALL: ``int8.small_sums``: sums are int32 and at most 2^22.
        ACTIVATION: "relu" or None.
    """
    STEPS: gl.constexpr = 128.0 if ACTIVATION == "relu" else 256.0
    step = 1.0 / STEPS
    if gamma is not None:
        step = step * gamma
    if FOLDED:
        factor = scale
        offset = bias
    else:
        factor = alpha * step
        if scale is not None:
            factor = scale * factor
        offset = 0.0 if ACTIVATION == "relu" else 0.5
        if bias is not None:
            offset = bias * step + offset
        if SMALL:
            offset = offset - SHIFT * factor
        if residual is not None:
            offset = offset - BYTES * (beta * step)
    if SMALL:
        x = (sums + 0x4B400000).to(gl.float32, bitcast=True)
    else:
        x = sums.to(gl.float32)
    if FOLDED or scale is not None:
        factor, _ = gl.broadcast(factor, x)
    else:
        factor = gl.full(x.shape, factor, gl.float32, layout=x.type.layout)
    if FOLDED or bias is not None or (SMALL and scale is not None):
        offset, _ = gl.broadcast(offset, x)
    else:
        offset = gl.full(x.shape, offset, gl.float32, layout=x.type.layout)
    if residual is None:
        x = fma(x, factor, offset, True)
    else:
        x = fma(x, factor, offset, False)
        weight = gl.full(x.shape, beta * step, gl.float32, layout=x.type.layout)
        x = fma(float_of_shifted_int8(residual), weight, x, True)
    steps = gl.full(x.shape, STEPS, gl.float32, layout=x.type.layout)
    low = gl.full(x.shape, SHIFT, gl.float32, layout=x.type.layout)
    if ACTIVATION is None:
        low -= 128.0
    return pack_int8(fma(x, steps, low, False))


@gluon.jit
def fma(x, y, z, SATURATED: gl.constexpr):
    """x · y + z, rounded once; SATURATED: at least 0 and at most 1, and 0 for NaN."""
    TYPE: gl.constexpr = "sat.f32" if SATURATED else "f32"
    return gl.inline_asm_elementwise(
        "fma.rn." + TYPE + " $0, $1, $2, $3;",
        "=f,f,f,f",
        [x, y, z],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def float_of_shifted_int8(x):
    """int8 → float32 of x + ``BYTES``; four elements, or a multiple, in each thread."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 u;
        xor.b32 u, $4, 0x80808080;
        prmt.b32 $0, u, 0x47000000, 0x7404;
        prmt.b32 $1, u, 0x47000000, 0x7414;
        prmt.b32 $2, u, 0x47000000, 0x7424;
        prmt.b32 $3, u, 0x47000000, 0x7434;
        }""",
        "=f,=f,=f,=f,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def pack_int8(x):
    """float32 of ``SHIFT`` + an integer from -128 to 128 → int8, of 128 127."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, most;
        mov.b32 most, 0x007F007F;
        prmt.b32 low, $1, $2, 0x5410;
        prmt.b32 high, $3, $4, 0x5410;
        min.s16x2 low, low, most;
        min.s16x2 high, high, most;
        prmt.b32 $0, low, high, 0x6420;
        }""",
        "=r,f,f,f,f",
        [x],
        dtype=gl.int8,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def by_channel(sums):
    """Sums in the order of channels, where sum 8 j + q of every 64 is that of channel j + 8 q.

    The weights' rows were spread so, to give a thread 16 neighbours of a row: no data moves here.
    """
    ROWS: gl.constexpr = sums.shape[0]
    COLUMNS: gl.constexpr = sums.shape[1]
    blocks = sums.reshape([ROWS, COLUMNS // 64, 8, 8])
    return blocks.permute((0, 1, 3, 2)).reshape([ROWS, COLUMNS])


@gluon.constexpr_function
def sorted_layout(layout):
    """The same elements in each thread, neighbours beside each other: wide loads of vectors."""
    if not isinstance(layout, gl.DistributedLinearLayout):
        return layout
    return gl.DistributedLinearLayout(
        reg_bases=sorted(layout.reg_bases),
        lane_bases=layout.lane_bases,
        warp_bases=layout.warp_bases,
        block_bases=layout.block_bases,
        shape=layout.shape,
    )
